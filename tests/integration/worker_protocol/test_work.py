"""From lease to receipt, and law 2: what happens to a slot whatever is repeated, late, old or lost."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from coordinator.domain.model import (
    Group,
    GroupState,
    Holding,
    Job,
    JobState,
    Lease,
    LeaseState,
    PublicationState,
    Refusal,
    Rollout,
    RolloutState,
    Worker,
    WorkerSession,
    WorkerState,
)
from coordinator.domain.seeds import slot_seed
from coordinator.service import accounting
from coordinator.wire.frames import decode_frame
from coordinator.wire.messages import Account, Heartbeat, Leave

JOB = "job-1"


async def test_a_worker_joins_confirms_leases_and_submits(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    assert (await worker.beat()).state == "standby"
    assert [n.version for n in (await worker.beat()).versions] == [0]
    assert (await worker.confirm(0)).accepted
    assert (await worker.beat(0)).reason == "active: waits for work, paid 0.3500 USD an hour until its rate is measured"
    lease = await worker.lease()
    assert lease.slots == (0, 1, 2, 3)
    assert lease.seeds == tuple(slot_seed(7, 0, slot) for slot in range(4))
    assert (lease.version, lease.last_step, lease.fence, lease.prompt_ids) == (0, 2, 1, (2, 3, 0))
    reply = await worker.submit(lease)
    assert (reply.accepted, reply.duplicates, reply.refused) == ((0, 1, 2, 3), (), ())
    rollouts = await coordinator.rows(Rollout, job_id=JOB)
    assert {r.state for r in rollouts} == {RolloutState.ACCEPTED}
    stored = decode_frame(await coordinator.deps.blobs.get(rollouts[2].blob))[1]
    assert stored["token_ids"][rollouts[2].blob_start :][:4].tolist() == [5, 6, 2 + rollouts[2].slot, 1]
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.DONE
    assert (await coordinator.get(Group, lease.group_id)).oldest_version == 0
    assert coordinator.reached[-2:] == ["submit.blob_written", "submit.rows_written"]


async def test_a_repeated_submission_is_a_duplicate_and_nothing_settles_twice(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    first = await worker.submit(lease, (0, 1))
    before = await coordinator.rows(Rollout, job_id=JOB, slot=0)
    again = await worker.submit(lease, (0, 1, 2))
    assert first.accepted == (0, 1)
    assert (again.accepted, again.duplicates, again.refused) == ((2,), (0, 1), ())
    assert await coordinator.rows(Rollout, job_id=JOB, slot=0) == before
    done = await worker.submit(lease)
    assert (done.accepted, done.duplicates) == ((3,), (0, 1, 2))
    after = await worker.submit(lease)
    assert (after.accepted, after.duplicates, after.refused) == ((), (0, 1, 2, 3), ())
    assert await coordinator.rows(Refusal) == []


async def test_concurrent_submissions_of_one_slot_settle_it_once(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    replies = await asyncio.gather(*(worker.submit(lease, (0,), logprobs=np.full(4, -0.1 * n, np.float32)) for n in range(1, 9)))
    assert sorted(len(r.accepted) for r in replies) == [0] * 7 + [1]
    assert all(r.accepted or r.duplicates for r in replies)


async def test_an_old_fence_is_refused(stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    reply = await worker.submit(lease, (0,), fence=lease.fence - 1)
    assert reply.accepted == ()
    assert [(r.code, r.blame, r.paid) for r in reply.refused] == [("old_fence", "worker", False)]


async def test_an_expired_lease_goes_to_another_worker_with_the_same_seeds_and_late_work_is_refused(
    coordinator: Any, stranger: Any
) -> None:
    slow, quick = await stranger("slow").ready(), await stranger("quick").ready()
    lease = await slow.lease()
    await slow.submit(lease, (0,))
    coordinator.clock.added += lease.deadline - coordinator.clock.now() + 1
    coordinator.deps.presence.touch(slow.id, epoch=slow.epoch, at=coordinator.clock.now())
    coordinator.deps.presence.touch(quick.id, epoch=quick.epoch, at=coordinator.clock.now())
    late = await slow.submit(lease, (1,))  # the sweep did not run yet: the deadline itself is what counts
    assert [r.code for r in late.refused] == ["lease_expired"]
    await coordinator.sweep()
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.EXPIRED
    again = await quick.lease()
    assert (again.group_id, again.slots) == (lease.group_id, (1, 2, 3))
    assert again.seeds == lease.seeds[1:]
    assert again.fence == lease.fence + 1
    late = await slow.submit(lease, (0, 1, 2))
    assert late.duplicates == (0,)
    assert {r.code for r in late.refused} == {"lease_expired"}
    assert (await quick.submit(again)).accepted == (1, 2, 3)
    assert {r.attempts for r in await coordinator.rows(Rollout, slot=1)} == {1}
    assert (await coordinator.get(Worker, slow.id)).strikes == 0


async def test_a_slot_is_not_leased_again_to_the_worker_that_lost_it_while_another_can(coordinator: Any, stranger: Any) -> None:
    first, second = await stranger("first").ready(), await stranger("second").ready()
    lease = await first.lease()
    coordinator.clock.added += lease.deadline - coordinator.clock.now() + 1
    for worker in (first, second):
        coordinator.deps.presence.touch(worker.id, epoch=worker.epoch, at=coordinator.clock.now())
    await coordinator.sweep()
    assert (await first.lease()).group_id == f"{JOB}/g1"
    assert (await second.lease()).group_id == lease.group_id


async def test_the_only_worker_may_have_its_slot_again(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    coordinator.clock.added += lease.deadline - coordinator.clock.now() + 1
    coordinator.deps.presence.touch(worker.id, epoch=worker.epoch, at=coordinator.clock.now())
    await coordinator.sweep()
    assert (await worker.lease()).group_id == lease.group_id


async def test_work_in_time_but_dead_by_version_is_refused_paid_and_blamed_on_the_coordinator(
    coordinator: Any, stranger: Any
) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await coordinator.put(replace(await coordinator.get(Job, JOB), committed_steps=3))
    reply = await worker.submit(lease, (0, 1))
    assert [(r.code, r.blame, r.paid) for r in reply.refused] == [("lease_dead_by_version", "coordinator", True)] * 2
    await coordinator.sweep()
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.DEAD
    reply = await worker.submit(lease, (2,))
    assert [(r.code, r.blame, r.paid) for r in reply.refused] == [("lease_dead_by_version", "coordinator", True)]
    assert [r.paid for r in await coordinator.rows(Refusal)] == [True] * 3
    assert {r.tokens for r in await coordinator.rows(Refusal)} == {4}
    assert (await coordinator.get(Worker, worker.id)).strikes == 0


async def test_a_group_whose_tokens_are_too_old_is_rejected_with_the_reason(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await worker.submit(lease, (0,))
    await coordinator.put(replace(await coordinator.get(Job, JOB), committed_steps=3))
    await coordinator.sweep()
    group = await coordinator.get(Group, lease.group_id)
    assert group.state is GroupState.REJECTED
    assert group.reason.startswith("stale:")
    states = [r.state for r in await coordinator.rows(Rollout, group_id=group.id, order_by="slot")]
    assert states == [RolloutState.ACCEPTED] + [RolloutState.VOID] * 3
    assert (await coordinator.rows(Lease, state=LeaseState.LIVE)) == []


async def test_a_faulty_completion_is_refused_reopened_and_counted(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    logprobs = np.full(8, -0.5, np.float32)
    logprobs[5] = np.nan
    reply = await worker.submit(lease, (0, 1), logprobs=logprobs)
    assert reply.accepted == (0,)
    assert [(r.slot, r.code, r.blame) for r in reply.refused] == [(1, "logprob_not_finite", "worker")]
    rollout = (await coordinator.rows(Rollout, group_id=lease.group_id, slot=1))[0]
    assert (rollout.state, rollout.attempts, rollout.lease_id) == (RolloutState.OPEN, 1, None)
    assert (await coordinator.get(Worker, worker.id)).strikes == 1
    await worker.submit(lease, (2,))
    assert (await coordinator.get(Worker, worker.id)).strikes == 0, "accepted work clears strikes"


async def test_faults_in_a_row_lead_to_quarantine_in_words_and_the_timer_ends_it(coordinator: Any, stranger: Any) -> None:
    bad, good = await stranger("bad").ready(), await stranger("good").ready()
    lease = await bad.lease()
    for slot in range(3):
        await bad.submit(lease, (slot,), logprobs=np.full(4, 0.5, np.float32))
    row = await coordinator.get(Worker, bad.id)
    assert row.state is WorkerState.QUARANTINED
    assert "logprob" in row.reason or "log-prob" in row.reason
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.ABANDONED
    assert "quarantined" in (await bad.ask()).reason
    beat = await bad.beat(0, live_leases=(lease.lease_id,))
    assert beat.state == "quarantined"
    assert [c.lease_id for c in beat.cancel] == [lease.lease_id]
    assert not (await bad.confirm(0)).accepted
    assert (await good.lease()).group_id == lease.group_id
    sessions = await coordinator.rows(WorkerSession, worker_id=bad.id)
    assert [s.ended_at is not None for s in sessions] == [True], "a quarantine is not paid for"
    await bad.join()
    assert (await coordinator.get(Worker, bad.id)).state is WorkerState.QUARANTINED, "joining again does not end a quarantine"
    assert all(s.ended_at == s.started_at for s in await coordinator.rows(WorkerSession, worker_id=bad.id, epoch=2))
    coordinator.clock.added += coordinator.settings.quarantine_s + 1
    await coordinator.sweep()
    assert (await coordinator.get(Worker, bad.id)).state is WorkerState.GONE
    await bad.join()
    assert (await coordinator.get(Worker, bad.id)).state is WorkerState.STANDBY
    assert (await coordinator.rows(WorkerSession, worker_id=bad.id, epoch=3))[0].ended_at is None


async def test_a_confirmed_version_is_needed_and_a_wrong_canary_is_a_strike(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    assert "not confirmed version 0" in (await worker.ask()).reason
    wrong = await worker.confirm(0, canary_logprobs=(-1.0,) * 23)
    assert not wrong.accepted
    assert wrong.reason.startswith("wrong_canary")
    assert (await coordinator.get(Worker, worker.id)).strikes == 1
    assert [r.code for r in await coordinator.rows(Refusal)] == ["wrong_canary"]
    assert (await worker.confirm(0)).accepted
    assert len(await coordinator.rows(Holding)) == 1
    unknown = await worker.confirm(5)
    assert (unknown.accepted, unknown.reason.split(":")[0]) == (False, "not_published")


async def test_a_torch_worker_is_held_against_the_published_bits(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join(engine={"kind": "torch", "version": "2", "dtype": "float32"})
    assert not (await worker.confirm(0, canary_logprobs=(-1.001,) * 23)).accepted
    assert (await worker.confirm(0, canary_logprobs=(-1.00005,) * 23)).accepted


async def test_tokens_of_a_version_that_was_not_confirmed_or_was_rolled_back_are_refused(
    coordinator: Any, stranger: Any, rows: Any
) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await coordinator.put(rows.publication(1))
    reply = await worker.submit(lease, (0,), version=1)
    assert [r.code for r in reply.refused] == ["version_not_confirmed"]
    assert (await worker.confirm(1)).accepted
    assert (await worker.submit(lease, (1,), version=1)).accepted == (1,)
    await coordinator.put(rows.publication(1, state=PublicationState.ROLLED_BACK))
    reply = await worker.submit(lease, (2,), version=1)
    assert [(r.code, r.blame, r.paid) for r in reply.refused] == [("policy_rolled_back", "coordinator", True)]


async def test_a_slot_outside_the_lease_or_named_twice_is_refused(stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    reply = await worker.submit(lease, (0, 0, 9))
    assert reply.accepted == (0,)
    assert sorted((r.slot, r.code) for r in reply.refused) == [(0, "slot_repeated"), (9, "slot_not_leased")]


async def test_another_workers_lease_cannot_be_used(coordinator: Any, stranger: Any) -> None:
    mine, thief = await stranger("mine").ready(), await stranger("thief").ready()
    lease = await mine.lease()
    reply = await thief.submit(lease, (0,))
    assert [r.code for r in reply.refused] == ["not_your_lease"]
    assert (await mine.submit(lease, (0,))).accepted == (0,)


async def test_a_long_poll_is_answered_when_a_slot_opens_and_a_newer_poll_replaces_it(coordinator: Any, stranger: Any) -> None:
    busy, waiting = await stranger("busy").ready(), await stranger("waiting").ready()
    await coordinator.put(replace(await coordinator.get(Job, JOB), state=JobState.PAUSED, reason="for a test"))
    assert "paused: for a test" in (await busy.ask()).reason
    first = asyncio.create_task(waiting.ask(wait_s=20))
    await asyncio.sleep(0.2)
    second = asyncio.create_task(waiting.ask(wait_s=20))
    assert "newer request" in (await first).reason
    await coordinator.put(replace(await coordinator.get(Job, JOB), state=JobState.RUNNING, reason=""))
    async with asyncio.timeout(3):
        assert (await second).leases


async def test_the_grant_rule_bounds_what_is_issued_and_says_why(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    await worker.join(max_slots=4096)
    await worker.confirm(0)
    reply = await worker.ask(free=4096)
    assert len(reply.leases) == 3 * 4  # (S + 1) * B groups
    more = await worker.ask(free=8)
    assert more.leases == ()
    assert "unsettled groups fill" in more.reason


async def test_a_slow_worker_gets_a_part_of_a_group_and_another_the_rest(coordinator: Any, stranger: Any) -> None:
    slow, quick = stranger("slow"), await stranger("quick").ready()
    await slow.join(tokens_per_s=0.2)
    await slow.confirm(0)
    lease = await slow.lease()  # 3 * 8 tokens at 0.2 a second are 120 s: three slots within the longest lease of 400 s
    assert lease.slots == (0, 1, 2)
    assert (await quick.lease()).slots == (3,)


async def test_leases_that_the_worker_does_not_know_are_abandoned_after_a_grace(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await worker.beat(0)
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.LIVE
    coordinator.clock.added += 26
    await worker.beat(0)
    ended = await coordinator.get(Lease, lease.lease_id)
    assert (ended.state, ended.reason) == (LeaseState.ABANDONED, "the worker does not know of it")


async def test_a_silent_worker_is_lost_and_a_beat_of_it_is_told_to_join_again(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    coordinator.clock.added += 36
    due = await coordinator.sweep()
    row = await coordinator.get(Worker, worker.id)
    assert row.state is WorkerState.GONE
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.ABANDONED
    assert due is None
    reply = await worker.send("heartbeat", Heartbeat(session_epoch=worker.epoch))
    assert reply.problem.code == "worker_gone"
    await worker.ready()
    assert (await coordinator.get(Worker, worker.id)).state is WorkerState.ACTIVE


async def test_a_worker_that_is_heard_while_the_sweep_waits_to_write_is_not_lost(
    coordinator: Any, stranger: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a beat may come between the look for silent workers and its transaction."""
    worker = await stranger().ready()
    coordinator.clock.added += 36
    deps = coordinator.deps
    write = deps.store.write

    async def late(action: Any) -> Any:
        deps.presence.remember(replace(deps.presence.get(worker.id), at=deps.clock.now()))
        return await write(action)

    monkeypatch.setattr(deps.store, "write", late)
    await coordinator.sweep()
    monkeypatch.undo()
    assert (await coordinator.get(Worker, worker.id)).state is WorkerState.ACTIVE
    await worker.beat(0)


async def test_a_restart_gives_everyone_a_grace_and_loses_nothing(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await worker.submit(lease, (0,))
    coordinator.clock.added += lease.deadline - coordinator.clock.now() + 5  # it was down past the deadline
    await coordinator.restart()
    moved = await coordinator.get(Lease, lease.lease_id)
    assert moved.deadline >= coordinator.clock.now() + 59
    await coordinator.sweep()
    assert (await coordinator.get(Worker, worker.id)).state is WorkerState.ACTIVE
    reply = await worker.submit(lease)
    assert (reply.accepted, reply.duplicates) == ((1, 2, 3), (0,))
    coordinator.clock.added += 120
    await worker.beat(0)


async def test_a_worker_that_never_comes_back_after_a_restart_is_lost_after_the_grace(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    await coordinator.restart()
    coordinator.clock.added += 36
    await coordinator.sweep()
    assert (await coordinator.get(Worker, worker.id)).state is WorkerState.ACTIVE
    coordinator.clock.added += 30
    await coordinator.sweep()
    assert (await coordinator.get(Worker, worker.id)).state is WorkerState.GONE


async def test_slots_of_a_lease_that_others_closed_are_reopened(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    row = await coordinator.get(Lease, lease.lease_id)
    await coordinator.put(replace(row, state=LeaseState.DEAD, reason="policy_rolled_back: x", closed_at=coordinator.clock.now()))
    await coordinator.sweep()
    assert {r.state for r in await coordinator.rows(Rollout, group_id=lease.group_id)} == {RolloutState.OPEN}


async def test_leaving_opens_the_slots_and_stops_the_clock(coordinator: Any, stranger: Any) -> None:
    begun = coordinator.clock.now()
    worker, other = await stranger("w").ready(), await stranger("o").ready()
    lease = await worker.lease()
    await worker.submit(lease, (0,))
    coordinator.clock.added += 20
    await worker.beat(0, live_leases=(lease.lease_id,))
    await accounting.look(coordinator.deps)
    account = (await worker.send("leave", Leave(session_epoch=worker.epoch, reason="bedtime"))).read(Account)
    assert (account.accepted_rollouts, account.accepted_tokens) == (1, 4)
    assert 19.9 < account.active_s <= coordinator.clock.now() - begun
    assert 350_000 * 20 // 3600 <= account.earned_uusd <= 350_000 * account.active_s / 3600, "the lease's 20 s at 0.35 USD an hour"
    assert (await coordinator.get(Worker, worker.id)).reason == "left: bedtime"
    assert (await other.lease()).slots == (1, 2, 3)


async def test_draining_by_the_owner_gets_no_more_work(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    beat = await worker.beat(0, draining=True)
    assert beat.state == "draining"
    assert beat.drain
    assert "draining" in (await worker.ask()).reason


async def test_a_group_closes_short_when_its_last_slots_are_lost(coordinator: Any, stranger: Any) -> None:
    """With min_group 2: two slots scored, the other two under way; their lease ends, and nothing is graded afterwards."""
    job = await coordinator.get(Job, JOB)
    algorithm = job.config.algorithm.model_copy(update={"min_group": 2})
    await coordinator.put(replace(job, config=job.config.model_copy(update={"algorithm": algorithm})))
    worker = await stranger().ready()
    lease = await worker.lease()
    await worker.submit(lease, (0, 1))
    done = [r for r in await coordinator.rows(Rollout, group_id=lease.group_id) if r.slot < 2]
    await coordinator.put(*(replace(r, state=RolloutState.SCORED, reward=float(r.slot)) for r in done))
    await coordinator.sweep()
    assert (await coordinator.get(Group, lease.group_id)).state is GroupState.ISSUED, "the others are under way"
    coordinator.clock.added += 4000
    await coordinator.sweep()
    group = await coordinator.get(Group, lease.group_id)
    assert (group.state, group.reason.split(":")[0]) == (GroupState.READY, "closed short")
    slots = await coordinator.rows(Rollout, group_id=lease.group_id)
    assert [r.state for r in slots[2:]] == [RolloutState.VOID, RolloutState.VOID]


async def test_leases_that_a_lowered_bound_leaves_useless_end(coordinator: Any, stranger: Any) -> None:
    """S falls to 0 while version 0 is leased and step 1 is the next: nothing of it could be trained."""
    worker = await stranger().ready()
    lease = await worker.lease()
    job = await coordinator.get(Job, JOB)
    await coordinator.put(replace(job, committed_steps=1))
    await coordinator.sweep()
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.LIVE
    staleness = job.config.staleness.model_copy(update={"max": 0})
    await coordinator.put(replace(job, committed_steps=1, config=job.config.model_copy(update={"staleness": staleness})))
    await coordinator.sweep()
    row = await coordinator.get(Lease, lease.lease_id)
    assert (row.state, row.reason.split(":")[0]) == (LeaseState.DEAD, "lease_dead_by_version")


async def test_a_version_is_kept_for_the_worker_that_fetches_it(coordinator: Any, stranger: Any, rows: Any) -> None:
    worker = stranger()
    await worker.join()
    await worker.fetch(f"jobs/{JOB}/manifests/0?digest={rows.digest(0)}")
    assert coordinator.deps.presence.being_fetched(JOB, since=0.0) == {0}
    assert (await worker.confirm(0)).accepted
    assert coordinator.deps.presence.being_fetched(JOB, since=0.0) == frozenset()
