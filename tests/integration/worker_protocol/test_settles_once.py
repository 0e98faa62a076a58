"""Law 2 as a property: whatever workers do and whatever goes wrong, what was acknowledged stays, and nothing settles twice."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.domain.model import Group, GroupState, Job, Lease, LeaseState, Rollout, RolloutState
from coordinator.wire.messages import Leave

JOB = "job-1"
WORKERS = 3
ACTS = st.one_of(
    st.tuples(st.just("lease"), st.integers(0, WORKERS - 1)),
    st.tuples(st.just("submit"), st.integers(0, WORKERS - 1), st.integers(0, 30), st.sets(st.integers(0, 3), min_size=1)),
    st.tuples(st.just("spoil"), st.integers(0, WORKERS - 1), st.integers(0, 30)),
    st.tuples(st.just("rejoin"), st.integers(0, WORKERS - 1)),
    st.tuples(st.just("step")),
    st.tuples(st.just("late")),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("restart")),
)


class Story:
    """Plays acts on one coordinator and remembers what was acknowledged."""

    def __init__(self, coordinator: Any, rows: Any, workers: Sequence[Any]) -> None:
        self.coordinator = coordinator
        self.rows = rows
        self.workers = workers
        self.leases: list[list[Any]] = [[] for _ in workers]
        self.settled: dict[tuple[str, int], str] = {}  # acknowledged (group, slot) -> lease
        self.seeds: dict[tuple[str, int], int] = {}

    async def play(self, act: tuple[Any, ...]) -> None:
        await getattr(self, act[0])(*act[1:])
        for worker in self.workers:
            self.coordinator.deps.presence.touch(worker.id, epoch=worker.epoch, at=self.coordinator.clock.now())

    async def lease(self, who: int) -> None:
        step = (await self.coordinator.get(Job, JOB)).committed_steps
        worker = self.workers[who]
        if not (await worker.confirm(step)).accepted:
            return
        for lease in (await worker.ask(step)).leases:
            self.leases[who].append(lease)
            for slot, seed in zip(lease.slots, lease.seeds, strict=True):
                assert self.seeds.setdefault((lease.group_id, slot), seed) == seed, "a seed changed between attempts"

    async def submit(self, who: int, which: int, wanted: set[int], **changes: Any) -> None:
        if not self.leases[who]:
            return
        lease = self.leases[who][which % len(self.leases[who])]
        slots = [slot for slot in lease.slots if slot in wanted] or [lease.slots[0]]
        reply = await self.workers[who].submit(lease, slots, **changes)
        for slot in reply.accepted:
            assert (lease.group_id, slot) not in self.settled, "settled twice"
            self.settled[lease.group_id, slot] = lease.lease_id
        for slot in reply.duplicates:
            assert self.settled[lease.group_id, slot] == lease.lease_id

    async def spoil(self, who: int, which: int) -> None:
        """A submission that is wrong: another fence."""
        if self.leases[who]:
            await self.submit(who, which, {0, 1, 2, 3}, fence=99)

    async def rejoin(self, who: int) -> None:
        await self.workers[who].join()

    async def step(self) -> None:
        job = await self.coordinator.get(Job, JOB)
        await self.coordinator.put(
            replace(job, committed_steps=job.committed_steps + 1), self.rows.publication(job.committed_steps + 1)
        )

    async def late(self) -> None:
        self.coordinator.clock.added += 45

    async def sweep(self) -> None:
        for worker in self.workers:
            self.coordinator.deps.presence.touch(worker.id, epoch=worker.epoch, at=self.coordinator.clock.now())
        await self.coordinator.sweep()

    async def restart(self) -> None:
        self.coordinator.clock.added += 1
        await self.coordinator.restart()

    async def check(self) -> None:
        """The rows agree with what was acknowledged, and with each other."""
        rollouts = {(r.group_id, r.slot): r for r in await self.coordinator.rows(Rollout, job_id=JOB)}
        accepted = {key: r.lease_id for key, r in rollouts.items() if r.state is RolloutState.ACCEPTED}
        assert accepted == self.settled
        leases = {lease.id: lease for lease in await self.coordinator.rows(Lease, job_id=JOB)}
        groups = {group.id: group for group in await self.coordinator.rows(Group, job_id=JOB)}
        for rollout in rollouts.values():
            if rollout.state is RolloutState.LEASED:
                assert leases[rollout.lease_id].state is LeaseState.LIVE
            if rollout.state is RolloutState.OPEN:
                assert rollout.lease_id is None
            if groups[rollout.group_id].state is not GroupState.ISSUED:
                assert rollout.state in (RolloutState.ACCEPTED, RolloutState.VOID)
                assert groups[rollout.group_id].reason
        fences = [(lease.group_id, lease.fence) for lease in leases.values()]
        assert len(set(fences)) == len(fences), "two leases of a group share a fence"


async def test_what_is_acknowledged_stays_and_nothing_settles_twice(coordinator: Any, stranger: Any, rows: Any) -> None:
    loop = asyncio.get_running_loop()
    examples = 0

    async def example(acts: list[tuple[Any, ...]]) -> None:
        nonlocal examples
        examples += 1
        for kind in (Lease, Group, Rollout):
            await coordinator.deps.store.write(lambda tx, kind=kind: tx.delete(kind, job_id=JOB))
        await coordinator.put(rows.job())
        workers = [stranger(f"w{examples}-{n}") for n in range(WORKERS)]
        for worker in workers:
            await worker.join()
        story = Story(coordinator, rows, workers)
        for act in acts:
            await story.play(act)
        await story.sweep()
        await story.check()
        for worker in workers:
            await worker.send("leave", Leave(session_epoch=worker.epoch))

    @settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(st.lists(ACTS, min_size=5, max_size=25))
    def run(acts: list[tuple[Any, ...]]) -> None:
        asyncio.run_coroutine_threadsafe(example(acts), loop).result(60)

    await asyncio.to_thread(run)
