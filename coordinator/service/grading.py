"""Grades accepted rollouts in the data plane and closes their groups. Level-triggered: what is ungraded is found in rows."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from coordinator.domain import groups as grouping
from coordinator.domain.model import Group, GroupState, Job, JobState, Rollout, RolloutState
from coordinator.domain.states import JOB, ROLLOUT, move
from coordinator.service.batches import tokens_of
from coordinator.service.deps import Deps
from coordinator.service.ports import DataPlane, Graded, Reader, Tx
from coordinator.service.recording import record_event
from coordinator.wire.frames import decode_frame

ROUND = 1024  # rollouts graded between two commits at most
IDLE_S = 5.0
UNGRADABLE_LEAST = 8  # groups in a row without scores before a job pauses
GRADED = [GroupState.READY, GroupState.SEALED, GroupState.TRAINED, GroupState.REJECTED]
EVENTS = {"scored": "scored", "unscored": "unscored", "failed": "grader_failed", "timeout": "grader_timed_out"}


async def keep_grading(deps: Deps, job: Job, plane: DataPlane) -> None:
    """Grade for ever; an alarm of the data plane becomes an event when its words change."""
    alarm: str | None = None
    with deps.wake.watch(job.id) as watch:
        while True:
            graded = await grade_round(deps, job, plane)
            alarm = await tell_alarm(deps, job, plane, alarm)
            if not graded:
                await watch.wait(IDLE_S)


async def tell_alarm(deps: Deps, job: Job, plane: DataPlane, before: str | None) -> str | None:
    """Record an event when the data plane's alarm begins or ends; the alarm now."""
    words = plane.alarm()
    if (words is None) != (before is None):
        await deps.store.write(partial(_tell, job_id=job.id, words=words, now=deps.clock.now()))
    return words


async def _tell(tx: Tx, *, job_id: str, words: str | None, now: float) -> None:
    kind = "grader_alarm" if words else "grader_alarm_over"
    await record_event(tx, job_id, kind, {"reason": words or "failed and timed-out gradings are rare again"}, now=now)


async def grade_round(deps: Deps, job: Job, plane: DataPlane) -> int:
    """Grade up to ROUND accepted rollouts of live groups; the number graded."""
    by_group = await deps.store.read(partial(_waiting, job=job))
    if not by_group:
        return 0
    groups = await deps.store.read(lambda r: r.select(Group, id=list(by_group)))
    graded = await asyncio.gather(*(_grade_group(deps, plane, group, by_group[group.id]) for group in groups))
    outcomes = [pair for pairs in graded for pair in pairs]
    deps.reach("grade.before_rows")
    await deps.store.write(lambda tx: _save(tx, job, outcomes, now=deps.clock.now()))
    deps.reach("grade.rows_written")
    deps.wake.notify(job.id)
    return len(outcomes)


async def _waiting(reader: Reader, job: Job) -> dict[str, list[Rollout]]:
    """The accepted rollouts to grade next, by group: whatever is there, or whole groups where rewards look at all of one."""
    is_whole = job.config.environment.grade_whole_groups
    limit = None if is_whole else ROUND  # a limit could cut a group, or hold none that is whole
    by_group: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in await reader.select(Rollout, job_id=job.id, state=RolloutState.ACCEPTED, order_by="group_number", limit=limit):
        by_group[rollout.group_id].append(rollout)
    return await _whole(reader, job, by_group) if is_whole and by_group else by_group


async def _whole(reader: Reader, job: Job, by_group: dict[str, list[Rollout]]) -> dict[str, list[Rollout]]:
    """Those groups for which nothing more will come. One that ended early is graded as it is: its rollouts must have an outcome."""
    members: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in await reader.select(Rollout, group_id=list(by_group)):
        members[rollout.group_id].append(rollout)
    minimum = job.config.algorithm.min_group
    groups = [
        group
        for group in await reader.select(Group, id=list(by_group))
        if group.state is not GroupState.ISSUED or grouping.is_whole(group, members[group.id], min_group=minimum)
    ]
    return {group.id: by_group[group.id] for group in groups[: max(1, ROUND // job.config.algorithm.group_size)]}


async def _grade_group(deps: Deps, plane: DataPlane, group: Group, rollouts: Sequence[Rollout]) -> list[tuple[Rollout, Graded]]:
    frames = {blob: decode_frame(await deps.blobs.get(blob))[1] for blob in {r.blob for r in rollouts if r.blob}}
    completions = [tokens_of(frames[r.blob or ""], r)[0].tolist() for r in rollouts]
    return list(zip(rollouts, await plane.grade("train", group.prompt_index, completions), strict=True))


async def _save(tx: Tx, job: Job, outcomes: Sequence[tuple[Rollout, Graded]], *, now: float) -> None:
    """Write outcomes of rollouts that are still accepted, then close the groups that became whole."""
    touched: dict[str, None] = {}
    ids = sorted({rollout.group_id for rollout, _ in outcomes})
    still = await tx.select(Rollout, group_id=ids, state=RolloutState.ACCEPTED) if ids else []
    fresh = {(r.group_id, r.slot) for r in still}
    done = [(r, g) for r, g in outcomes if (r.group_id, r.slot) in fresh]
    rows = [with_outcome(rollout, graded, now=now) for rollout, graded in done]
    if rows:
        await tx.put(*rows)
    touched.update((r.group_id, None) for r in rows)
    await close_graded(tx, job, list(touched), now=now)


def with_outcome(rollout: Rollout, graded: Graded, *, now: float) -> Rollout:
    """An accepted rollout with its outcome."""
    return replace(
        rollout,
        state=move(ROLLOUT, rollout.state, EVENTS[graded.outcome]),
        reward=graded.reward,
        text=graded.text,
        detail=graded.detail,
        graded_at=now,
    )


async def close_graded(tx: Tx, job: Job, group_ids: Sequence[str], *, now: float) -> None:
    """Close the groups that became whole; pause the job when grading itself looks broken."""
    if await close_groups(tx, job, group_ids, now=now):
        await _pause_if_ungradable(tx, job.id, now=now)


async def _pause_if_ungradable(tx: Tx, job_id: str, *, now: float) -> None:
    """A reward function that never scores would spend the budget on nothing."""
    job = await tx.get(Job, job_id)
    if job is None or job.state is not JobState.RUNNING:
        return
    at_least = max(UNGRADABLE_LEAST, 2 * job.config.algorithm.groups_per_step)
    newest = await tx.select(Group, job_id=job_id, state=GRADED, order_by="-number", limit=at_least)
    reason = grouping.ungradable(newest, since=job.state_since, at_least=at_least)
    if reason is None:
        return
    paused = move(JOB, job.state, "pause_requested")
    await tx.put(replace(job, state=paused, reason=reason, state_since=now, resume_state=job.state))
    await record_event(tx, job_id, "paused", {"reason": reason}, now=now)


async def close_groups(tx: Tx, job: Job, group_ids: Sequence[str], *, now: float) -> int:
    """Move issued groups whose rollouts are all graded to READY, or REJECTED with the reason; how many."""
    if not group_ids:
        return 0
    members: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in await tx.select(Rollout, group_id=list(group_ids)):
        members[rollout.group_id].append(rollout)
    closed = []
    for group in await tx.select(Group, id=list(group_ids), state=GroupState.ISSUED):
        closing = grouping.close(group, members[group.id], min_group=job.config.algorithm.min_group)
        if closing is not None:
            settled = None if closing.state is GroupState.READY else now
            closed.append(replace(group, state=closing.state, reason=closing.reason, settled_at=settled))
    if closed:
        await tx.put(*closed)
    return len(closed)
