"""The laws that a simulation checks while it runs, on the coordinator's rows."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.domain.model import Batch, PublicationState
from coordinator.domain.staleness import staleness
from simulator.coordinator import Coordinator


class LawBroken(Exception):
    """A law does not hold; the message says which, where, and how it came to it."""


def check_batch(coordinator: Coordinator, batch: Batch) -> None:
    """Law 1: every token of a sealed batch is within the bound; the batch is the learner's next."""
    if batch.step != coordinator.job.committed_steps:
        raise LawBroken(f"batch of step {batch.step} sealed, the learner's next step is {coordinator.job.committed_steps}")
    lost = {p.digest for p in coordinator.publications if p.state is PublicationState.ROLLED_BACK}
    for number in batch.groups:
        for row in coordinator.rollouts[number]:
            if row.oldest_version is None:
                continue
            age = staleness(batch.step, row.oldest_version)
            if age > coordinator.bound:
                raise LawBroken(f"group {number} slot {row.slot} has staleness {age} in step {batch.step}")
            if lost & set(row.digests.values()):
                raise LawBroken(f"group {number} slot {row.slot} carries a rolled-back digest in step {batch.step}")


class Starvation:
    """An idle worker with a usable version finds work within one beat whenever less than one step is issued (n < B)."""

    def __init__(self, beat_s: float) -> None:
        self._beat_s = beat_s
        self._since: dict[str, float] = {}

    def check(self, coordinator: Coordinator, idle: Iterable[str], now: float) -> None:
        """Look at the rows after an event; `idle` names workers that are up and generate nothing."""
        job = coordinator.job
        wanting: set[str] = set()
        if len(coordinator.unsettled) < job.config.algorithm.groups_per_step and job.committed_steps < job.config.budget.steps:
            for worker_id in idle:
                version = coordinator.newest_held(worker_id)
                if version is None or version < job.committed_steps - coordinator.bound:
                    continue
                grant = coordinator.grant_for(version)
                if grant.groups < 1:
                    raise LawBroken(f"worker {worker_id} is idle with version {version} and gets nothing: {grant.reason}")
                wanting.add(worker_id)
        self._since = {worker_id: self._since.get(worker_id, now) for worker_id in wanting}
        for worker_id, since in self._since.items():
            if now - since > self._beat_s:
                raise LawBroken(f"worker {worker_id} is idle since {since:.1f} s although groups are grantable")

    def pause(self) -> None:
        """The coordinator is down: nobody can be granted anything."""
        self._since = {}
