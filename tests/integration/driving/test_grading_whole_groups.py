"""Rewards that look at a whole group: it is graded once, in one call, when nothing more will come for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from coordinator.domain.model import Group, GroupState, Job, JobState, Rollout, RolloutState
from coordinator.service.deps import Deps
from coordinator.service.grading import grade_round
from coordinator.service.ports import Graded
from tests.integration.driving.pretend import PretendPlane, frame
from tests.integration.driving.scene import config

SIZE = 4


class Recording(PretendPlane):
    """Remembers how many completions each call brought."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[int, int]] = []

    async def grade(self, split: str, index: int, completions: Sequence[Sequence[int]]) -> list[Graded]:
        self.calls.append((index, len(completions)))
        return await super().grade(split, index, completions)


async def scene(deps: Deps, *, whole: bool, min_group: int | None = None) -> Job:
    """Group 0 lacks one completion, group 1 is all there."""
    settings = config(environment={"grade_whole_groups": whole}, algorithm={"group_size": SIZE, "min_group": min_group})
    job = Job("j1", "driven", "t", settings, JobState.RUNNING, "", 0.0, 0.0, "m")
    blob = await deps.blobs.put(frame(0, SIZE))
    rows: list[object] = []
    for number, missing in ((0, 1), (1, 0)):
        group = Group(f"j1/g{number}", "j1", number, number, (2, 3), SIZE, GroupState.ISSUED, 0.0)
        rows.append(group)
        for slot in range(SIZE):
            state = RolloutState.LEASED if slot < missing else RolloutState.ACCEPTED
            rows.append(rollout(group, slot, state, blob))
    await deps.store.write(lambda tx: tx.put(job))
    await deps.store.write(lambda tx: tx.put(*(row for row in rows if isinstance(row, Group))))
    await deps.store.write(lambda tx: tx.put(*(row for row in rows if isinstance(row, Rollout))))
    return job


def rollout(group: Group, slot: int, state: RolloutState, blob: str) -> Rollout:
    return Rollout(
        group_id=group.id,
        slot=slot,
        job_id="j1",
        group_number=group.number,
        state=state,
        lease_id=f"{group.id}/f1",
        worker_id="w",
        blob=blob,
        blob_start=slot,
        length=1,
        oldest_version=0,
    )


async def arrive(deps: Deps, state: RolloutState) -> None:
    (late,) = await deps.store.read(lambda r: r.select(Rollout, group_id="j1/g0", slot=0))
    await deps.store.write(lambda tx: tx.put(replace(late, state=state)))


async def test_an_incomplete_group_waits_and_is_then_graded_in_one_call(deps: Deps) -> None:
    """A group-level reward never sees a part of one."""
    job, plane = await scene(deps, whole=True), Recording()
    assert await grade_round(deps, job, plane) == SIZE
    assert await grade_round(deps, job, plane) == 0
    await arrive(deps, RolloutState.ACCEPTED)
    assert await grade_round(deps, job, plane) == SIZE
    assert plane.calls == [(1, SIZE), (0, SIZE)]
    groups = await deps.store.read(lambda r: r.select(Group, job_id="j1"))
    assert {group.state for group in groups} == {GroupState.READY}


async def test_with_min_group_a_slot_that_nobody_works_on_is_not_waited_for(deps: Deps) -> None:
    job, plane = await scene(deps, whole=True, min_group=3), Recording()
    assert await grade_round(deps, job, plane) == SIZE
    await arrive(deps, RolloutState.OPEN)
    assert await grade_round(deps, job, plane) == 3
    assert plane.calls == [(1, SIZE), (0, 3)]


async def test_a_group_that_ended_early_is_graded_as_it_is(deps: Deps) -> None:
    """Every accepted rollout gets an outcome; the group stays what it is."""
    job, plane = await scene(deps, whole=True), Recording()
    (group,) = await deps.store.read(lambda r: r.select(Group, id="j1/g0"))
    await deps.store.write(lambda tx: tx.put(replace(group, state=GroupState.REJECTED, reason="too old", settled_at=1.0)))
    assert await grade_round(deps, job, plane) == 2 * SIZE - 1
    assert sorted(plane.calls) == [(0, SIZE - 1), (1, SIZE)]
    (group,) = await deps.store.read(lambda r: r.select(Group, id="j1/g0"))
    assert group.state is GroupState.REJECTED


async def test_a_round_takes_whole_groups_however_large(deps: Deps, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on a round never cuts one."""
    monkeypatch.setattr("coordinator.service.grading.ROUND", 2)
    job, plane = await scene(deps, whole=True), Recording()
    await arrive(deps, RolloutState.ACCEPTED)
    assert [await grade_round(deps, job, plane) for _ in range(3)] == [SIZE, SIZE, 0]
    assert sorted(plane.calls) == [(0, SIZE), (1, SIZE)]


async def test_else_what_is_there_is_graded_at_once(deps: Deps) -> None:
    job, plane = await scene(deps, whole=False), Recording()
    assert await grade_round(deps, job, plane) == 2 * SIZE - 1
    assert sorted(plane.calls) == [(0, SIZE - 1), (1, SIZE)]
