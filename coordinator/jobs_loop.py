"""Runs drivers for the jobs that should run, ends overdue ones, and pauses all when the disk is nearly full."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from coordinator.domain.jobs import JobLimits, overdue
from coordinator.domain.model import Batch, Group, Job, JobState
from coordinator.domain.states import JOB, TERMINAL, move
from coordinator.service.deps import Deps
from coordinator.service.driving import JobDriver, Tools
from coordinator.service.ending import LIVE_GROUPS, end_job, settle_all
from coordinator.service.job_ports import LearnerHostFault
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event

log = structlog.get_logger()
TURN_S = 2.0
STARTS_MOST = 3  # drivers lost to a passed deadline between two steps, before the job is paused
LIVE = [state for state in JobState if state not in TERMINAL[JobState]]


class JobsLoop:
    """Keeps one driver task per running job, oldest jobs first, at most `max_running_jobs`."""

    def __init__(self, deps: Deps, tools: Tools) -> None:
        self._deps = deps
        self._tools = tools
        self._drivers: dict[str, asyncio.Task[None]] = {}
        self._starts: dict[str, tuple[int, int]] = {}  # job id -> (committed steps, drivers lost to a deadline there)

    async def run(self) -> None:
        """For ever; cancelling it cancels the drivers and waits for them."""
        try:
            with self._deps.wake.watch("jobs") as watch:
                await self._settle_ended()
                while True:
                    await self._turn_or_log()
                    await watch.wait(TURN_S)
        finally:
            for task in self._drivers.values():
                task.cancel()
            await asyncio.gather(*self._drivers.values(), return_exceptions=True)

    async def _turn_or_log(self) -> None:
        """A full disk or a busy store passes: the rows still say what is to be done. A store that has ended does not."""
        try:
            await self._turn()
        except ConnectionError:
            raise
        except Exception:
            log.exception("jobs_turn_failed")

    async def _turn(self) -> None:
        await self._reap()
        await self._watch_disk()
        jobs = await self._deps.store.read(lambda r: r.select(Job, state=LIVE, order_by="created_at"))
        for job in jobs:
            await self._end_if_overdue(job)
        # A paused job with a driver counts: its learner holds memory until the driver gives it back.
        room = self._deps.settings.max_running_jobs - len(self._drivers)
        waiting = [job for job in jobs if job.id not in self._drivers and job.state is not JobState.PAUSED]
        for job in waiting[: max(room, 0)]:
            self._drivers[job.id] = asyncio.create_task(JobDriver(self._deps, self._tools, job.id).run(), name=f"job-{job.id}")

    async def _reap(self) -> None:
        for job_id, task in list(self._drivers.items()):
            if not task.done():
                continue
            error = asyncio.CancelledError("its driver was cancelled") if task.cancelled() else task.exception()
            if error is not None and await self._may_start_again(job_id, error):
                log.warning("driver_starts_again", job=job_id, reason=_innermost(error))
            elif error is not None:
                log.error("driver_failed", job=job_id, exc_info=error)
                await self._pause(job_id, _why_paused(error))
            del self._drivers[job_id]  # only now: it is not started again before the pause is on record

    async def _may_start_again(self, job_id: str, error: BaseException) -> bool:
        """A deadline that passed is no fault of the job: a host that was suspended, or a busy disk. A few tries between two steps."""
        if not all(isinstance(leaf, TimeoutError) for leaf in _leaves(error)):
            return False
        job = await self._deps.store.read(lambda r: r.get(Job, job_id))
        step = -1 if job is None else job.committed_steps
        before, tries = self._starts.get(job_id, (step, 0))
        self._starts[job_id] = (step, tries + 1 if before == step else 1)
        return self._starts[job_id][1] <= STARTS_MOST

    async def _pause(self, job_id: str, reason: str) -> None:
        async def save(tx: Tx) -> None:
            job = await tx.get(Job, job_id)
            if job is None or job.state in TERMINAL[JobState] or job.state is JobState.PAUSED:
                return
            now = self._deps.clock.now()
            paused = move(JOB, job.state, "pause_requested")
            await tx.put(replace(job, state=paused, reason=reason, state_since=now, resume_state=job.state))
            await record_event(tx, job_id, "paused", {"reason": reason}, now=now)

        await self._deps.store.write(save)
        self._deps.wake.notify(job_id)

    async def _watch_disk(self) -> None:
        free, least = await self._deps.blobs.free_bytes(), self._deps.settings.minimum_free_bytes
        if free >= least:
            return
        for job in await self._deps.store.read(lambda r: r.select(Job, state=[JobState.STARTING, JobState.RUNNING])):
            await self._pause(job.id, f"disk_full: {free} bytes are free, the minimum is {least}; free some, then resume")

    async def _end_if_overdue(self, job: Job) -> None:
        progressed = await self._deps.store.read(lambda r: _progressed_at(r, job))
        end = overdue(job, now=self._deps.clock.now(), progressed_at=progressed, limits=JobLimits())
        if end is None:
            return
        event, reason = end
        if event == "failed":
            await end_job(self._deps, job.id, JobState.FAILED, reason)
            return
        await self._cancel(job.id, reason)

    async def _cancel(self, job_id: str, reason: str) -> None:
        async def save(tx: Tx) -> None:
            job = await tx.get(Job, job_id)
            if job is None or job.state in TERMINAL[JobState]:
                return
            now = self._deps.clock.now()
            await tx.put(replace(job, state=move(JOB, job.state, "cancelled"), reason=reason, state_since=now, resume_state=None))
            await settle_all(tx, job_id, f"job_cancelled: {reason}", now=now)
            await record_event(tx, job_id, "job_cancelled", {"reason": reason}, now=now)

        await self._deps.store.write(save)
        self._deps.wake.notify(job_id)

    async def _settle_ended(self) -> None:
        """A crash between a job's end and its settlement leaves groups behind: settle them."""
        for job in await self._deps.store.read(lambda r: r.select(Job, state=list(TERMINAL[JobState]))):
            if await self._deps.store.read(lambda r, job=job: r.count(Group, job_id=job.id, state=LIVE_GROUPS)):  # type: ignore[misc]
                await end_job(self._deps, job.id, job.state, job.reason)


async def _progressed_at(reader: Reader, job: Job) -> float:
    last = await reader.get(Batch, job.id, job.committed_steps - 1) if job.committed_steps else None
    return job.state_since if last is None or last.committed_at is None else last.committed_at


def _leaves(error: BaseException) -> list[BaseException]:
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for inner in error.exceptions for leaf in _leaves(inner)]


def _why_paused(error: BaseException) -> str:
    refusals = [leaf for leaf in _leaves(error) if isinstance(leaf, LearnerHostFault)]
    if refusals:
        return f"the learner's host refused, nothing is lost: {refusals[0]}; then resume"
    return f"internal error, nothing is lost: {_innermost(error)}; see the coordinator's log, then resume"


def _innermost(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
