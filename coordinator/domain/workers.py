"""Whether a worker may take leases, what its faults lead to, and when it counts as lost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from coordinator.domain.model import Worker, WorkerState

_WHY_NOT: Final[Mapping[WorkerState, str]] = {
    WorkerState.STANDBY: "no version of a running job is confirmed in this session yet",
    WorkerState.DRAINING: "finishes its leases and leaves",
    WorkerState.QUARANTINED: "too many faults",
    WorkerState.GONE: "left or lost; join again to work",
}


def standing(worker: Worker, *, holds_newest_usable: bool) -> tuple[bool, str]:
    """Whether the worker may take leases, and the reason in words that its owner reads.

    `holds_newest_usable`: it confirmed a version that can still serve the learner's next step.
    """
    if worker.state is WorkerState.ACTIVE:
        if holds_newest_usable:
            return True, "active"
        return False, "waiting for weights: the version it holds is too old for the next step"
    return False, f"{worker.state.value}: {worker.reason or _WHY_NOT[worker.state]}"


def after_fault(worker: Worker, *, limit: int) -> tuple[int, WorkerState, str]:
    """Strikes, state and reason after one more fault that is the worker's own. Accepted work resets the strikes."""
    strikes = worker.strikes + 1
    if worker.state is WorkerState.QUARANTINED or strikes < limit:
        return strikes, worker.state, worker.reason
    return strikes, WorkerState.QUARANTINED, f"{strikes} faults in a row, the limit is {limit}"


def is_lost(last_seen_at: float, *, now: float, lost_after_s: float) -> bool:
    """Whether the silence is longer than a live worker's can be."""
    return now - last_seen_at > lost_after_s


def is_served(worker: Worker, *, now: float, quarantine_s: float) -> bool:
    """Whether a quarantine ends by its timer. The strikes stay: the next fault leads straight back."""
    return worker.state is WorkerState.QUARANTINED and now - worker.state_since >= quarantine_s
