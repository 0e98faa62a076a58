"""Which worker is killed and which comes back, and at which step: planned beforehand from the seed, so that a run can be repeated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

LONG_ABSENCE = 30  # versions that the first worker misses, where the run is long enough
LAST_RETURN = 0.7  # share of the steps after which nobody is away: everyone has time to catch up
STAY = 2  # workers that are never away at the same time


@dataclass(frozen=True, slots=True)
class Change:
    """At `step`, the worker in `place` is killed (SIGKILL), or joins again with the identity and the files it had."""

    step: int
    place: int
    kind: Literal["kill", "join"]


def one_kill(steps: int) -> list[Change]:
    """The first worker dies at a third of the steps and stays away."""
    return [Change(max(1, steps // 3), 0, "kill")]


def churn(workers: int, steps: int, seed: int) -> list[Change]:
    """Every worker dies now and then and comes back; the first stays away for LONG_ABSENCE versions. In order of step."""
    rng = Random(seed)  # noqa: S311 (a schedule, not a secret)
    last = int(LAST_RETURN * steps)
    begun = max(1, steps // 10)
    away = {0: min(begun + LONG_ABSENCE, last)} if workers > STAY and begun < last else {}
    changes = [Change(begun, 0, "kill"), Change(away[0], 0, "join")] if away else []
    for step in range(begun + 1, last, max(2, steps // (3 * workers))):
        present = [place for place in range(workers) if away.get(place, 0) < step]
        if len(present) <= STAY:
            continue
        place = rng.choice(present)
        away[place] = min(step + rng.randint(2, 6), last)
        changes += [Change(step, place, "kill"), Change(away[place], place, "join")]
    return sorted(changes, key=lambda change: (change.step, change.kind))


def longest_absence(changes: Sequence[Change]) -> int:
    """Steps between a kill and the return that follows it, at most."""
    left: dict[int, int] = {}
    longest = 0
    for change in changes:
        if change.kind == "kill":
            left[change.place] = change.step
        else:
            longest = max(longest, change.step - left.pop(change.place, change.step))
    return longest
