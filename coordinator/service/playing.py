"""Plays accepted turns on in the data plane: the environment answers and the slot is open again, or the rollout has its outcome.

Level-triggered as grading is: what waits is found in rows. Each slot is saved as soon as its environment answered, so that a slow
one keeps no other waiting. `keep_playing` waits for (1) a change of the job's rows, (2) an answer that came, (3) IDLE_S.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from coordinator.domain.model import Group, GroupState, Job, JobState, Rollout, RolloutState, Turn
from coordinator.domain.states import ROLLOUT, TERMINAL, move
from coordinator.domain.turns import continued
from coordinator.service.batches import tokens_of
from coordinator.service.deps import Deps
from coordinator.service.grading import close_graded, tell_alarm, with_outcome
from coordinator.service.ports import Continued, DataPlane, Graded, PlayedTurn, Reader, Tx
from coordinator.wire.frames import decode_frame

AT_ONCE = 256  # slots that the data plane is asked about at once
IDLE_S = 5.0
Key = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """An accepted turn, the group, and the turns before it in order."""

    rollout: Rollout
    group: Group
    before: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Answered:
    """What the environment said about an accepted turn. `sampled`: its token ids."""

    rollout: Rollout
    sampled: tuple[int, ...]
    said: Graded | Continued


async def keep_playing(deps: Deps, job: Job, plane: DataPlane) -> None:
    """Play for ever; an alarm of the data plane becomes an event when it begins or ends."""
    alarm: str | None = None
    asked: dict[Key, asyncio.Task[Answered]] = {}
    try:
        with deps.wake.watch(job.id) as watch:
            while True:
                for waiting in await deps.store.read(lambda r: next_turns(r, job, set(asked))):
                    key = (waiting.rollout.group_id, waiting.rollout.slot)
                    asked[key] = asyncio.create_task(ask(deps, plane, waiting))
                await _first(asked.values(), asyncio.ensure_future(watch.wait(IDLE_S)))
                if done := [key for key, task in asked.items() if task.done()]:
                    await save(deps, job, [asked.pop(key).result() for key in done])
                    alarm = await tell_alarm(deps, job, plane, alarm)
    finally:
        for task in asked.values():
            task.cancel()
        await asyncio.gather(*asked.values(), return_exceptions=True)


async def _first(tasks: Iterable[asyncio.Task[Answered]], change: asyncio.Future[Any]) -> None:
    """Until one of the tasks or the change is there."""
    either: list[asyncio.Future[Any]] = [*tasks, change]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        change.cancel()
        await asyncio.gather(change, return_exceptions=True)


async def next_turns(reader: Reader, job: Job, asked: set[Key]) -> list[Waiting]:
    """The accepted turns that nobody asks the environment about yet, lowest group first."""
    limit = AT_ONCE + len(asked)  # those that are asked about are among them
    rows = await reader.select(Rollout, job_id=job.id, state=RolloutState.ACCEPTED, order_by="group_number", limit=limit)
    fresh = [row for row in rows if (row.group_id, row.slot) not in asked][: AT_ONCE - len(asked)]
    if not fresh:
        return []
    groups = {group.id: group for group in await reader.select(Group, id=sorted({row.group_id for row in fresh}))}
    turns: dict[Key, list[Turn]] = defaultdict(list)
    played = sorted({row.group_id for row in fresh if row.turn})
    slots = sorted({row.slot for row in fresh if row.turn})
    for turn in await reader.select(Turn, group_id=played, slot=slots) if played else []:  # rows are long: only these slots'
        turns[turn.group_id, turn.slot].append(turn)
    return [
        Waiting(row, groups[row.group_id], tuple(sorted(turns[row.group_id, row.slot], key=lambda one: one.turn))) for row in fresh
    ]


async def ask(deps: Deps, plane: DataPlane, waiting: Waiting) -> Answered:
    """One look of the environment at a slot's record."""
    rollout = waiting.rollout
    arrays = decode_frame(await deps.blobs.get(rollout.blob or ""))[1]
    sampled = tuple(tokens_of(arrays, rollout)[0].tolist())
    turns = [PlayedTurn(t.token_ids[: t.length], t.stop_reason, t.token_ids[t.length :]) for t in waiting.before]
    turns.append(PlayedTurn(sampled, rollout.stop_reason))
    return Answered(rollout, sampled, await plane.play("train", waiting.group.prompt_index, waiting.group.prompt_ids, turns))


async def save(deps: Deps, job: Job, answered: Sequence[Answered]) -> None:
    """Write what was said about turns that are still accepted; close the groups that became whole."""
    deps.reach("play.before_rows")
    await deps.store.write(lambda tx: _save(tx, job, answered, now=deps.clock.now()))
    deps.reach("play.rows_written")
    deps.wake.notify(job.id)


async def _save(tx: Tx, job: Job, answered: Sequence[Answered], *, now: float) -> None:
    ids = sorted({one.rollout.group_id for one in answered})
    still = {(r.group_id, r.slot): r for r in await tx.select(Rollout, group_id=ids, state=RolloutState.ACCEPTED)}
    issued = {group.id for group in await tx.select(Group, id=ids, state=GroupState.ISSUED)}
    row = await tx.get(Job, job.id)
    goes_on = row is not None and row.state not in TERMINAL[JobState]
    rollouts: list[Rollout] = []
    turns: list[Turn] = []
    for one in answered:
        found = still.get((one.rollout.group_id, one.rollout.slot))
        if found is None or found.turn != one.rollout.turn:
            continue
        if isinstance(one.said, Graded):
            rollouts.append(with_outcome(found, one.said, now=now))
        else:
            is_wanted = goes_on and found.group_id in issued
            turn, opened = continued(found, one.sampled, one.said.token_ids if is_wanted else (), now=now)
            turns.append(turn)
            rollouts.append(opened if is_wanted else replace(opened, state=move(ROLLOUT, found.state, "group_ended")))
    for rows in (turns, rollouts):
        if rows:
            await tx.put(*rows)
    await close_graded(tx, job, ids, now=now)
