"""What ends by time alone: leases, silent workers, served quarantines, groups that no step can train any more (law 5).

`sweep` is one look; `keep_sweeping` is the loop around it. It waits for (1) the deadline that the last look named, (2) a
worker or job that changed, at most TURN_S.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import structlog

from coordinator.domain import groups as group_rules
from coordinator.domain import leases as lease_rules
from coordinator.domain.model import (
    Group,
    GroupState,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
    Worker,
    WorkerState,
)
from coordinator.domain.staleness import last_step
from coordinator.domain.states import GROUP, ROLLOUT, TERMINAL, WORKER, move
from coordinator.domain.workers import is_lost, is_served
from coordinator.service.deps import Deps
from coordinator.service.grading import close_groups
from coordinator.service.ports import Reader, Tx
from coordinator.service.worker_beats import flush
from coordinator.service.worker_faults import is_present, release_work
from coordinator.service.worker_leases import end_leases, reopen_slots
from coordinator.service.worker_presence import Heard
from coordinator.service.worker_sessions import close_session

log = structlog.get_logger()
TURN_S = 1.0
FLUSH_S = 5.0
CLOSED_BEFORE_S = 60.0  # slots of leases that others closed within this time are looked for
ABSENT = [WorkerState.QUARANTINED, WorkerState.GONE]
DEAD_GROUPS = [GroupState.REJECTED, GroupState.VOID]
ENDED_LEASES = [LeaseState.EXPIRED, LeaseState.DEAD, LeaseState.CANCELLED, LeaseState.ABANDONED]


async def sweep(deps: Deps) -> float | None:
    """One look: end what is due; the time of the next deadline, None when nothing waits for one."""
    now = deps.clock.now()
    if now - deps.presence.saved_at >= FLUSH_S:
        deps.presence.saved_at = now
        await flush(deps)
    silent = [heard.worker_id for heard in deps.presence.all() if _is_silent(deps, heard, now=now)]
    topics = await deps.store.write(lambda tx: _sweep(tx, deps, silent, now=now))
    deps.reach("sweep.rows_written")
    for worker_id in silent:
        heard = deps.presence.get(worker_id)
        if heard is not None and _is_silent(deps, heard, now=now):
            deps.presence.forget(worker_id)
    for topic in topics:
        deps.wake.notify(topic)
    return await _next_deadline(deps)


def _is_silent(deps: Deps, heard: Heard, *, now: float) -> bool:
    return is_lost(heard.at, now=now, lost_after_s=deps.settings.lost_after_s) and now > heard.excused_until


async def keep_sweeping(deps: Deps) -> None:
    """Sweep for ever. A failed look is logged and repeated: the rows still say what is due."""
    with deps.wake.watch("workers") as watch:
        while True:
            try:
                due = await sweep(deps)
            except ConnectionError:
                raise  # the store has ended: going on would look alive and do nothing
            except Exception:
                log.exception("sweep_failed")
                due = None
            wait_s = TURN_S if due is None else max(due - deps.clock.now(), 0.0)
            await watch.wait(min(wait_s, TURN_S))
            await asyncio.sleep(0.05)  # changes within this time are looked at together


async def recover(deps: Deps) -> None:
    """After a start: nobody could submit or beat while the coordinator was down, so everyone gets the grace."""
    now = deps.clock.now()
    grace_s = deps.settings.restart_grace_s

    async def save(tx: Tx) -> list[Worker]:
        leases = await tx.select(Lease, state=LeaseState.LIVE)
        moved = [replace(x, deadline=lease_rules.moved_deadline(x, now=now, grace_s=grace_s)) for x in leases]
        if moved:
            await tx.put(*moved)
        await _reopen_orphans(tx)
        return await tx.select(Worker, state=[WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING])

    for worker in await deps.store.write(save):
        rate = worker.tokens_per_s or None
        heard = Heard(worker.id, worker.session_epoch, worker.last_seen_at, tokens_per_s=rate, excused_until=now + grace_s)
        deps.presence.remember(heard)


async def _reopen_orphans(tx: Tx) -> None:
    """Slots still marked as leased although their lease ended."""
    leased = await tx.select(Rollout, state=RolloutState.LEASED)
    ids = sorted({rollout.lease_id for rollout in leased if rollout.lease_id})
    ended = await tx.select(Lease, id=ids, state=ENDED_LEASES) if ids else []
    await reopen_slots(tx, [lease.id for lease in ended])


async def _sweep(tx: Tx, deps: Deps, silent: Sequence[str], *, now: float) -> frozenset[str]:
    """The ids of the jobs that changed, and "workers" when a worker did."""
    topics = await _lose(tx, silent, deps, now=now)
    topics |= await _release_served(tx, deps, now=now)
    topics |= await _end_leases(tx, now=now)
    recent = await tx.select(Lease, state=ENDED_LEASES, closed_at__ge=now - CLOSED_BEFORE_S)
    if recent:
        await reopen_slots(tx, [lease.id for lease in recent])
    for job in await tx.select(Job, state=[JobState.RUNNING, JobState.PAUSED, JobState.FINISHING]):
        if await _end_groups(tx, job, now=now):
            topics |= {job.id}
    return topics


async def _lose(tx: Tx, silent: Sequence[str], deps: Deps, *, now: float) -> frozenset[str]:
    """Workers that were not heard for too long are gone; their sessions end with their last sign of life."""
    topics: frozenset[str] = frozenset()
    for worker in await tx.select(Worker, id=list(silent)) if silent else []:
        heard = deps.presence.get(worker.id)
        if heard is not None and not _is_silent(deps, heard, now=now):
            continue  # it was heard while this waited for its turn to write
        seen = worker.last_seen_at if heard is None else max(worker.last_seen_at, heard.at)
        topics |= {"workers"} | await release_work(tx, worker.id, f"the worker was not heard for {now - seen:.0f} s", now=now)
        await close_session(tx, worker, now=now, last_seen_at=seen)
        if is_present(worker):
            state = move(WORKER, worker.state, "lost")
            reason = f"lost: not heard for {now - seen:.0f} s"
            await tx.put(replace(worker, state=state, reason=reason, state_since=now, last_seen_at=seen, activity=""))
    return topics


async def _release_served(tx: Tx, deps: Deps, *, now: float) -> frozenset[str]:
    """A quarantine ends by its timer; the worker joins again when it is told that it is gone."""
    topics: frozenset[str] = frozenset()
    settings = deps.settings
    latest = now - settings.quarantine_s
    for worker in await tx.select(Worker, state=WorkerState.QUARANTINED, state_since__le=latest):
        if is_served(worker, now=now, quarantine_s=settings.quarantine_s):
            state = move(WORKER, worker.state, "quarantine_served")
            await tx.put(replace(worker, state=state, reason="its quarantine is over", state_since=now))
            topics |= {"workers"}
    return topics


async def _end_leases(tx: Tx, *, now: float) -> frozenset[str]:
    """Every live lease is held against wall, version, worker, group and job."""
    live = await tx.select(Lease, state=LeaseState.LIVE)
    if not live:
        return frozenset()
    jobs = {job.id: job for job in await tx.select(Job, id=sorted({lease.job_id for lease in live}))}
    absent = {w.id for w in await tx.select(Worker, id=sorted({lease.worker_id for lease in live}), state=ABSENT)}
    settled = {g.id: g for g in await tx.select(Group, id=sorted({x.group_id for x in live}), state=DEAD_GROUPS)}
    lost = {job_id: await _rolled_back(tx, job_id) for job_id in jobs}
    ends = []
    for lease in live:
        end = _closed_above(lease, jobs.get(lease.job_id), settled.get(lease.group_id)) or lease_rules.ending(
            lease,
            now=now,
            committed_steps=jobs[lease.job_id].committed_steps,
            bound=jobs[lease.job_id].config.staleness.max,
            worker_alive=lease.worker_id not in absent,
            rolled_back=lost[lease.job_id],
        )
        if end is not None:
            ends.append((lease, *end))
    return await end_leases(tx, ends, now=now)


def _closed_above(lease: Lease, job: Job | None, group: Group | None) -> tuple[LeaseState, str] | None:
    """Whether the lease's job or group ended without it."""
    if job is None:
        return LeaseState.CANCELLED, f"job {lease.job_id} does not exist any more"
    if job.state in TERMINAL[JobState]:
        return LeaseState.CANCELLED, f"job_{job.state.value}: {job.reason}"
    if group is not None:
        return LeaseState.CANCELLED, f"group {group.number} ended: {group.reason}"
    return None


async def _rolled_back(reader: Reader, job_id: str) -> frozenset[str]:
    state = PublicationState.ROLLED_BACK
    if not await reader.count(Publication, job_id=job_id, state=state):
        return frozenset()
    return frozenset(publication.digest for publication in await reader.select(Publication, job_id=job_id, state=state))


async def _end_groups(tx: Tx, job: Job, *, now: float) -> bool:
    """Reject groups that died with their reason, and void slots that nobody needs any more."""
    bound, step = job.config.staleness.max, job.committed_steps
    newest = await tx.highest(Publication, "version", job_id=job.id, state=PublicationState.PUBLISHED)
    no_fresh = newest is not None and step > last_step(newest, bound)
    # Only these can have died: nothing else about a group depends on the step.
    aged: dict[str, object] = {"job_id": job.id, "state": GroupState.ISSUED} | (
        {} if no_fresh else {"oldest_version__lt": step - bound}
    )
    suspects = await tx.select(Group, order_by=None, limit=None, **aged) if no_fresh or step > bound else []
    members: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in await tx.select(Rollout, group_id=[group.id for group in suspects]) if suspects else []:
        members[rollout.group_id].append(rollout)
    died = False
    for group in suspects:
        reason = group_rules.died(group, members[group.id], step=step, bound=bound, newest_version=newest)
        if reason is not None:
            await _end_group(tx, group, members[group.id], reason, now=now)
            died = True
    closed = await _close_short(tx, job, now=now)
    return await _void_left_over(tx, job) or died or closed


async def _close_short(tx: Tx, job: Job, *, now: float) -> bool:
    """Groups whose last slot under way was lost, not graded: with `min_group` nothing else would look at them."""
    if job.config.algorithm.min_group is None:
        return False
    waiting = await tx.select(Rollout, job_id=job.id, state=RolloutState.OPEN)
    return await close_groups(tx, job, sorted({rollout.group_id for rollout in waiting}), now=now) > 0


async def _end_group(tx: Tx, group: Group, rollouts: Sequence[Rollout], reason: str, *, now: float) -> None:
    missing = [r for r in rollouts if r.state in (RolloutState.OPEN, RolloutState.LEASED)]
    leases = await tx.select(Lease, group_id=group.id, state=LeaseState.LIVE)
    words = f"lease_dead_by_version: its group can be trained no more ({reason})"
    await end_leases(tx, [(lease, LeaseState.DEAD, words) for lease in leases], now=now)
    if missing:
        await tx.put(*(replace(r, state=move(ROLLOUT, r.state, "group_ended")) for r in missing))
    event = "voided" if group_rules.ends_void(rollouts) else "rejected"
    await tx.put(replace(group, state=move(GROUP, group.state, event), reason=reason, settled_at=now))


async def _void_left_over(tx: Tx, job: Job) -> bool:
    """Open slots of groups that closed short or ended."""
    waiting = await tx.select(Rollout, job_id=job.id, state=RolloutState.OPEN)
    if not waiting:
        return False
    ids = sorted({rollout.group_id for rollout in waiting})
    issued = {group.id for group in await tx.select(Group, id=ids, state=GroupState.ISSUED)}
    left = [rollout for rollout in waiting if rollout.group_id not in issued]
    if left:
        await tx.put(*(replace(r, state=move(ROLLOUT, r.state, "group_ended")) for r in left))
    return bool(left)


async def _next_deadline(deps: Deps) -> float | None:
    """The earliest wall deadline, possible loss of a worker, or flush."""
    first = await deps.store.read(lambda r: r.select(Lease, state=LeaseState.LIVE, order_by="deadline", limit=1))
    loss = deps.presence.earliest_loss(deps.settings.lost_after_s)
    times = [lease.deadline for lease in first]
    if loss is not None:
        times.append(loss)
    if deps.presence.unsaved:
        times.append(deps.presence.saved_at + FLUSH_S)
    return min(times, default=None)
