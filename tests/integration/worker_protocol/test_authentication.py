"""Signatures: replayed, altered, dated wrongly, addressed to another coordinator, or absent."""

from __future__ import annotations

import json
from typing import Any

from coordinator.domain.model import Worker
from coordinator.wire.messages import Heartbeat, HeartbeatReply, Problem
from coordinator.wire.signing import certificate_message, public_hex, verify


def beat(worker: Any) -> bytes:
    return Heartbeat(session_epoch=worker.epoch).model_dump_json().encode()


async def test_the_identity_vouches_for_the_certificate(coordinator: Any) -> None:
    async with coordinator.session.get(coordinator.base + "/worker/v1/identity") as response:
        identity = await response.json()
    key = public_hex(coordinator.key)
    assert identity["public_key"] == key
    assert identity["certificate_sha256"] == coordinator.certificate
    assert verify(key, identity["statement"], certificate_message(coordinator.certificate))
    assert (identity["protocol_min"], identity["protocol_max"]) == (1, 1)
    assert abs(identity["server_time"] - coordinator.clock.now()) < 5


async def test_a_request_is_good_once(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    body, path = beat(worker), "/worker/v1/heartbeat"
    headers, _ = worker.sign("POST", path, body)
    headers["Content-Type"] = "application/json"
    statuses = []
    for _ in range(2):
        async with coordinator.session.post(coordinator.base + path, data=body, headers=headers) as response:
            statuses.append((response.status, json.loads(await response.read()).get("code")))
    assert statuses == [(200, None), (401, "replayed")]
    coordinator.clock.added += 59
    async with coordinator.session.post(coordinator.base + path, data=body, headers=headers) as response:
        assert (await response.json(content_type=None))["code"] == "replayed", "the nonce outlives the time window"


async def test_an_altered_body_path_method_or_field_breaks_the_signature(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    body = beat(worker)
    for changes in (
        {"path": "/worker/v1/lease"},
        {"path": "/worker/v1/heartbeat?x=1"},
        {"method": "PUT"},
        {"coordinator": "0" * 20},
    ):
        problem = (await worker.call("heartbeat", body, **changes)).problem
        assert (problem.status, problem.code) == (401, "bad_signature"), changes
    headers, _ = worker.sign("POST", "/worker/v1/heartbeat", body)
    for name, value in (("Echo2-Epoch", "2"), ("Echo2-Nonce", "0" * 32), ("Echo2-Time", f"{coordinator.clock.now() + 1:.3f}")):
        problem = (await worker.call("heartbeat", body, headers=headers | {name: value})).problem
        assert (problem.status, problem.code) == (401, "bad_signature"), name
    problem = (await worker.call("heartbeat", body + b" ", headers=headers)).problem
    assert problem.code == "bad_signature"


async def test_a_clock_that_is_off_is_told_the_time(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    now = coordinator.clock.now()
    for off in (-61.0, 61.0, 1e6):
        problem = (await worker.call("heartbeat", beat(worker), time=f"{now + off:.3f}")).problem
        assert (problem.status, problem.code) == (401, "clock_skew")
        assert abs((problem.server_time or 0) - now) < 10
    reply = await worker.call("heartbeat", beat(worker), time=f"{now + 50:.3f}")
    reply.read(HeartbeatReply)


async def test_a_request_from_before_a_restart_is_refused(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    body, path = beat(worker), "/worker/v1/heartbeat"
    headers, _ = worker.sign("POST", path, body)
    headers["Content-Type"] = "application/json"
    async with coordinator.session.post(coordinator.base + path, data=body, headers=headers) as response:
        assert response.status == 200
    coordinator.clock.added += 2
    await coordinator.restart()
    async with coordinator.session.post(coordinator.base + path, data=body, headers=headers) as response:
        problem = Problem.model_validate_json(await response.read())
    assert (problem.status, problem.code) == (401, "before_restart")
    assert problem.server_time is not None
    (await worker.call("heartbeat", body)).read(HeartbeatReply)


async def test_headers_that_are_missing_or_malformed_are_named(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    for headers in (
        {"Echo2-Signature": "zz"},
        {"Echo2-Time": "nan"},
        {"Echo2-Time": "1e9"},
        {"Echo2-Epoch": "+1"},
        {"Echo2-Epoch": "9" * 400},
        {"Echo2-Nonce": "short"},
        {"Echo2-Worker": "w-../../etc"},
        {"Echo2-Worker": ""},
    ):
        problem = (await worker.call("heartbeat", beat(worker), headers=headers)).problem
        assert (problem.status, problem.code) == (401, "unsigned"), headers
    async with coordinator.session.post(coordinator.base + "/worker/v1/join", data=b"{}") as response:
        assert response.status == 401


async def test_keys_that_are_unknown_or_not_ones_own_are_refused(coordinator: Any, stranger: Any) -> None:
    known, other = stranger("a"), stranger("b")
    await known.join()
    other.epoch = 1
    assert (await other.call("heartbeat", beat(other))).problem.code == "unknown_worker"
    assert (await other.call("heartbeat", beat(known), worker=known.id)).problem.code == "bad_signature"
    body = known.join_request().model_dump_json().encode()
    assert (await other.call("join", body, epoch=0)).problem.code == "wrong_worker_id"
    assert (await other.call("join", body, epoch=0, worker=known.id)).problem.code == "bad_signature"
    assert (await coordinator.get(Worker, known.id)).session_epoch == 1


async def test_the_epoch_in_the_body_must_be_the_signed_one(stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    body = Heartbeat(session_epoch=2).model_dump_json().encode()
    problem = (await worker.call("heartbeat", body)).problem
    assert (problem.status, problem.field) == (422, "session_epoch")
