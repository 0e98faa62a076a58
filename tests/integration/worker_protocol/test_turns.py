"""Slots in turns over the wire: each turn is a lease whose prompt is the record so far, settled and paid once, kept by who has the cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load

from coordinator.domain.audit import audit
from coordinator.domain.audit_turns import counted
from coordinator.domain.model import (
    Batch,
    Group,
    GroupState,
    Job,
    Lease,
    LeaseState,
    Publication,
    Refusal,
    Rollout,
    RolloutState,
    Turn,
)
from coordinator.domain.seeds import slot_seed
from coordinator.domain.turns import KEPT_S, STICKY_S
from coordinator.service import accounting, market_rows, sealing
from coordinator.service.leasing import Ask, Outcome
from coordinator.service.playing import ask, next_turns, save
from coordinator.service.ports import Continued, Graded, PlayedTurn
from coordinator.service.tidying import needed_blobs
from coordinator.service.worker_desk import ROUND_MOST, LeaseDesk
from coordinator.wire import messages as wire
from coordinator.wire.job import JobConfig

JOB = "job-1"
CAP, SIZE = 30, 2  # tokens after the prompt, rollouts of a group


class TwoTurns:
    """An environment that answers the first turn with tokens 40 and 41, and scores after the second."""

    def __init__(self) -> None:
        self.records: list[tuple[tuple[int, ...], tuple[PlayedTurn, ...]]] = []

    async def play(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Graded | Continued:
        self.records.append((tuple(prompt_ids), tuple(turns)))
        if len(turns) == 1:
            return Continued((40, 41))
        return Graded("scored", float(turns[-1].token_ids[2]), "text")


@pytest.fixture
async def job(coordinator: Any) -> Job:
    """The running job, with an environment of two turns."""
    row: Job = await coordinator.get(Job, JOB)
    values = row.config.model_dump(mode="json")
    values["environment"] |= {"type": "guess_number", "max_turns": 2, "turn_tokens": 8}
    values["sampling"]["max_new_tokens"] = CAP
    values["algorithm"] |= {"group_size": SIZE, "groups_per_step": 1}
    row = replace(row, config=JobConfig.model_validate(values))
    await coordinator.put(row)
    return row


async def played(coordinator: Any, job: Job, environment: TwoTurns) -> int:
    """The environment answers everything that waits for it; how much that was."""
    waiting = await coordinator.deps.store.read(lambda r: next_turns(r, job, set()))
    answered = [await ask(coordinator.deps, environment, one) for one in waiting]
    if answered:
        await save(coordinator.deps, job, answered)
    return len(answered)


async def test_a_slot_is_played_in_turns_by_the_worker_that_has_its_record(coordinator: Any, stranger: Any, job: Job) -> None:
    worker, environment = await stranger().ready(), TwoTurns()
    first = await worker.lease()
    assert (first.slots, first.sampling.max_new_tokens) == ((0, 1), 8)
    assert (await worker.submit(first)).accepted == (0, 1)
    assert await played(coordinator, job, environment) == 2
    assert await played(coordinator, job, environment) == 0

    prompts = {}
    for _ in range(2):
        (lease,) = (await worker.ask(free=1)).leases
        (slot,) = lease.slots
        prompts[slot] = lease.prompt_ids
        assert lease.seeds == (slot_seed(7, 0, slot, 1),) != (first.seeds[slot],)
        assert (lease.sampling.max_new_tokens, lease.last_step) == (8, 2)
        assert (await worker.submit(lease)).accepted == (slot,)
    assert prompts == {slot: (2, 3, 0, 5, 6, 2 + slot, 1, 40, 41) for slot in (0, 1)}

    assert await played(coordinator, job, environment) == 2
    assert environment.records[-1] == (
        (2, 3, 0),
        (PlayedTurn((5, 6, 3, 1), "stop", (40, 41)), PlayedTurn((5, 6, 3, 1), "stop", ())),
    )
    rollouts = await coordinator.rows(Rollout, job_id=JOB, group_number=0)
    assert [(r.state, r.turn, r.preceding, r.reward) for r in rollouts] == [
        (RolloutState.SCORED, 1, 6, 2.0),
        (RolloutState.SCORED, 1, 6, 3.0),
    ]
    assert (await coordinator.get(Group, f"{JOB}/g0")).state is GroupState.READY
    await audited(coordinator, job)


async def audited(coordinator: Any, job: Job) -> None:
    found = [await coordinator.rows(kind, job_id=JOB) for kind in (Group, Rollout, Lease, Batch, Publication, Refusal)]
    turns = [counted(turn) for turn in await coordinator.rows(Turn, job_id=JOB)]
    report = audit(await coordinator.get(Job, job.id), *found, turns)
    assert report.ok, report.findings
    assert report.counts.get("turns") == (len(turns) or None)


async def test_a_repeated_turn_is_a_duplicate_whatever_came_after_it(coordinator: Any, stranger: Any, job: Job) -> None:
    """Law 2: the reply of the first submission was lost, and the environment was quicker than the repetition."""
    worker, environment = await stranger().ready(), TwoTurns()
    first = await worker.lease()
    await worker.submit(first, (0,))
    await played(coordinator, job, environment)
    again = await worker.submit(first, (0,))
    assert (again.accepted, again.duplicates, again.refused) == ((), (0,), ())
    (second,) = (await worker.ask(free=1)).leases
    again = await worker.submit(first, (0, 1))
    assert (again.accepted, again.duplicates) == ((1,), (0,))
    await worker.submit(second)
    again = await worker.submit(first)
    assert (again.duplicates, again.refused) == ((0, 1), ())
    lease = await coordinator.get(Lease, first.lease_id)
    assert (lease.state, lease.tokens) == (LeaseState.DONE, 8)
    assert await coordinator.rows(Refusal) == []


async def test_each_turn_pays_its_tokens_once_to_who_made_them(coordinator: Any, stranger: Any, job: Job) -> None:
    """Also while its lease is open, and when it ends unfinished; another worker makes the second turn."""
    one, other = await stranger("one").ready(), await stranger("other").ready()
    environment = TwoTurns()
    first = await one.lease()
    await one.submit(first, (0,))
    await played(coordinator, job, environment)
    await accounting.look(coordinator.deps)
    tokens = await coordinator.deps.store.read(lambda r: accounting.accepted_tokens(r, worker_id=one.id))
    assert tokens == 4
    coordinator.clock.added += STICKY_S + 0.1
    (second,) = (await other.ask(free=1)).leases
    assert second.prompt_ids == (2, 3, 0, 5, 6, 2, 1, 40, 41)
    await other.submit(second)
    for worker in (one, other):
        tokens = await coordinator.deps.store.read(lambda r, worker=worker: accounting.accepted_tokens(r, worker_id=worker.id))
        assert tokens == 4
    now = coordinator.deps.clock.now()
    meters = await coordinator.deps.store.read(lambda r: accounting.measure(r, coordinator.deps, now=now + 60))
    assert sorted(one.seen.tokens for one in meters[JOB]) == [4, 4]


async def test_rates_are_of_one_span_of_time_when_not_all_turns_are_looked_at(
    coordinator: Any, stranger: Any, job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns hold their tokens, so fewer of them are read than rollouts: older rollouts do not count either then."""
    worker, environment = await stranger().ready(), TwoTurns()
    first = await worker.lease()
    for slot in first.slots:
        await worker.submit(first, (slot,))
        await played(coordinator, job, environment)
        coordinator.clock.added += 10.0
    (second,) = (await worker.ask(free=1)).leases
    await worker.submit(second)
    newest = max(turn.accepted_at for turn in await coordinator.rows(Turn))
    for most, tokens, since in ((64, 12, 0.0), (1, 8, newest)):
        monkeypatch.setattr(market_rows.rates, "most_turns", lambda *_, most=most: most)
        work = await coordinator.deps.store.read(lambda r: market_rows._work(r, job, coordinator.deps.clock.now()))
        made = work.made[worker.id]
        assert sum(one.tokens for one in made) == tokens
        assert all(one.accepted_at >= since for one in made)


async def test_the_next_turn_waits_a_little_for_its_worker(coordinator: Any, stranger: Any, job: Job) -> None:
    one, other = await stranger("one").ready(), await stranger("other").ready()
    first = await one.lease()
    await one.submit(first)
    await played(coordinator, job, TwoTurns())
    assert all("/g0/" not in lease.lease_id for lease in (await other.ask(free=2)).leases)
    (lease,) = (await one.ask(free=1)).leases
    assert lease.group_id == first.group_id


async def test_a_next_turn_comes_before_what_others_gave_up(coordinator: Any, stranger: Any, job: Job) -> None:
    """An older group's first turns may be made by anyone; the turn's cache is on this worker alone."""
    one, other = await stranger("one").ready(), await stranger("other").ready()
    given_up = (await other.ask(free=SIZE)).leases[0]
    mine = (await one.ask(free=SIZE)).leases[0]
    assert (given_up.group_id, mine.group_id) == (f"{JOB}/g0", f"{JOB}/g1")
    await one.submit(mine)
    await coordinator.put(replace(await coordinator.get(Lease, given_up.lease_id), deadline=0.0))
    await coordinator.sweep()
    assert (await coordinator.get(Rollout, given_up.group_id, 0)).state is RolloutState.OPEN
    await played(coordinator, job, TwoTurns())
    assert [lease.group_id for lease in (await one.ask(free=3)).leases] == [mine.group_id, mine.group_id, given_up.group_id]


async def test_a_slot_is_kept_while_the_environment_looks_at_its_turn(coordinator: Any, stranger: Any, job: Job) -> None:
    """Else a first turn would take it, and the next turn wait for that one's end, or lose its cache. Not for long: the engine would idle."""
    worker = await stranger().ready()
    first = (await worker.ask(free=SIZE)).leases[0]
    await worker.submit(first, (0,))
    reply = await worker.ask(free=1)
    assert (reply.leases, reply.reason) == ((), "the environment looks at your newest turns: the next ones are yours")
    assert [lease.group_id for lease in (await worker.ask(free=2)).leases] == [f"{JOB}/g1"]
    await played(coordinator, job, TwoTurns())
    (next_turn,) = (await worker.ask(free=1)).leases
    assert (next_turn.group_id, next_turn.slots) == (first.group_id, (0,))
    await worker.submit(next_turn)
    coordinator.clock.added += KEPT_S + 0.1
    assert [lease.group_id for lease in (await worker.ask(free=1)).leases] == [f"{JOB}/g1"]


async def test_a_worker_gets_as_much_of_a_group_as_it_has_free_slots_for(coordinator: Any, stranger: Any, job: Job) -> None:
    """More would wait in its engine, and its later turns behind that; the rest is for whoever asks next."""
    one, other = await stranger("one").ready(), await stranger("other").ready()
    (lease,) = (await one.ask(free=1)).leases
    assert (lease.group_id, lease.slots) == (f"{JOB}/g0", (0,))
    assert [(lease.group_id, lease.slots) for lease in (await other.ask(free=1)).leases] == [(f"{JOB}/g0", (1,))]


async def test_a_turn_does_not_wait_for_a_look_at_everybody(coordinator: Any, stranger: Any, job: Job, rows: Any) -> None:
    """More workers wait than one look is at; that the first ones get nothing must not keep the one with the cache waiting."""
    mine = await stranger("mine").ready()
    leases = (await mine.ask(free=3 * SIZE)).leases
    assert len(leases) == 3  # all that S = 2 allows
    await mine.submit(leases[0], (0,))
    others = [await stranger(f"other-{n}").ready() for n in range(ROUND_MOST + 1)]
    desk = LeaseDesk(coordinator.deps)

    async def at_the_desk(worker: Any) -> asyncio.Task[Outcome]:
        """The worker's request, once it was looked at and waits."""
        request = wire.LeaseRequest(
            session_epoch=worker.epoch, job_id=JOB, version=0, digest=rows.digest(0), free_slots=1, wait_s=20.0
        )
        task = asyncio.create_task(desk.ask(Ask(worker.id, worker.epoch, request), is_open=lambda: True))
        while not (JOB in desk._queues and worker.id in (queue := desk._queues[JOB].waiting) and queue[worker.id].ask.judged):
            await asyncio.sleep(0)
        return task

    waiting = [await at_the_desk(worker) for worker in others]
    last = await at_the_desk(mine)
    await played(coordinator, job, TwoTurns())
    await asyncio.wait([last, *waiting], return_when=asyncio.FIRST_COMPLETED)
    (lease,) = last.result().leases
    assert (lease.group_id, lease.slots) == (leases[0].group_id, (0,))
    await desk.close()
    assert not any(outcome.leases for outcome in await asyncio.gather(*waiting))


async def test_a_turn_is_bounded_by_the_oldest_version_of_its_slot(coordinator: Any, stranger: Any, job: Job, rows: Any) -> None:
    """A newer version makes the second turn; the first one's age still counts."""
    worker = await stranger().ready()
    await worker.submit(await worker.lease())
    await played(coordinator, job, TwoTurns())
    await coordinator.put(rows.publication(1), replace(job, committed_steps=1))
    assert (await worker.confirm(1)).accepted
    (lease,) = (await worker.ask(1, free=1)).leases
    assert (lease.version, lease.last_step) == (1, 2)
    await worker.submit(lease)
    rollout = await coordinator.get(Rollout, lease.group_id, lease.slots[0])
    assert (rollout.oldest_version, rollout.newest_version, sorted(rollout.digests)) == (0, 1, ["0", "1"])
    assert (await coordinator.get(Group, lease.group_id)).oldest_version == 0
    await coordinator.put(replace(job, committed_steps=3))
    await coordinator.sweep()
    group = await coordinator.get(Group, lease.group_id)
    assert (group.state, group.reason.partition(":")[0]) == (GroupState.REJECTED, "stale")


async def test_an_answer_that_comes_after_its_group_ended_keeps_the_turn_and_ends_the_slot(
    coordinator: Any, stranger: Any, job: Job
) -> None:
    worker = await stranger().ready()
    await worker.submit(await worker.lease())
    (waiting, _) = await coordinator.deps.store.read(lambda r: next_turns(r, job, set()))
    answered = await ask(coordinator.deps, TwoTurns(), waiting)
    group = await coordinator.get(Group, f"{JOB}/g0")
    await coordinator.put(replace(group, state=GroupState.REJECTED, reason="stale: too old"))
    await save(coordinator.deps, job, [answered])
    rollout = await coordinator.get(Rollout, group.id, waiting.rollout.slot)
    assert (rollout.state, rollout.blob) == (RolloutState.VOID, None)
    (turn,) = await coordinator.rows(Turn)
    assert (turn.length, turn.token_ids) == (4, (5, 6, 2 + rollout.slot, 1))
    await save(coordinator.deps, job, [answered])  # said again: nothing is left to change
    assert await coordinator.rows(Turn) == [turn]
    await audited(coordinator, job)


async def test_the_batch_says_which_tokens_were_sampled(coordinator: Any, stranger: Any, job: Job) -> None:
    """Sampled tokens with their log-probs and versions, the environment's with neither, in the record's order; blobs are kept till then."""
    worker, environment = await stranger().ready(), TwoTurns()
    first = await worker.lease()
    await worker.submit(first)
    await played(coordinator, job, environment)
    for _ in range(2):
        await worker.submit((await worker.ask(free=1)).leases[0])
    await played(coordinator, job, environment)
    blobs = {turn.blob for turn in await coordinator.rows(Turn)} | {r.blob for r in await coordinator.rows(Rollout, group_number=0)}
    assert blobs <= await needed_blobs(coordinator.deps)
    sealed = await sealing.seal_next(coordinator.deps, job, {}, waited_s=0.0)
    assert sealed.batch is not None
    arrays = load(sealing.batch_path(coordinator.deps, JOB, 0).read_bytes())
    assert arrays["lengths"].tolist() == [10, 10]
    assert arrays["token_ids"].tolist() == [5, 6, 2, 1, 40, 41, 5, 6, 2, 1, 5, 6, 3, 1, 40, 41, 5, 6, 3, 1]
    assert arrays["sampled"].dtype == np.bool_
    assert arrays["sampled"].tolist() == ([True] * 4 + [False] * 2 + [True] * 4) * 2
    assert arrays["logprobs"].tolist() == ([-0.5] * 4 + [0.0] * 2 + [-0.5] * 4) * 2
    assert arrays["versions"].tolist() == [0] * 20
    assert arrays["rewards"].tolist() == [2.0, 3.0]
    from coordinator.learner.batch_file import parse

    batch = parse(sealing.batch_path(coordinator.deps, JOB, 0).read_bytes(), job_id=JOB, step=0)
    assert batch.sampled_lengths.tolist() == [8, 8]


async def test_an_environment_that_is_slow_keeps_no_other_slot_waiting(coordinator: Any, stranger: Any, job: Job) -> None:
    """The loop itself: one slot's answer never comes, the other goes on; a restart asks again."""
    from coordinator.service.playing import keep_playing

    class Stuck(TwoTurns):
        async def play(self, split: str, index: int, prompt_ids: Sequence[int], turns: Sequence[PlayedTurn]) -> Any:
            if turns[0].token_ids[2] == 2:
                await asyncio.Event().wait()
            return await super().play(split, index, prompt_ids, turns)

        def alarm(self) -> str | None:
            return None

    worker = await stranger().ready()
    await worker.submit(await worker.lease())
    loop = asyncio.create_task(keep_playing(coordinator.deps, job, Stuck()))
    with coordinator.deps.wake.watch(JOB) as watch:
        while not await coordinator.rows(Turn):
            await watch.wait(5.0)
    assert [turn.slot for turn in await coordinator.rows(Turn)] == [1]
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)
    assert await played(coordinator, job, TwoTurns()) == 1
    assert len(await coordinator.rows(Turn)) == 2
