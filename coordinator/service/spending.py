"""What a job's workers cost so far, from session and event rows, and whether that uses up its budget."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.model import Event, Job, JobState, WorkerSession
from coordinator.domain.spans import KINDS, Span, shares, spans
from coordinator.domain.states import JOB, TERMINAL, move
from coordinator.service.deps import Deps
from coordinator.service.operator_figures import shared_cost_uusd
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event
from pricing.money import usd_to_uusd


async def spent_uusd(reader: Reader, job: Job) -> int:
    """Asked price of all worker sessions while the job used the pool; a time shared by several jobs is split evenly."""
    own = await _spans(reader, job)
    if not own:
        return 0
    others = [await _spans(reader, other) for other in await _contemporaries(reader, job)]
    sessions = await reader.select(WorkerSession, last_seen_at__ge=own[0][0])
    return shared_cost_uusd(sessions, shares(own, others))


async def _spans(reader: Reader, job: Job) -> tuple[Span, ...]:
    return spans(await reader.select(Event, job_id=job.id, kind=list(KINDS), order_by="seq"))


async def _contemporaries(reader: Reader, job: Job) -> list[Job]:
    """Other jobs that may have used the pool in this one's time."""
    live = await reader.select(Job, state=[state for state in JobState if state not in TERMINAL[JobState]])
    ended = await reader.select(Job, state=list(TERMINAL[JobState]), state_since__gt=job.created_at)
    until = job.state_since if job.state in TERMINAL[JobState] else None
    return [other for other in (*live, *ended) if other.id != job.id and (until is None or other.created_at < until)]


def exhausted(job: Job, *, spent: int, now: float) -> str | None:
    """Why the job must stop spending now, or None."""
    budget = job.config.budget
    if budget.usd is not None and spent >= usd_to_uusd(budget.usd):
        return f"the budget of {budget.usd} USD is spent (budget.usd): raise it and resume"
    if budget.deadline_hours is not None and now - job.created_at >= 3600.0 * budget.deadline_hours:
        return f"{budget.deadline_hours:g} hours have passed since it was submitted (budget.deadline_hours): raise it and resume"
    return None


async def over_budget(deps: Deps, job: Job) -> bool:
    """Pause the job when its budget of money or time is used up; True if it is."""
    spent = await deps.store.read(lambda r: spent_uusd(r, job)) if job.config.budget.usd is not None else 0
    if exhausted(job, spent=spent, now=deps.clock.now()) is None:
        return False

    async def save(tx: Tx) -> None:
        row, now = await tx.get(Job, job.id), deps.clock.now()
        # The budget may have been raised meanwhile: the row decides.
        reason = None if row is None else exhausted(row, spent=spent, now=now)
        if row is None or reason is None or row.state is not JobState.RUNNING:
            return
        paused = move(JOB, row.state, "pause_requested")
        await tx.put(replace(row, state=paused, reason=reason, state_since=now, resume_state=row.state))
        await record_event(tx, job.id, "paused", {"reason": reason}, now=now)

    await deps.store.write(save)
    deps.wake.notify(job.id)
    return True
