"""Whether a job has used up its budget of money or time, and its pause when it has."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.model import Job, JobState
from coordinator.domain.states import JOB, move
from coordinator.service.deps import Deps
from coordinator.service.ledger import spent_uusd
from coordinator.service.ports import Tx
from coordinator.service.recording import record_event
from pricing.money import usd_to_uusd, uusd_to_usd


def exhausted(job: Job, *, spent: int, now: float) -> str | None:
    """Why the job must stop spending now, or None."""
    budget = job.config.budget
    if budget.usd is not None and spent >= usd_to_uusd(budget.usd):
        return used_up(job, spent=spent)
    if budget.deadline_hours is not None and now - job.created_at >= 3600.0 * budget.deadline_hours:
        return f"{budget.deadline_hours:g} hours have passed since it was submitted (budget.deadline_hours): raise it and resume"
    return None


def used_up(job: Job, *, spent: int) -> str:
    """In words: what is left of the budget pays no further work."""
    return f"the budget of {job.config.budget.usd} USD is used up, {uusd_to_usd(spent):g} USD are spent (budget.usd): raise it and resume"


async def over_budget(deps: Deps, job: Job) -> bool:
    """Pause the job when its budget of money or time is used up; True if it is."""
    spent = await deps.store.read(lambda r: spent_uusd(r, job.id)) if job.config.budget.usd is not None else 0
    if exhausted(job, spent=spent, now=deps.clock.now()) is None:
        return False

    async def save(tx: Tx) -> None:
        row, now = await tx.get(Job, job.id), deps.clock.now()
        # The budget may have been raised meanwhile: the row decides.
        reason = None if row is None else exhausted(row, spent=spent, now=now)
        if row is not None and reason is not None:
            await pause_for(tx, row, reason, now=now)

    await deps.store.write(save)
    deps.wake.notify(job.id)
    return True


async def pause_for(tx: Tx, job: Job, reason: str, *, now: float) -> None:
    """Pause a running job; `job` is its row in this transaction."""
    if job.state is not JobState.RUNNING:
        return
    paused = move(JOB, job.state, "pause_requested")
    await tx.put(replace(job, state=paused, reason=reason, state_since=now, resume_state=job.state))
    await record_event(tx, job.id, "paused", {"reason": reason}, now=now)
