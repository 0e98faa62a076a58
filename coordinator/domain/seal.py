"""Which ready groups make the learner's next batch (DESIGN 4.6).

B whole groups, lowest issue number first, each with its exact staleness (law 1). Never by arrival, never waiting for one
slow group. Groups whose rewards are all alike teach nothing: while replacements are left they are rejected, so that others
are issued in their place; after that the step takes groups with signal first and fills up with the rest at zero weight.
Rejection reasons start with a stable code and a colon: ``stale: ...``, ``no_signal: ...``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coordinator.domain.groups import is_zero_variance
from coordinator.domain.staleness import staleness


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """What the seal needs to know of a READY group."""

    number: int
    oldest_version: int
    rewards: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class Seal:
    """The batch, if there is one, and the groups that are rejected now (whether or not a batch was sealed)."""

    groups: tuple[int, ...] | None  # ascending issue numbers; None: not enough groups are ready
    no_signal: bool  # some group of the batch has zero weight
    zero_weight: tuple[int, ...]
    rejected: tuple[tuple[int, str], ...]  # (number, reason)
    staleness: dict[int, int] = field(default_factory=dict)  # staleness -> groups of the batch
    reason: str = ""


def choose(
    ready: Sequence[ReadyGroup], *, step: int, bound: int, groups_per_step: int, max_replacements: int, replaced: int
) -> Seal:
    """The batch of `step`. `replaced` counts the groups that were already rejected as no_signal for this step.

    Raises StalenessError for a version newer than the step: a version from the future is a fault, never a pass.
    """
    usable, stale = _split_by_staleness(ready, step, bound)
    replacements = max(max_replacements - replaced, 0)
    signal, dull, no_signal = _walk(usable, groups_per_step, replacements, step)
    rejected = tuple(sorted(stale + no_signal))
    if len(signal) + len(dull) < groups_per_step:
        reason = f"{len(signal) + len(dull)} of {groups_per_step} groups are ready for step {step}"
        return Seal(None, False, (), rejected, {}, reason)
    filling = dull[: groups_per_step - len(signal)]
    batch = sorted(signal + filling, key=lambda group: group.number)
    spread = Counter(staleness(step, group.oldest_version) for group in batch)
    words = f", {len(filling)} of them at zero weight (their rewards are all alike)" if filling else ""
    return Seal(
        groups=tuple(group.number for group in batch),
        no_signal=bool(filling),
        zero_weight=tuple(group.number for group in filling),
        rejected=rejected,
        staleness=dict(sorted(spread.items())),
        reason=f"sealed {len(batch)} groups for step {step}{words}",
    )


def teaches_nothing(groups: Sequence[Sequence[float | None]]) -> bool:
    """Whether in no group of a step's batch two scores differ, so that no advantage is left. `groups`: the rewards of each."""
    return all(is_zero_variance(rewards) for rewards in groups)


def _split_by_staleness(ready: Sequence[ReadyGroup], step: int, bound: int) -> tuple[list[ReadyGroup], list[tuple[int, str]]]:
    usable: list[ReadyGroup] = []
    stale: list[tuple[int, str]] = []
    for group in sorted(ready, key=lambda group: group.number):
        age = staleness(step, group.oldest_version)
        if age <= bound:
            usable.append(group)
            continue
        words = f"stale: oldest version {group.oldest_version} has staleness {age} in step {step}, the bound is {bound}"
        stale.append((group.number, words))
    return usable, stale


def _walk(
    usable: Sequence[ReadyGroup], groups_per_step: int, replacements: int, step: int
) -> tuple[list[ReadyGroup], list[ReadyGroup], list[tuple[int, str]]]:
    """In issue order until the step is full of signal: groups with signal, groups without, rejected ones."""
    signal: list[ReadyGroup] = []
    dull: list[ReadyGroup] = []
    rejected: list[tuple[int, str]] = []
    for group in usable:
        if len(signal) == groups_per_step:
            break
        if not is_zero_variance(group.rewards):
            signal.append(group)
        elif len(rejected) < replacements:
            rejected.append((group.number, f"no_signal: rewards are all alike, replaced in step {step}"))
        else:
            dull.append(group)
    return signal, dull, rejected
