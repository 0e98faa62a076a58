"""When a job uses the pool of workers, and with how many others it shares it: what its cost derives from.

A job uses the pool from its first learner's start to its end, except while it is paused or queued.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

from coordinator.domain.model import Event, JobState

STOPS = frozenset({"paused", "job_completed", "job_failed", "job_cancelled"})
KINDS = ("learner_starting", "resumed", *sorted(STOPS))
Span = tuple[float, float]
"""From, to; Unix seconds."""


@dataclass(frozen=True, slots=True)
class Share:
    """A time in which `jobs` jobs used the pool at once, this one included."""

    start: float
    end: float
    jobs: int


def spans(changes: Sequence[Event]) -> tuple[Span, ...]:
    """The times of use, from the job's events of KINDS in order; the last one is open (infinite) while it lasts."""
    found: list[Span] = []
    since: float | None = None
    for event in changes:
        if event.kind in STOPS:
            if since is not None:
                found.append((since, event.at))
            since = None
        elif since is None and _begins(event):
            since = event.at
    return (*found, (since, inf)) if since is not None else tuple(found)


def _begins(event: Event) -> bool:
    return event.kind == "learner_starting" or (event.kind == "resumed" and event.data.get("state") != JobState.QUEUED)


def shares(own: Sequence[Span], others: Sequence[Sequence[Span]]) -> tuple[Share, ...]:
    """`own` cut wherever another job begins or ends to use the pool."""
    points = sorted({point for other in others for span in other for point in span})
    found: list[Share] = []
    for start, end in own:
        cuts = [start, *(point for point in points if start < point < end), end]
        found.extend(
            Share(a, b, 1 + sum(any(begin <= a < stop for begin, stop in other) for other in others)) for a, b in pairwise(cuts)
        )
    return tuple(found)
