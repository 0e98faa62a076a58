"""Enrolment: who may join, what a lost reply costs (nothing), and which of two sessions with one key counts."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from coordinator.domain.model import Invite, Lease, LeaseState, Worker, WorkerSession
from coordinator.service.invites import invite_code
from coordinator.service.tokens import secret_hash
from coordinator.wire.messages import Heartbeat, HeartbeatReply


async def invite(coordinator: Any, secret: str, **changes: Any) -> str:
    now = coordinator.clock.now()
    row = Invite(f"i-{secret[0]}", secret_hash(secret), "bert", 1, now, now + 100)
    await coordinator.put(replace(row, **changes))
    return str(coordinator.invite_code(secret))


async def test_a_lost_join_reply_is_asked_for_again_and_uses_the_invite_once(coordinator: Any, stranger: Any) -> None:
    code = await invite(coordinator, "x" * 43, max_uses=1)
    worker = stranger()
    first = await worker.join(invite_code=code)
    again = await worker.join(invite_code=code)
    assert (first.worker_id, again.worker_id) == (worker.id, worker.id)
    assert again.session_epoch == first.session_epoch + 1
    assert len(await coordinator.rows(Worker, invite_id="i-x")) == 1
    sessions = await coordinator.rows(WorkerSession, worker_id=worker.id, order_by="epoch")
    assert [s.ended_at is None for s in sessions] == [False, True]


async def test_a_lost_join_reply_may_be_asked_for_after_the_invite_ended(coordinator: Any, stranger: Any) -> None:
    code = await invite(coordinator, "x" * 43)
    worker = stranger()
    await worker.join(invite_code=code)
    coordinator.clock.added += 200
    assert (await worker.join(invite_code=code)).session_epoch == 2


async def test_a_known_key_comes_back_without_an_invite_and_an_unknown_one_does_not(stranger: Any) -> None:
    worker = stranger()
    problem = (await worker.send("join", worker.join_request(invite_code=None), epoch=0)).problem
    assert (problem.status, problem.code, problem.field) == (403, "invite_needed", "invite_code")
    await worker.join()
    assert (await worker.join(invite_code=None)).session_epoch == 2


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"revoked_at": 1.0}, "invite_revoked"),
        ({"expires_at": 1.0}, "invite_expired"),
        ({"max_uses": 0}, "invite_used"),
        ({"price_ceiling_uusd_per_hour": 349_999}, "price_above_ceiling"),
    ],
)
async def test_an_invite_that_does_not_admit_says_why(coordinator: Any, stranger: Any, changes: dict[str, Any], code: str) -> None:
    text = await invite(coordinator, "y" * 43, **changes)
    worker = stranger()
    problem = (await worker.send("join", worker.join_request(invite_code=text), epoch=0)).problem
    assert (problem.status, problem.code) == (403, code)
    assert problem.fix
    assert await coordinator.get(Worker, worker.id) is None


async def test_a_price_above_the_ceiling_is_told_in_usd(coordinator: Any, stranger: Any) -> None:
    """An owner typed USD an hour, and types what the answer says."""
    text = await invite(coordinator, "y" * 43, price_ceiling_uusd_per_hour=300_000)
    worker = stranger()
    problem = (await worker.send("join", worker.join_request(invite_code=text), epoch=0)).problem
    assert problem.detail == "the price is 0.350000 USD an hour, the invite allows at most 0.300000"
    assert problem.fix == "join with at most --price 0.300000"


async def test_an_invite_of_unknown_code_or_form_is_refused(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    for text in ("nonsense", invite_code("0" * 64, "z" * 43), coordinator.invite_code("z" * 43), ""):
        problem = (await worker.send("join", worker.join_request(invite_code=text), epoch=0)).problem
        assert (problem.status, problem.code) == (403, "invite_unknown")


async def test_uses_are_counted_over_concurrent_joins(coordinator: Any, stranger: Any) -> None:
    code = await invite(coordinator, "x" * 43, max_uses=3)
    workers = [stranger(f"w{n}") for n in range(8)]
    replies = await asyncio.gather(*(w.send("join", w.join_request(invite_code=code), epoch=0) for w in workers))
    assert sorted(reply.status for reply in replies) == [200] * 3 + [403] * 5


async def test_the_needed_protocol_version_is_named(stranger: Any) -> None:
    worker = stranger()
    problem = (await worker.send("join", worker.join_request(protocol_min=2, protocol_max=3), epoch=0)).problem
    assert (problem.status, problem.code) == (426, "protocol_version")
    assert "protocol 1" in problem.detail
    assert "protocol 1" in (problem.fix or "")


async def test_a_scripted_engine_is_refused_unless_allowed(coordinator: Any, stranger: Any) -> None:
    object.__setattr__(coordinator.deps, "settings", replace(coordinator.settings, allow_scripted=False))
    worker = stranger()
    problem = (await worker.send("join", worker.join_request(), epoch=0)).problem
    assert (problem.status, problem.code, problem.field) == (403, "engine_refused", "engine.kind")


async def test_another_owners_name_cannot_be_taken(coordinator: Any, stranger: Any) -> None:
    await stranger("lab").join()
    code = await invite(coordinator, "x" * 43, max_uses=5)
    problem = (await (other := stranger("lab")).send("join", other.join_request(invite_code=code), epoch=0)).problem
    assert (problem.status, problem.code) == (409, "name_taken")
    await stranger("lab").join()


async def test_the_newer_of_two_sessions_with_one_key_wins(coordinator: Any, stranger: Any) -> None:
    first = await stranger("w").ready()
    lease = await first.lease()
    second = stranger("w", first.key)
    await second.join()
    reply = await first.send("heartbeat", Heartbeat(session_epoch=first.epoch))
    assert (reply.status, reply.problem.code) == (409, "old_session")
    assert "a newer session with this key is active" in reply.problem.detail
    assert (await coordinator.get(Lease, lease.lease_id)).state is LeaseState.ABANDONED
    assert (await first.submit_raw(first.frame(lease))).problem.code == "old_session"
    refused = (await second.submit(lease, (0,))).refused
    assert [r.code for r in refused] == ["old_session"]
    (await second.send("heartbeat", Heartbeat(session_epoch=second.epoch))).read(HeartbeatReply)


async def test_a_session_that_was_never_opened_is_refused(stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    worker.epoch = 9
    assert (await worker.send("heartbeat", Heartbeat(session_epoch=9))).problem.code == "unknown_session"


async def test_a_peer_address_that_nobody_may_dial_is_dropped_and_said(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    peer = {"host": "192.168.1.5", "port": 4000, "certificate_sha256": "a" * 64}
    welcome = await worker.join(peer=peer)
    assert "192.168.1.5 is not a public address" in welcome.notice
    assert (await coordinator.get(Worker, worker.id)).peer is None
    welcome = await worker.join(peer=peer | {"host": "127.0.0.1"})
    assert welcome.notice == ""
    assert (await coordinator.get(Worker, worker.id)).peer["host"] == "127.0.0.1"
