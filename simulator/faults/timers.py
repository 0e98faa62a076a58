"""Law 5 and law 8: what must not last while the coordinator runs. A state that outlives its timer by a little is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from coordinator.domain.market_trials import too_dear
from coordinator.domain.model import (
    Group,
    GroupState,
    Holding,
    JobState,
    Lease,
    LeaseState,
    Rollout,
    RolloutState,
    Worker,
    WorkerState,
)

if TYPE_CHECKING:
    from simulator.faults.world import World

SOON_S = 3.5  # a sweep comes every second
AT_ONCE_S = 1.5  # the sweep after next at the latest
GRADED_S = 6.0
STARVED_S = 40.0  # lost messages and back-offs included
PRESENT = (WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING)
ENDED = (GroupState.TRAINED, GroupState.REJECTED, GroupState.VOID)


class Timers:
    """Since when something holds that should end by itself."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tables = world.rows.tables
        self._since: dict[str, float] = {}
        self._life = 0

    def clock_stepped(self, by_s: float) -> None:  # noqa: ARG002
        """Times that are compared with the wall begin anew."""
        self._since.clear()

    def swept(self) -> None:
        """The sweep has just written its rows: no lease is left that no step can use."""
        job = self._world.job
        for lease in self._tables[Lease].values():
            latest = min(lease.last_step, lease.version + job.config.staleness.max)
            if lease.state is LeaseState.LIVE and job.committed_steps > latest:
                self._world.broke(
                    f"law 5: the sweep left lease {lease.id} of version {lease.version} at step {job.committed_steps}"
                )

    def look(self) -> None:
        """Note what holds now, and complain about what holds too long."""
        host = self._world.host
        if host.deps is None or host.life != self._life:
            self._since.clear()
            self._life = host.life
            return
        now = self._world.loop.time()
        found = dict(self._lasting())
        self._since = {words: self._since.get(words, now) for words in found}
        for words, limit_s in found.items():
            if now - self._since[words] > limit_s:
                self._world.broke(f"law 5: {words}, for {now - self._since[words]:.1f} s")

    def _lasting(self) -> Iterator[tuple[str, float]]:
        """(what, how long it may last)."""
        yield from self._leases()
        yield from self._workers()
        yield from self._groups()
        yield from self._starving()

    def _leases(self) -> Iterator[tuple[str, float]]:
        now, job = self._world.host.clock.now(), self._world.job
        for lease in self._tables[Lease].values():
            if lease.state is not LeaseState.LIVE:
                continue
            if now > lease.deadline:
                yield f"lease {lease.id} is live after its wall deadline", SOON_S
            if job.committed_steps > min(lease.last_step, lease.version + job.config.staleness.max):
                yield f"lease {lease.id} is live and no step can use it", AT_ONCE_S
            if self._tables[Worker][lease.worker_id].state in (WorkerState.GONE, WorkerState.QUARANTINED):
                yield f"lease {lease.id} is live and its worker is not", SOON_S

    def _workers(self) -> Iterator[tuple[str, float]]:
        deps, settings = self._world.host.deps, self._world.settings
        assert deps is not None
        now = self._world.host.clock.now()
        for worker in self._tables[Worker].values():
            heard = deps.presence.get(worker.id)
            if worker.state in PRESENT and heard is None:
                yield f"{worker.name} is {worker.state} and nobody watches whether it is heard", SOON_S
            elif worker.state in PRESENT and heard is not None and now > max(heard.at + settings.lost_after_s, heard.excused_until):
                yield f"{worker.name} is {worker.state} and was not heard for too long", SOON_S
            elif worker.state is WorkerState.QUARANTINED and now - worker.state_since > settings.quarantine_s:
                yield f"{worker.name} served its quarantine and stays in it", SOON_S

    def _groups(self) -> Iterator[tuple[str, float]]:
        job = self._world.job
        live = job.state in (JobState.RUNNING, JobState.PAUSED)
        groups: dict[str, Group] = self._tables[Group]
        for group in groups.values():
            old = group.oldest_version is not None and job.committed_steps > group.oldest_version + job.config.staleness.max
            if live and group.state is GroupState.ISSUED and old:
                yield f"group {group.number} is issued and no step can train it", SOON_S
        driven = self._world.host.deps is not None and job.id in self._world.host.deps.live
        for row in self._tables[Rollout].values():
            place = f"group {row.group_number} slot {row.slot}" + (f" turn {row.turn}" if row.turn else "")
            if driven and row.state is RolloutState.ACCEPTED:
                yield f"{place} is accepted and not graded", GRADED_S
            if live and row.state in (RolloutState.OPEN, RolloutState.LEASED) and groups[row.group_id].state in ENDED:
                yield f"{place} is {row.state} and its group ended", SOON_S
            if row.state is RolloutState.LEASED and self._tables[Lease][row.lease_id].state is not LeaseState.LIVE:
                yield f"{place} is leased and its lease ended", SOON_S

    def _starving(self) -> Iterator[tuple[str, float]]:
        """Law 8: an idle worker with a usable version gets work while less than a step is issued; a full batch is trained."""
        world, job = self._world, self._world.job
        deps = world.host.deps
        if job.state is not JobState.RUNNING or deps is None or job.id not in deps.live:
            return
        states = [group.state for group in self._tables[Group].values()]
        unsettled = sum(state not in ENDED for state in states)
        if unsettled < min(job.config.algorithm.groups_per_step, 1) and job.committed_steps < job.config.budget.steps:
            for worker in world.workers:
                if worker.is_up and worker.kind.temper in ("honest", "slow") and self._could_serve(worker.id):
                    yield f"{worker.name} could serve step {job.committed_steps} and gets nothing", STARVED_S
        yield f"no step after step {job.committed_steps}", 2 * STARVED_S + 120.0  # hostile workers may take a slot again and again

    def _could_serve(self, worker_id: str) -> bool:
        job, worker = self._world.job, self._tables[Worker].get(worker_id)
        least = job.committed_steps - job.config.staleness.max
        held = [h.version for h in self._tables[Holding].values() if h.worker_id == worker_id]
        if worker is None or too_dear(worker.price_uusd_per_hour, job.config.budget.usd):
            return False
        return worker.state is WorkerState.ACTIVE and max(held, default=-1) >= least
