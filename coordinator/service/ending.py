"""Ends a job: every group settles with a reason, every lease closes, and the state says how it ended (law 2)."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.groups import ends_void
from coordinator.domain.model import Group, GroupState, Job, JobState, Lease, LeaseState, Rollout, RolloutState
from coordinator.domain.states import GROUP, JOB, LEASE, ROLLOUT, move
from coordinator.service.deps import Deps
from coordinator.service.ports import Tx
from coordinator.service.recording import record_event

LIVE_GROUPS = [GroupState.ISSUED, GroupState.READY, GroupState.SEALED]
UNSETTLED = [RolloutState.OPEN, RolloutState.LEASED]
ENDS = {JobState.COMPLETED: "finished", JobState.FAILED: "failed"}


async def settle_all(tx: Tx, job_id: str, reason: str, *, now: float) -> int:
    """Close live leases and settle every unsettled group of a job; the number of groups settled here."""
    for lease in await tx.select(Lease, job_id=job_id, state=LeaseState.LIVE):
        await tx.put(replace(lease, state=move(LEASE, lease.state, "cancelled"), reason=reason, closed_at=now))
    groups = await tx.select(Group, job_id=job_id, state=LIVE_GROUPS)
    for group in groups:
        rollouts = await tx.select(Rollout, group_id=group.id)
        event = "voided" if ends_void(rollouts) else "rejected"
        await tx.put(replace(group, state=move(GROUP, group.state, event), reason=reason, settled_at=now))
    # Groups that ended before the job may have open slots too, until the sweep finds them.
    void = await tx.select(Rollout, job_id=job_id, state=UNSETTLED)
    if void:
        await tx.put(*(replace(r, state=move(ROLLOUT, r.state, "group_ended")) for r in void))
    return len(groups)


async def end_job(deps: Deps, job_id: str, end: JobState, reason: str) -> None:
    """Move a job to COMPLETED or FAILED and settle what is left; a job that already ended is only settled."""

    async def save(tx: Tx) -> None:
        now = deps.clock.now()
        job = await tx.get(Job, job_id)
        if job is None:
            return
        settled = await settle_all(tx, job_id, f"job_{end.value}: {reason}", now=now)
        if job.state in (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED):
            return
        # Paused in its very last moment: what was to be done is done all the same.
        paused = end is JobState.COMPLETED and job.state is JobState.PAUSED
        state = move(JOB, job.state, "steps_done") if paused else job.state
        await tx.put(replace(job, state=move(JOB, state, ENDS[end]), reason=reason, state_since=now, resume_state=None))
        await record_event(tx, job_id, f"job_{end.value}", {"reason": reason, "groups_settled": settled}, now=now)

    deps.reach("end.before_rows")
    await deps.store.write(save)
    deps.reach("end.rows_written")
    deps.wake.notify(job_id)
    deps.wake.notify("jobs")
