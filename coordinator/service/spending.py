"""What a job's workers cost so far, from session rows, and whether that uses up its budget."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.model import Job, JobState, WorkerSession
from coordinator.domain.states import JOB, move
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event
from pricing.money import accrued_uusd, usd_to_uusd


async def spent_uusd(reader: Reader, job: Job) -> int:
    """Active time of all worker sessions since the job began, at each session's price (one job uses the pool at a time)."""
    sessions = await reader.select(WorkerSession, last_seen_at__ge=job.created_at)
    return sum(accrued_uusd(s.price_uusd_per_hour, seconds=s.last_seen_at - max(s.started_at, job.created_at)) for s in sessions)


def exhausted(job: Job, *, spent: int) -> str | None:
    """Why the job must stop spending now, or None."""
    usd = job.config.budget.usd
    if usd is None or spent < usd_to_uusd(usd):
        return None
    return f"the budget of {usd} USD is spent (budget.usd): raise it and resume"


async def over_budget(deps: Deps, job: Job) -> bool:
    """Pause the job when its budget is used up; True if it was paused here."""
    spent = await deps.store.read(lambda r: spent_uusd(r, job))
    reason = exhausted(job, spent=spent)
    if reason is None:
        return False

    async def save(tx: Tx) -> None:
        row = await tx.get(Job, job.id)
        if row is None or row.state is not JobState.RUNNING:
            return
        now = deps.clock.now()
        paused = move(JOB, row.state, "pause_requested")
        await tx.put(replace(row, state=paused, reason=reason, state_since=now, resume_state=row.state))
        await record_event(tx, job.id, "paused", {"reason": reason}, now=now)

    await deps.store.write(save)
    deps.wake.notify(job.id)
    return True
