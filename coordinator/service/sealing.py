"""Seals the learner's next batch and commits its step. Blob first, then rows (law 2)."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from blake3 import blake3

from coordinator.domain import seal as sealing
from coordinator.domain.groups import is_zero_variance
from coordinator.domain.model import Batch, BatchState, Group, GroupState, Job, JobState, Rollout, RolloutState, Turn
from coordinator.domain.states import BATCH, GROUP, JOB, TERMINAL, move
from coordinator.domain.turns import is_played
from coordinator.service.batches import batch_file, carried
from coordinator.service.deps import Deps
from coordinator.service.interlocking import interlocked
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event, record_metrics
from p2p.adapters.durable import hash_file, write_durably

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Ready:
    """The ready groups of a job, and what the seal rule says about them."""

    groups: dict[int, Group]
    seal: sealing.Seal


@dataclass(frozen=True, slots=True)
class Sealed:
    """The sealed batch; or none, because there are too few ready groups or (`is_void`) because the rows changed meanwhile."""

    batch: Batch | None = None
    is_void: bool = False


Known = dict[str, sealing.ReadyGroup]
"""What the seal rule needs of ready groups, by group id: it does not change any more, so it is read once."""


def batch_path(deps: Deps, job_id: str, step: int) -> Path:
    """Where the batch of a step lies until a newer checkpoint is durable."""
    return deps.settings.data_dir / "batches" / job_id / f"{step:08d}.safetensors"


async def look(reader: Reader, job: Job, known: Known) -> Ready:
    """Read the ready groups and ask the seal rule; `known` is filled with what was read and emptied of what is gone."""
    groups = {g.number: g for g in await reader.select(Group, job_id=job.id, state=GroupState.READY, order_by="number")}
    await _learn(reader, groups.values(), known)
    step = job.committed_steps
    rejected = await reader.select(Group, job_id=job.id, state=GroupState.REJECTED, step=step)
    replaced = sum(g.reason.startswith("no_signal") for g in rejected)
    algorithm = job.config.algorithm
    limit = algorithm.groups_per_step if algorithm.max_replacements is None else algorithm.max_replacements
    seal = sealing.choose(
        list(known.values()),
        step=step,
        bound=job.config.staleness.max,
        groups_per_step=algorithm.groups_per_step,
        max_replacements=limit,
        replaced=replaced,
    )
    return Ready(groups, seal)


async def _learn(reader: Reader, groups: Collection[Group], known: Known) -> None:
    current = {group.id: group for group in groups}
    for group_id in [one for one in known if one not in current]:
        del known[group_id]
    missing = [group_id for group_id in current if group_id not in known]
    for group_id, rollouts in (await _members(reader, missing)).items():
        known[group_id] = _ready(current[group_id], rollouts)


async def _members(reader: Reader, group_ids: Sequence[str]) -> dict[str, list[Rollout]]:
    members: dict[str, list[Rollout]] = defaultdict(list)
    for rollout in await reader.select(Rollout, group_id=list(group_ids)) if group_ids else []:
        members[rollout.group_id].append(rollout)
    return members


def _ready(group: Group, rollouts: Sequence[Rollout]) -> sealing.ReadyGroup:
    oldest = min(r.oldest_version for r in carried(rollouts) if r.oldest_version is not None)
    return sealing.ReadyGroup(group.number, oldest, _scores(rollouts))


def _scores(rollouts: Sequence[Rollout]) -> tuple[float | None, ...]:
    """Of a group's scored rollouts, by slot."""
    return tuple(r.reward for r in sorted(rollouts, key=lambda r: r.slot) if r.state is RolloutState.SCORED)


async def seal_next(deps: Deps, job: Job, known: Known, *, waited_s: float) -> Sealed:
    """Seal the batch of step `committed_steps` if enough groups are ready; apply the rule's rejections either way."""
    ready = await deps.store.read(lambda r: look(r, job, known))
    if ready.seal.rejected:
        await deps.store.write(lambda tx: _reject(tx, job, ready, now=deps.clock.now()))
        deps.wake.notify(job.id)
    if ready.seal.groups is None:
        return Sealed()
    chosen = [ready.groups[number] for number in ready.seal.groups]
    members = await deps.store.read(lambda r: _members(r, [g.id for g in chosen]))
    data = await _content(deps, job, job.committed_steps, chosen, members, zero=set(ready.seal.zero_weight))
    path = batch_path(deps, job.id, job.committed_steps)
    digest = await asyncio.to_thread(_written, path, data)
    deps.reach("seal.file_written")
    batch = Batch(
        job_id=job.id,
        step=job.committed_steps,
        state=BatchState.SEALED,
        groups=ready.seal.groups,
        path=str(path),
        digest=digest,
        rollouts=sum(len(carried(members[g.id])) for g in chosen),
        no_signal=ready.seal.no_signal,
        staleness={str(age): count for age, count in ready.seal.staleness.items()},
        sealed_at=deps.clock.now(),
        waited_s=waited_s,
        bound=job.config.staleness.max,
    )
    sealed = await deps.store.write(lambda tx: _seal(tx, job, batch, chosen))
    deps.reach("seal.rows_written")
    deps.wake.notify(job.id)
    return Sealed(batch) if sealed else Sealed(is_void=True)


async def remade(deps: Deps, job: Job, batch: Batch) -> str | None:
    """See that the file of a batch is what was sealed: one that is damaged or gone is made again, the same bytes, from rows and blobs.

    None: it is there. Else why it cannot be.
    """
    path = Path(batch.path)
    if await asyncio.to_thread(_digest_of, path) == batch.digest:
        return None
    chosen = await deps.store.read(lambda r: r.select(Group, job_id=job.id, number=list(batch.groups), order_by="number"))
    members = await deps.store.read(lambda r: _members(r, [g.id for g in chosen]))
    zero = {group.number for group in chosen if is_zero_variance(_scores(members[group.id]))}
    try:
        data = await _content(deps, job, batch.step, chosen, members, zero=zero)
    except (KeyError, ValueError) as error:
        return f"{path} is damaged or gone, and so is what it was made of: {error.args[0]}"
    if blake3(data).hexdigest() != batch.digest:
        return f"{path} is damaged or gone, and the rows no longer give what was sealed"
    await asyncio.to_thread(_written, path, data)
    log.warning("batch_remade", job=job.id, step=batch.step, path=str(path))
    return None


async def _turns(reader: Reader, chosen: Sequence[Group]) -> dict[tuple[str, int], list[Turn]]:
    """The turns before the newest, by slot, in order."""
    turns: dict[tuple[str, int], list[Turn]] = defaultdict(list)
    for turn in await reader.select(Turn, group_id=[group.id for group in chosen]):
        turns[turn.group_id, turn.slot].append(turn)
    return {key: sorted(some, key=lambda one: one.turn) for key, some in turns.items()}


async def _content(
    deps: Deps, job: Job, step: int, chosen: Sequence[Group], members: Mapping[str, Sequence[Rollout]], *, zero: set[int]
) -> bytes:
    """The bytes of a batch's file. Raises KeyError or ValueError where a blob is gone or corrupt."""
    turns = await deps.store.read(lambda r: _turns(r, chosen)) if is_played(job.config) else None
    blobs = {r.blob for g in chosen for r in members[g.id] if r.blob is not None}
    blobs |= {turn.blob for some in (turns or {}).values() for turn in some}
    frames = {blob: await deps.blobs.get(blob) for blob in blobs}
    return await asyncio.to_thread(batch_file, job.id, step, chosen, members, frames=frames, zero=zero, turns=turns)


def _written(path: Path, data: bytes) -> str:
    write_durably(path, data)
    return blake3(data).hexdigest()


def _digest_of(path: Path) -> str | None:
    try:
        return hash_file(path)
    except OSError:
        return None


async def _seal(tx: Tx, job: Job, batch: Batch, chosen: Sequence[Group]) -> bool:
    """Write the rows unless the job moved on or a group changed since it was read."""
    now_job = await tx.get(Job, job.id)
    if now_job is None or now_job.state is not JobState.RUNNING or now_job.committed_steps != batch.step:
        return False
    if now_job.config.staleness.max != batch.bound or batch.step >= now_job.config.budget.steps:
        return False
    fresh = await tx.select(Group, id=[g.id for g in chosen], state=GroupState.READY)
    if len(fresh) != len(chosen) or not await tx.insert(batch):
        return False
    await tx.put(*(replace(g, state=move(GROUP, g.state, "sealed"), step=batch.step) for g in fresh))
    return True


async def _reject(tx: Tx, job: Job, ready: Ready, *, now: float) -> None:
    reasons = dict(ready.seal.rejected)
    wanted = [ready.groups[number].id for number in reasons]
    for group in await tx.select(Group, id=wanted, state=GroupState.READY):
        # The step is kept on the row: replacements are counted per step, from rows.
        state = move(GROUP, group.state, "rejected")
        await tx.put(replace(group, state=state, reason=reasons[group.number], step=job.committed_steps, settled_at=now))


async def _rewards(reader: Reader, groups: Sequence[Group]) -> dict[str, list[float]]:
    """The scores of each group, by its id."""
    found: dict[str, list[float]] = {group.id: [] for group in groups}
    for rollout in await reader.select(Rollout, group_id=list(found), state=RolloutState.SCORED) if found else []:
        if rollout.reward is not None:
            found[rollout.group_id].append(rollout.reward)
    return found


async def commit_step(deps: Deps, job_id: str, step: int, *, train_s: float, metrics: Mapping[str, float]) -> bool:
    """The learner took step `step`: its batch is committed, its groups are trained, the job's step grows by one.

    False, and nothing changes, when the job ended meanwhile: its groups are settled already.
    """

    async def save(tx: Tx) -> bool:
        now = deps.clock.now()
        job, batch = await tx.get(Job, job_id), await tx.get(Batch, job_id, step)
        if job is None or batch is None or job.committed_steps != step:
            raise RuntimeError(f"step {step} of job {job_id} cannot be committed: it is not the next step of a sealed batch")
        if job.state in TERMINAL[JobState]:
            return False
        came = await tx.select(Group, job_id=job_id, step=step)
        by_group = await _rewards(tx, came)
        groups = [group for group in came if group.state is GroupState.SEALED]
        # A batch that holds some groups without signal still teaches by the others: only one of nothing else is a step without.
        streak = job.no_signal_streak + 1 if sealing.teaches_nothing([by_group[group.id] for group in groups]) else 0
        await tx.put(*(replace(g, state=move(GROUP, g.state, "step_committed"), settled_at=now) for g in groups))
        await tx.put(replace(batch, state=move(BATCH, batch.state, "step_committed"), committed_at=now, train_s=train_s))
        # The reward's curve is that before filters (law 10): of all that came to this step, trained or replaced.
        rewards = [reward for scores in by_group.values() for reward in scores]
        figures = {**metrics, "time/step": train_s, "time/wait_for_batch": batch.waited_s}
        if rewards:
            figures["reward/all/mean"] = figures["reward"] = sum(rewards) / len(rewards)
        job = replace(job, committed_steps=step + 1, no_signal_streak=streak, learner_restarts=0)
        job = await _paused_without_signal(tx, job, now=now)
        await record_metrics(tx, job_id, step, figures, now=now)
        await tx.put(await interlocked(tx, job, step, now=now))
        summary = {"step": step, "train_s": train_s, "reward": figures.get("reward/all/mean"), "no_signal": batch.no_signal}
        await record_event(tx, job_id, "step_committed", summary, now=now)
        return True

    deps.reach("step.before_commit")
    is_committed = await deps.store.write(save)
    deps.reach("step.committed")
    deps.wake.notify(job_id)
    return is_committed


async def _paused_without_signal(tx: Tx, job: Job, *, now: float) -> Job:
    limit = job.config.algorithm.no_signal_limit
    if job.no_signal_streak < limit or job.state is not JobState.RUNNING:
        return job
    reason = (
        f"{limit} steps in a row had no signal: every rollout of a group got the same reward. "
        "Check the reward function and the difficulty of the prompts, then resume."
    )
    await record_event(tx, job.id, "paused", {"reason": reason}, now=now)
    paused = move(JOB, job.state, "pause_requested")
    return replace(job, state=paused, reason=reason, state_since=now, resume_state=JobState.RUNNING, no_signal_streak=0)
