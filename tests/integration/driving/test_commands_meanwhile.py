"""REST commands and silence that meet the driver in the middle of something: nothing is stuck, lost or trained twice."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from coordinator.domain.model import ApiToken, Batch, Event, Group, GroupState, Job, JobState, Rollout, RolloutState
from coordinator.service import operator_jobs
from coordinator.service.deps import Deps
from coordinator.service.ending import settle_all
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.ports import Graded, Tx
from coordinator.service.sealing import look, seal_next
from coordinator.service.tokens import Caller
from coordinator.wire.job import BudgetConfig, JobPatch
from tests.integration.driving.pretend import PretendLearners, PretendPlane, frame
from tests.integration.driving.scene import STEPS, check, config, drive, row, submit

ADMIN = Caller(ApiToken("t", "admin", "admin", "", 0.0), "secret")


async def command(deps: Deps, action: Callable[[Tx], Awaitable[object]], job_id: str = "j1") -> None:
    """As the REST API does it: one transaction, then the notices."""
    await deps.store.write(action)
    for topic in (job_id, "jobs"):
        deps.wake.notify(topic)


def pause(deps: Deps) -> Callable[[], Awaitable[None]]:
    return lambda: command(deps, lambda tx: operator_jobs.pause(tx, ADMIN, "j1", "", now=deps.clock.now()))


def resume(deps: Deps) -> Callable[[], Awaitable[None]]:
    return lambda: command(deps, lambda tx: operator_jobs.resume(tx, ADMIN, "j1", "", now=deps.clock.now()))


def cancel(deps: Deps) -> Callable[[], Awaitable[None]]:
    return lambda: command(deps, lambda tx: operator_jobs.cancel(tx, ADMIN, "j1", "", now=deps.clock.now()))


def patch(deps: Deps, change: JobPatch) -> Callable[[], Awaitable[None]]:
    return lambda: command(deps, lambda tx: operator_jobs.change(tx, ADMIN, "j1", change, now=deps.clock.now()))


async def test_cancelled_while_a_step_is_trained(deps: Deps) -> None:
    """The groups were settled by the cancel: the step that comes back is not committed on top of that."""
    job_id = await submit(deps, config())
    job = await drive(deps, job_id, PretendLearners(hooks={"train:3": cancel(deps)}))
    assert (job.state, job.committed_steps) == (JobState.CANCELLED, 3)
    await check(deps, job)


@pytest.mark.parametrize("moment", ["start:0", "evaluate:0", "snapshot:1", "train:2", "checkpoint:5", "evaluate:12"])
async def test_paused_and_resumed_at_any_moment(deps: Deps, moment: str) -> None:
    """Whatever the learner was doing, a resumed job goes on to its end."""
    job_id = await submit(deps, config())

    async def blink() -> None:
        await pause(deps)()
        asyncio.get_running_loop().call_later(0.1, lambda: asyncio.ensure_future(resume(deps)()))

    job = await drive(deps, job_id, PretendLearners(hooks={moment: blink}))
    assert (job.state, job.committed_steps, job.resume_state) == (JobState.COMPLETED, STEPS, None)
    await check(deps, job)


async def test_paused_in_the_middle_of_a_seal(deps: Deps, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal that the pause made void is tried again after the resume, although no group changed meanwhile."""
    job_id = await submit(deps, config(staleness={"max": 0}))
    seen = []

    def at(point: str) -> None:
        if point == "seal.file_written" and not seen:
            seen.append(point)
            asyncio.get_running_loop().create_task(pause(deps)())
            asyncio.get_running_loop().call_later(0.3, lambda: asyncio.ensure_future(resume(deps)()))

    job = await drive(replace(deps, reach=at), job_id, PretendLearners(), within_s=10)
    assert (seen, job.state) == (["seal.file_written"], JobState.COMPLETED)
    await check(deps, job)


async def test_an_evaluation_without_any_score_is_made_once(deps: Deps) -> None:
    """No held-out prompt got a score: that is the figure, and it is not measured again at every turn."""

    class Unscoring(PretendPlane):
        async def grade(self, split, index, completions):
            if split == "eval":
                return [Graded("failed", None, "", "broken") for _ in completions]
            return await super().grade(split, index, completions)

    job = await drive(deps, await submit(deps, config()), PretendLearners(), Unscoring())
    events = await deps.store.read(lambda r: r.select(Event, job_id=job.id, kind="evaluated", order_by="seq"))
    assert [event.data["version"] for event in events] == [0, 6, 12]


async def test_steps_cannot_be_lowered_below_the_step_in_training(deps: Deps) -> None:
    """Step 4 is sealed: 4 planned steps would leave one too many."""
    job_id = await submit(deps, config())
    refused: list[RequestRefused] = []

    async def lower() -> None:
        try:
            await patch(deps, JobPatch(budget=BudgetConfig(steps=4)))()
        except RequestRefused as error:
            refused.append(error)
        await patch(deps, JobPatch(budget=BudgetConfig(steps=5)))()

    job = await drive(deps, job_id, PretendLearners(hooks={"train:4": lower}))
    assert [error.field for error in refused] == ["budget.steps"]
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, 5)
    await check(deps, job)


async def test_steps_lowered_between_the_look_and_the_seal(deps: Deps) -> None:
    """No batch is sealed for a step that is not planned any more."""
    job = await ready_job(deps, committed=3)
    await patch(deps, JobPatch(budget=BudgetConfig(steps=3)))()
    assert (await seal_next(deps, job, {}, waited_s=0.0)).batch is None
    assert await deps.store.read(lambda r: r.count(Batch, job_id=job.id)) == 0


async def test_the_bound_lowered_between_the_look_and_the_seal(deps: Deps) -> None:
    """The seal holds the bound that holds when its rows are written."""
    job = await ready_job(deps, committed=3, oldest=1)
    await patch(deps, JobPatch(staleness_max=0))()
    assert (await seal_next(deps, job, {}, waited_s=0.0)).batch is None
    now_job = await row(deps, job.id)
    ready = await deps.store.read(lambda r: look(r, now_job, {}))
    assert [reason.split(":")[0] for _, reason in ready.seal.rejected] == ["stale", "stale"]


async def test_steps_cannot_be_changed_while_the_job_finishes(deps: Deps) -> None:
    """It would complete with another number of steps than planned."""
    job = await ready_job(deps, committed=STEPS)
    await deps.store.write(lambda tx: tx.put(replace(job, state=JobState.FINISHING)))
    with pytest.raises(RequestRefused, match="finishing"):
        await patch(deps, JobPatch(budget=BudgetConfig(steps=STEPS + 5)))()


async def test_more_steps_at_the_last_moment_are_trained(deps: Deps) -> None:
    """Raised during the last evaluation: the job goes on."""
    job_id = await submit(deps, config())
    more = patch(deps, JobPatch(budget=BudgetConfig(steps=STEPS + 2)))
    job = await drive(deps, job_id, PretendLearners(hooks={"evaluate:12": more}))
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, STEPS + 2)
    await check(deps, job)


async def test_slots_of_settled_groups_end_with_the_job(deps: Deps) -> None:
    """A group that was rejected with a slot still open leaves nothing pending."""
    job = await ready_job(deps, committed=0)
    group = Group("j1/g9", "j1", 9, 9, (2,), 2, GroupState.REJECTED, 0.0, reason="stale: x", settled_at=1.0)
    slots = [Rollout(group.id, slot, "j1", 9, RolloutState.OPEN) for slot in range(2)]
    await deps.store.write(lambda tx: tx.put(group, *slots))
    await deps.store.write(lambda tx: settle_all(tx, job.id, "job_failed: x", now=deps.clock.now()))
    left = await deps.store.read(lambda r: r.count(Rollout, job_id="j1", state=[RolloutState.OPEN, RolloutState.LEASED]))
    assert left == 0


async def ready_job(deps: Deps, *, committed: int, oldest: int | None = None) -> Job:
    """A running job with `committed` steps and two ready groups (one step's worth)."""
    job_id = await submit(deps, config())
    job = replace(await row(deps, job_id), state=JobState.RUNNING, committed_steps=committed)
    version = committed if oldest is None else oldest

    blob = await deps.blobs.put(frame(version, 2))

    async def save(tx: Tx) -> None:
        await tx.put(job)
        for number in range(2):
            await tx.put(Group(f"j1/g{number}", "j1", number, number, (2,), 2, GroupState.READY, 0.0, oldest_version=version))
            await tx.put(
                *(
                    Rollout(
                        f"j1/g{number}",
                        slot,
                        "j1",
                        number,
                        RolloutState.SCORED,
                        blob=blob,
                        blob_start=slot,
                        length=1,
                        oldest_version=version,
                        newest_version=version,
                        stop_reason="length",
                        reward=float(slot),
                    )
                    for slot in range(2)
                )
            )

    await deps.store.write(save)
    return job
