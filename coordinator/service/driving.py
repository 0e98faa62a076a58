"""Drives one job: starts its learner, replays, seals, commits, checkpoints, publishes, evaluates, finishes.

Level-triggered: every turn re-reads the rows and does the next thing, so a restart is the same path as a start. The loop waits
for (1) the learner's answer, bounded by a deadline; (2) enough ready groups, or a change of the job's row, woken by `Wakeups` and
at least every TURN_S; (3) the encoder, bounded by the publisher. Nothing else.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from coordinator.domain import publication as publication_rules
from coordinator.domain.model import Batch, BatchState, CheckpointRow, Group, GroupState, Job, JobState, Metric
from coordinator.domain.retry import learner_restart
from coordinator.domain.seeds import canary_ids
from coordinator.domain.states import JOB, TERMINAL, move
from coordinator.domain.turns import is_played
from coordinator.service.announcing import Announcer
from coordinator.service.deps import Deps, LiveJob
from coordinator.service.ending import end_job
from coordinator.service.evaluating import evaluate
from coordinator.service.grading import keep_grading
from coordinator.service.job_ports import (
    Learner,
    LearnerLost,
    LearnerRefused,
    LearnerStarter,
    PlaneStarter,
    Publisher,
    PublishFailed,
    learner_log,
)
from coordinator.service.keeping import checkpoint_directory, forget_before, record_checkpoint
from coordinator.service.playing import keep_playing
from coordinator.service.ports import DataPlane, EnvironmentBroken, EnvironmentInfo, Reader, Tx
from coordinator.service.prompting import fill_prompts, keep_prompts
from coordinator.service.publishing import published, snapshot_directory, versions_at_stake
from coordinator.service.recording import record_event
from coordinator.service.sealing import Known, commit_step, remade, seal_next
from coordinator.service.spending import over_budget
from coordinator.service.tidying import tidy_job
from coordinator.service.timings import measured_kappa
from coordinator.wire import learner_link as link

log = structlog.get_logger()
TURN_S = 1.0
RESTART_LIMIT = 6  # learner losses without a committed step between, after which the job fails


@dataclass(frozen=True, slots=True)
class LearnerDeadlines:
    """Seconds that each kind of learner request may take before the learner counts as lost."""

    start_s: float = 600.0
    train_s: float = 3600.0
    snapshot_s: float = 900.0
    checkpoint_s: float = 1800.0
    evaluate_s: float = 3600.0
    log_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Tools:
    """The adapters that a driver works with."""

    learners: LearnerStarter
    publisher: Publisher
    planes: PlaneStarter
    deadlines: LearnerDeadlines = LearnerDeadlines()


class JobDriver:
    """One job's driver. `run` returns when the job ended or gave up its place; it may be cancelled at any time and run again."""

    def __init__(self, deps: Deps, tools: Tools, job_id: str) -> None:
        self._deps = deps
        self._tools = tools
        self._job_id = job_id
        self._announcer = Announcer(deps, tools.publisher)
        self._learner_free_at = deps.clock.now()
        self._resume_step = 0
        self._logged = 0
        self._known: Known = {}
        self._looked: tuple[int, ...] = ()  # what the last look that sealed nothing was at

    async def run(self) -> None:
        """Drive the job to its end; a fault of the job itself fails it with its words."""
        try:
            await self._drive()
        except* (EnvironmentBroken, LearnerRefused, PublishFailed) as faults:
            reason = "; ".join(str(fault) for fault in _leaves(faults))
            log.warning("job_failed", job=self._job_id, reason=reason)
            await end_job(self._deps, self._job_id, JobState.FAILED, reason)

    async def _drive(self) -> None:
        job = await self._job()
        if job.state in TERMINAL[JobState]:
            await end_job(self._deps, job.id, job.state, job.reason)
            return
        plane = self._tools.planes.plane(job)
        try:
            info = await plane.start()
            live = LiveJob(plane)
            self._deps.live[job.id] = live
            await fill_prompts(self._deps, job, live, info.train_prompts)
            async with asyncio.TaskGroup() as tasks:
                beside = [
                    tasks.create_task(keep_prompts(self._deps, job, live, info.train_prompts)),
                    tasks.create_task((keep_playing if is_played(job.config) else keep_grading)(self._deps, job, plane)),
                ]
                await self._learn(plane, info)
                for task in beside:
                    task.cancel()
        finally:
            self._deps.live.pop(job.id, None)
            await self._announcer.stop()
            await plane.close()

    async def _learn(self, plane: DataPlane, info: EnvironmentInfo) -> None:
        """Keep a learner running until the job ends or gives back its place; back off between starts, give up after too many."""
        while True:
            job = await self._job()
            if job.state in TERMINAL[JobState]:
                await end_job(self._deps, job.id, job.state, job.reason)
                return
            if job.state is JobState.PAUSED:
                return  # the jobs loop starts a driver again once it is resumed
            try:
                await self._with_learner(plane, info)
            except LearnerLost as lost:
                if not await self._may_restart(lost):
                    return
            else:
                return

    async def _with_learner(self, plane: DataPlane, info: EnvironmentInfo) -> None:
        await tidy_job(self._deps, await self._job())
        job = await self._begin_start()
        learner = await self._tools.learners.start(job.id, job.learner_fence)
        try:
            job = await self._start(learner, job, info)
            await self._replay(learner, job)
            self._looked = ()
            self._learner_free_at = self._deps.clock.now()
            while await self._turn(learner, plane, info):
                pass
        finally:
            await learner.close()

    async def _begin_start(self) -> Job:
        """A new fence: whatever an older learner still says is void."""

        async def save(tx: Tx) -> Job:
            job = await self._row(tx)
            state = move(JOB, job.state, "learner_started") if job.state is JobState.QUEUED else job.state
            since = self._deps.clock.now() if state is not job.state else job.state_since
            reason = "its learner is starting" if state is JobState.STARTING else job.reason
            job = replace(job, state=state, reason=reason, state_since=since, learner_fence=job.learner_fence + 1)
            await tx.put(job)
            await record_event(tx, job.id, "learner_starting", {"fence": job.learner_fence}, now=self._deps.clock.now())
            return job

        return await self._deps.store.write(save)

    async def _start(self, learner: Learner, job: Job, info: EnvironmentInfo) -> Job:
        checkpoints = await self._deps.store.read(lambda r: r.select(CheckpointRow, job_id=job.id, order_by="-step"))
        usable = next((c for c in checkpoints if Path(c.directory).is_dir()), None)
        request = link.Start(
            fence=job.learner_fence,
            job_id=job.id,
            config=job.config,
            model_dir=job.model_dir,
            checkpoint_dir=usable.directory if usable else None,
            metrics_dir=str(self._deps.settings.data_dir / "metrics" / job.id),
        )
        ready = await learner.ask(request, deadline_s=self._tools.deadlines.start_s)
        if not isinstance(ready, link.Ready):
            raise LearnerLost(f"the learner answered {ready.kind!r} to start")
        if ready.vocab_size < info.vocab_size:
            raise LearnerRefused(
                f"the tokenizer has {info.vocab_size} ids, the model only {ready.vocab_size}: they do not belong together"
            )
        if usable is not None and ready.step != usable.step:
            raise LearnerRefused(f"checkpoint {usable.directory} holds step {ready.step}, its row says {usable.step}")
        self._resume_step = ready.step
        self._logged = job.committed_steps if ready.logged is None else ready.logged  # else other sinks would see steps twice

        async def save(tx: Tx) -> Job:
            row = await self._row(tx)
            stops = tuple(sorted(set(ready.stop_token_ids) | set(info.stop_token_ids)))
            row = replace(row, vocab_size=ready.vocab_size, stop_token_ids=stops)
            row = _with_ready_learner(row, now=self._deps.clock.now())
            await tx.put(row)
            await record_event(
                tx, row.id, "learner_ready", {"step": ready.step, "parameters": ready.parameters}, now=self._deps.clock.now()
            )
            return row

        row = await self._deps.store.write(save)
        self._deps.wake.notify(job.id)
        return row

    async def _replay(self, learner: Learner, job: Job) -> None:
        """Train the batches committed since the checkpoint again, and check the digests of what they had published."""
        at_stake = await self._deps.store.read(lambda r: versions_at_stake(r, job.id))
        if self._resume_step in at_stake:
            await self._snapshot(learner, job, self._resume_step)
        for step in range(self._resume_step, job.committed_steps):
            if (await self._job()).state in TERMINAL[JobState]:
                return
            batch = await self._deps.store.read(lambda r, step=step: r.get(Batch, job.id, step))  # type: ignore[misc]
            if batch is None:
                raise LearnerRefused(f"batch {step} is gone but no checkpoint after it exists: the job cannot be resumed exactly")
            await self._train(learner, job, await self._intact(job, batch))
            if step + 1 in at_stake:
                await self._snapshot(learner, job, step + 1)
        await self._announcer.finished()

    async def _turn(self, learner: Learner, plane: DataPlane, info: EnvironmentInfo) -> bool:
        """One look at the rows and the next thing done; False when the job ended, or paused for so long that it gives up its place."""
        job = await self._ready()
        if job.state in TERMINAL[JobState]:
            await end_job(self._deps, job.id, job.state, job.reason)
            return False
        if job.state is JobState.PAUSED and self._deps.clock.now() - job.state_since > self._deps.settings.paused_learner_s:
            await self._announcer.finished()
            return False
        await self._checkpoint_if_due(learner, job)
        await self._publish_if_due(learner, job)
        await self._evaluate_if_due(learner, plane, info, job)
        await self._log(learner, job, range(self._logged, job.committed_steps))
        if job.committed_steps >= job.config.budget.steps:
            is_ended = await self._finish(job)
            if is_ended:
                await self._log(learner, job, range(job.committed_steps, job.committed_steps + 1))  # the last evaluation
            return not is_ended
        if job.state is JobState.RUNNING and await over_budget(self._deps, job):
            return True
        batch = await self._next_batch(job)
        if batch is None:
            return True
        trained = await self._train(learner, job, batch)
        self._deps.reach("step.trained")
        logged = {f"reward/logged/{name}": value for name, value in plane.reward_metrics().items()}
        await commit_step(self._deps, job.id, batch.step, train_s=trained.seconds, metrics={**trained.metrics, **logged})
        return True

    async def _ready(self) -> Job:
        """The job as it is now. One that was paused while its learner started, and resumed, begins to run here."""
        job = await self._job()
        if _with_ready_learner(job, now=0.0).state is job.state:
            return job

        async def save(tx: Tx) -> Job:
            row = _with_ready_learner(await self._row(tx), now=self._deps.clock.now())
            await tx.put(row)
            return row

        job = await self._deps.store.write(save)
        self._deps.wake.notify(job.id)
        return job

    async def _next_batch(self, job: Job) -> Batch | None:
        """The sealed batch of the next step: one sealed before a crash, or a new one; waits one turn if there is none."""
        waiting = await self._deps.store.read(lambda r: r.get(Batch, job.id, job.committed_steps))
        if waiting is not None and waiting.state is BatchState.SEALED:
            return await self._intact(job, waiting)
        with self._deps.wake.watch(job.id) as watch:
            if job.state is JobState.RUNNING and (place := await self._place(job)) != self._looked:
                sealed = await seal_next(self._deps, job, self._known, waited_s=self._deps.clock.now() - self._learner_free_at)
                if sealed.batch is not None:
                    return sealed.batch
                if sealed.is_void:
                    return None  # the job or a group changed meanwhile: look again at once
                self._looked = place
            self._announcer.raise_if_failed()
            await watch.wait(TURN_S)
        if job.state is JobState.PAUSED:
            self._learner_free_at = self._deps.clock.now()
        return None

    async def _intact(self, job: Job, batch: Batch) -> Batch:
        """A batch that was sealed before this learner began, its file as it was then. Raises LearnerRefused."""
        if (why := await remade(self._deps, job, batch)) is not None:
            raise LearnerRefused(f"batch {batch.step} cannot be trained, so the job cannot be resumed exactly: {why}")
        return batch

    async def _place(self, job: Job) -> tuple[int, ...]:
        """What the seal rule's answer depends on: while it stays the same, looking again is in vain."""

        async def read(reader: Reader) -> tuple[int, int]:
            ready: dict[str, object] = {"job_id": job.id, "state": GroupState.READY}
            return await reader.count(Group, **ready), await reader.total(Group, "number", **ready)

        return (job.committed_steps, job.config.staleness.max, *await self._deps.store.read(read))

    async def _train(self, learner: Learner, job: Job, batch: Batch) -> link.Trained:
        request = link.Train(fence=job.learner_fence, step=batch.step, batch_path=batch.path, batch_digest=batch.digest)
        trained = await learner.ask(request, deadline_s=self._tools.deadlines.train_s)
        if not isinstance(trained, link.Trained) or trained.step != batch.step:
            raise LearnerLost(f"the learner answered {trained.kind!r} to train step {batch.step}")
        self._learner_free_at = self._deps.clock.now()
        return trained

    async def _publish_if_due(self, learner: Learner, job: Job) -> None:
        public = await self._deps.store.read(lambda r: published(r, job.id))
        newest = public[-1].version if public else None
        if newest == job.committed_steps or self._announcer.is_under_way(job.committed_steps):
            return
        kappa = await self._deps.store.read(lambda r: measured_kappa(r, job))
        due = publication_rules.is_due(
            committed_steps=job.committed_steps, published=newest, kappa=kappa, planned_steps=job.config.budget.steps
        )
        if due or _is_checkpoint_step(job):
            await self._snapshot(learner, job, job.committed_steps)

    async def _snapshot(self, learner: Learner, job: Job, version: int) -> None:
        """Have the learner write its bits, then encode and announce them beside the training."""
        await self._announcer.finished()
        canary = canary_ids(job.config.seed, job.vocab_size)
        request = link.Snapshot(
            fence=job.learner_fence, directory=str(snapshot_directory(self._deps, job, version)), canary_ids=canary
        )
        shot = await learner.ask(request, deadline_s=self._tools.deadlines.snapshot_s)
        if not isinstance(shot, link.Snapshotted) or shot.version != version:
            raise LearnerLost(f"the learner answered {shot.kind!r} to snapshot version {version}")
        self._deps.reach("publish.snapshot_written")
        self._announcer.begin(job, shot, canary)
        self._learner_free_at = self._deps.clock.now()

    async def _checkpoint_if_due(self, learner: Learner, job: Job) -> None:
        """As the rows say: one that failed, or was cut off, is made when the job goes on, the last step's before it ends."""
        if not _is_checkpoint_step(job):
            return
        if await self._deps.store.read(lambda r: r.get(CheckpointRow, job.id, job.committed_steps)) is not None:
            return
        directory = checkpoint_directory(self._deps, job)
        request = link.Checkpoint(fence=job.learner_fence, directory=str(directory), ledger_step=job.committed_steps)
        done = await learner.ask(request, deadline_s=self._tools.deadlines.checkpoint_s)
        if not isinstance(done, link.Checkpointed) or done.step != job.committed_steps:
            raise LearnerLost(f"the learner answered {done.kind!r} to checkpoint step {job.committed_steps}")
        self._deps.reach("checkpoint.written")
        await record_checkpoint(self._deps, job, directory)
        self._deps.reach("checkpoint.rows_written")
        await forget_before(self._deps, job)
        self._learner_free_at = self._deps.clock.now()

    async def _evaluate_if_due(self, learner: Learner, plane: DataPlane, info: EnvironmentInfo, job: Job) -> None:
        count = min(
            job.config.checkpoints.eval_prompts,
            job.config.checkpoints.eval_prompts if info.eval_prompts is None else info.eval_prompts,
        )
        version = job.committed_steps
        due = version % job.config.checkpoints.eval_every_steps == 0 or version >= job.config.budget.steps
        if not due or count == 0:
            return
        if await self._deps.store.read(lambda r: r.get(Metric, job.id, "eval/all/count", version)) is not None:
            return
        await evaluate(self._deps, learner, plane, job, count=count, deadline_s=self._tools.deadlines.evaluate_s)
        self._learner_free_at = self._deps.clock.now()

    async def _log(self, learner: Learner, job: Job, steps: range) -> None:
        """Hand the figures of those steps to the learner, which holds the job's sinks."""
        for step in steps:
            rows = await self._deps.store.read(lambda r, step=step: r.select(Metric, job_id=job.id, step=step))  # type: ignore[misc]
            if rows:
                figures = {row.name: row.value for row in rows}
                request = link.Log(fence=job.learner_fence, step=step, at=max(row.at for row in rows), metrics=figures)
                await learner.ask(request, deadline_s=self._tools.deadlines.log_s)
            self._logged = step + 1

    async def _finish(self, job: Job) -> bool:
        """End the job, unless more steps were planned meanwhile; whether it ended."""
        await self._announcer.finished()
        if not await self._deps.store.write(self._mark_finishing):
            return False
        self._deps.reach("end.finishing")
        await end_job(self._deps, job.id, JobState.COMPLETED, f"all {job.config.budget.steps} steps are committed")
        return True

    async def _mark_finishing(self, tx: Tx) -> bool:
        """From here on `budget.steps` stays as it is."""
        job = await self._row(tx)
        if job.committed_steps < job.config.budget.steps:
            return False
        if job.state in (JobState.RUNNING, JobState.PAUSED):
            state = move(JOB, job.state, "steps_done")
            await tx.put(replace(job, state=state, state_since=self._deps.clock.now(), resume_state=None))
        return True

    async def _may_restart(self, lost: LearnerLost) -> bool:
        """Count the loss, wait, and say whether to start again; fail the job after too many without a step between."""

        async def save(tx: Tx) -> Job:
            row = await self._row(tx)
            job = replace(row, learner_restarts=row.learner_restarts + 1)
            await tx.put(job)
            await record_event(
                tx, job.id, "learner_lost", {"reason": str(lost), "restarts": job.learner_restarts}, now=self._deps.clock.now()
            )
            return job

        await self._announcer.stop()
        job = await self._deps.store.write(save)
        delay = learner_restart(job.learner_restarts, limit=RESTART_LIMIT)
        log.warning("learner_lost", job=job.id, reason=str(lost), restarts=job.learner_restarts, delay_s=delay)
        if delay is None:
            words = f"the learner ended {job.learner_restarts} times without a committed step; the last time: {lost}"
            words += f"; what they printed lies in {learner_log(self._deps.settings.data_dir, job.id)}"
            await end_job(self._deps, job.id, JobState.FAILED, words)
            return False
        await asyncio.sleep(delay)
        return True

    async def _job(self) -> Job:
        return await self._deps.store.read(self._row)

    async def _row(self, reader: Reader) -> Job:
        job = await reader.get(Job, self._job_id)
        if job is None:
            raise RuntimeError(f"job {self._job_id} has no row")
        return job


def _is_checkpoint_step(job: Job) -> bool:
    step = job.committed_steps
    return step > 0 and (step % job.config.checkpoints.every_steps == 0 or step >= job.config.budget.steps)


def _with_ready_learner(job: Job, *, now: float) -> Job:
    """The row of a job whose learner is ready: one that waited for it runs."""
    if job.state is JobState.QUEUED:
        job = replace(job, state=move(JOB, job.state, "learner_started"))
    if job.state is not JobState.STARTING:
        return job
    return replace(job, state=move(JOB, job.state, "learner_ready"), reason="", state_since=now)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found.extend(_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    return found
