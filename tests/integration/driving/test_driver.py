"""The job driver on a real store: replay, roll-back, pauses and ends (laws 1, 2 and 11)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from coordinator.domain.model import Batch, Event, Group, GroupState, Job, JobState, Metric, Publication, Refusal, Rollout
from coordinator.domain.states import JOB, move, resumed_event
from coordinator.service.deps import Deps
from coordinator.service.job_ports import LearnerLost
from tests.integration.driving.pretend import PretendLearners, PretendPlane
from tests.integration.driving.scene import STEPS, check, config, drive, row, submit


async def test_straight(deps: Deps) -> None:
    """All steps once, in order; evaluated at 0, 6 and 12."""
    learners = PretendLearners()
    job = await drive(deps, await submit(deps, config()), learners)
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, STEPS)
    assert learners.trained == [list(range(STEPS))]
    events = await deps.store.read(lambda r: r.select(Event, job_id=job.id, kind="evaluated", order_by="seq"))
    assert [event.data["version"] for event in events] == [0, 6, 12]
    begun = await deps.store.read(lambda r: r.select(Event, job_id=job.id, kind="evaluating", order_by="seq"))
    assert [event.data for event in begun] == [{"version": version, "prompts": 3} for version in (0, 6, 12)]
    assert all(one.seq < done.seq for one, done in zip(begun, events, strict=True))
    await check(deps, job)


async def test_replay_is_the_same_step(deps: Deps) -> None:
    """Lost in step 7 and again in step 8: replayed from the checkpoint at 5, and the same weights come out."""
    learners = PretendLearners(lose_at={"train:7", "train:8"})
    job = await drive(deps, await submit(deps, config()), learners)
    assert job.state is JobState.COMPLETED
    assert learners.trained == [list(range(7)), [5, 6, 7], list(range(5, STEPS))]
    weights = "start"
    for batch in await deps.store.read(lambda r: r.select(Batch, job_id=job.id, order_by="step")):
        weights = blake3(f"{weights} {batch.digest} ".encode()).hexdigest()
    assert learners.learners[-1].weights == weights
    published = await deps.store.read(lambda r: r.select(Publication, job_id=job.id))
    assert len({p.version for p in published}) == len(published), "no version got a second digest"
    await check(deps, job)


async def test_a_batch_file_that_is_damaged_is_made_again(deps: Deps) -> None:
    """Cut off on the disk after the learner was lost: of a committed step, and of the one that waits. The replay is exact all the same."""

    async def damage() -> None:
        for step in (6, 7):
            batch = await deps.store.read(lambda r, step=step: r.get(Batch, "j1", step))
            Path(batch.path).write_bytes(Path(batch.path).read_bytes()[:-20])
        raise LearnerLost("bad_batch: the file changed after the seal")

    learners = PretendLearners(hooks={"train:7": damage})
    job = await drive(deps, await submit(deps, config(algorithm={"max_replacements": 0})), learners, PretendPlane(every_other=True))
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, STEPS)
    assert learners.trained == [list(range(7)), list(range(5, STEPS))]
    weights = "start"
    for batch in await deps.store.read(lambda r: r.select(Batch, job_id=job.id, order_by="step")):
        weights = blake3(f"{weights} {batch.digest} ".encode()).hexdigest()
    assert learners.learners[-1].weights == weights
    await check(deps, job)


@pytest.mark.parametrize("what", ["blob", "row"])
async def test_a_batch_that_cannot_be_made_again_fails_the_job_in_words(deps: Deps, what: str) -> None:
    """Never another batch under the same step."""

    async def damage() -> None:
        batch = await deps.store.read(lambda r: r.get(Batch, "j1", 6))
        Path(batch.path).unlink()
        groups = await deps.store.read(lambda r: r.select(Group, job_id="j1", number=list(batch.groups)))
        rollouts = await deps.store.read(lambda r: r.select(Rollout, group_id=groups[0].id, order_by="slot"))
        if what == "blob":
            deps.blobs.path(rollouts[0].blob).unlink()
        else:
            await deps.store.write(lambda tx: tx.put(replace(rollouts[0], reward=0.25)))
        raise LearnerLost("killed")

    job = await drive(deps, await submit(deps, config()), PretendLearners(hooks={"train:7": damage}))
    assert job.state is JobState.FAILED
    words = "so is what it was made of: there is no blob" if what == "blob" else "the rows no longer give what was sealed"
    assert job.reason.startswith("batch 6 cannot be trained, so the job cannot be resumed exactly: ")
    assert words in job.reason


async def test_other_bits_after_replay(deps: Deps) -> None:
    """A replay that gives other bits rolls back: queued rollouts of the lost digests are rejected and paid, never trained."""
    learners = PretendLearners(salts=["", "other"], lose_at={"train:8"})
    job = await drive(deps, await submit(deps, config(staleness={"max": 3})), learners)
    assert job.state is JobState.COMPLETED
    lost = await deps.store.read(lambda r: r.select(Publication, job_id=job.id, state="rolled_back"))
    assert {p.version for p in lost} & {6, 7, 8}
    rejected = await deps.store.read(lambda r: r.select(Group, job_id=job.id, state=GroupState.REJECTED))
    stained = [g for g in rejected if g.reason.startswith("policy_rolled_back")]
    assert stained
    refusals = await deps.store.read(lambda r: r.select(Refusal, job_id=job.id, code="policy_rolled_back"))
    assert len(refusals) == 2 * len(stained)
    assert all(r.paid and r.blame == "coordinator" for r in refusals)
    await check(deps, job)


async def test_no_signal_pauses(deps: Deps) -> None:
    """Five steps in a row without signal pause the job with that reason; resumed with signal it ends."""
    plane, learners = PretendPlane(signal=False), PretendLearners()
    learners.figures = {"zero_variance/mean": 0.5}  # the rows tell, whatever the learner says
    job_id = await submit(deps, config(algorithm={"max_replacements": 1}))
    driver = asyncio.create_task(drive(deps, job_id, learners, plane))
    async with asyncio.timeout(20):
        while (job := await row(deps, job_id)).state is not JobState.PAUSED:
            await asyncio.sleep(0.02)
    assert "no signal" in job.reason
    assert job.committed_steps == 5
    plane.signal = True

    async def resume(tx) -> None:
        now_job = await tx.get(Job, job_id)
        await tx.put(replace(now_job, state=move(JOB, now_job.state, resumed_event(now_job.resume_state)), reason=""))

    await deps.store.write(resume)
    deps.wake.notify(job_id)
    ended = await driver
    assert (ended.state, ended.committed_steps) == (JobState.COMPLETED, STEPS)
    await check(deps, ended)


async def test_groups_without_signal_beside_others_that_teach_pause_nothing(deps: Deps) -> None:
    """The batches are filled up with groups that are all alike, and the others of each teach. A learner's figure is no authority."""
    learners = PretendLearners()
    learners.figures = {"zero_variance/mean": 1.0}
    job_id = await submit(deps, config(algorithm={"max_replacements": 0}, staleness={"max": 0}))
    async with asyncio.timeout(20):
        ended = await drive(deps, job_id, learners, PretendPlane(every_other=True))
    assert (ended.state, ended.committed_steps) == (JobState.COMPLETED, STEPS)
    batches = await deps.store.read(lambda r: r.select(Batch, job_id=job_id))
    assert [batch.no_signal for batch in batches] == [True] * STEPS


async def test_a_reward_that_never_scores_pauses(deps: Deps) -> None:
    """Eight groups in a row without scores pause the job with the grader's reason; mended and resumed it ends."""
    plane = PretendPlane()
    plane.broken = True
    job_id = await submit(deps, config())
    driver = asyncio.create_task(drive(deps, job_id, PretendLearners(), plane))
    async with asyncio.timeout(20):
        while (job := await row(deps, job_id)).state is not JobState.PAUSED:
            await asyncio.sleep(0.02)
    assert job.reason.startswith("grading_failed: the last 8 groups ended without enough scores")
    plane.broken = False

    async def resume(tx) -> None:
        now_job = await tx.get(Job, job_id)
        state = move(JOB, now_job.state, resumed_event(now_job.resume_state))
        await tx.put(replace(now_job, state=state, reason="", state_since=deps.clock.now()))

    await deps.store.write(resume)
    deps.wake.notify(job_id)
    ended = await driver
    assert (ended.state, ended.committed_steps) == (JobState.COMPLETED, STEPS)
    logged = await deps.store.read(lambda r: r.select(Metric, job_id=job_id, name="reward/logged/pretended"))
    assert [metric.value for metric in logged] == [0.5] * STEPS
    await check(deps, ended)


async def test_cancel_settles(deps: Deps) -> None:
    """A cancelled job ends with every group settled."""
    job_id = await submit(deps, config(budget={"steps": 100000}))
    driver = asyncio.create_task(drive(deps, job_id, PretendLearners()))
    async with asyncio.timeout(20):
        while (await row(deps, job_id)).committed_steps < 3:
            await asyncio.sleep(0.02)

    async def cancel(tx) -> None:
        job = await tx.get(Job, job_id)
        await tx.put(replace(job, state=move(JOB, job.state, "cancelled"), reason="enough"))

    await deps.store.write(cancel)
    deps.wake.notify(job_id)
    job = await driver
    assert job.state is JobState.CANCELLED
    live = await deps.store.read(
        lambda r: r.count(Group, job_id=job_id, state=[GroupState.ISSUED, GroupState.READY, GroupState.SEALED])
    )
    assert live == 0
    await check(deps, job)


async def test_a_learner_that_never_starts_fails_the_job(deps: Deps) -> None:
    """After the limit of restarts the job fails with the learner's words."""
    job = await drive(deps, await submit(deps, config()), PretendLearners(lose_at={"start"}))
    assert job.state is JobState.FAILED
    assert "it does not start" in job.reason
    assert job.reason.endswith(f"what they printed lies in {deps.settings.data_dir / 'logs' / 'learner-j1.log'}")
