"""What a hostile or broken worker may send: every answer is a refusal in words, none is a 500, none hangs."""

from __future__ import annotations

import asyncio
import json
import ssl
import struct
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.domain.model import Rollout, RolloutState
from coordinator.service.worker_limits import ProtocolLimits
from coordinator.wire.frames import encode_frame
from coordinator.wire.messages import Problem

FRAME = "application/vnd.echo2.frame"
ROUTES = ("join", "heartbeat", "lease", "confirm", "account", "leave", "submit")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.just("\x00"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4),
    max_leaves=8,
)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def refused_well(reply: Any) -> None:
    """A refusal names code and fix; a body's refusal also the field."""
    assert 400 <= reply.status < 500, (reply.status, reply.body)
    problem = Problem.model_validate_json(reply.body)
    assert problem.code
    assert problem.fix
    if problem.status == 422:
        assert problem.field


def mutated(draw: Any, valid: dict[str, Any]) -> Any:
    """A valid message with one thing wrong somewhere, or anything at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    changed = dict(valid)
    name = draw(st.sampled_from([*valid, "stranger"]))
    if draw(st.booleans()):
        changed.pop(name, None)
    else:
        changed[name] = draw(JSON)
    return changed


async def test_every_message_with_anything_wrong_gets_words(coordinator: Any, stranger: Any, fuzz: Any) -> None:
    """Hypothesis draws the messages in a thread; this loop sends them."""
    worker = await stranger().ready()
    lease = await worker.lease()
    head = json.loads(zstd_head(worker.frame(lease)))
    valid: dict[str, dict[str, Any]] = {
        "join": worker.join_request().model_dump(mode="json"),
        "heartbeat": {
            "session_epoch": 1,
            "held": [{"job_id": "job-1", "version": 0, "digest": "a" * 64}],
            "live_leases": ["x"],
            "free_slots": 1,
            "tokens_per_s": 1.0,
            "draining": False,
            "activity": "",
        },
        "lease": {"session_epoch": 1, "job_id": "job-1", "version": 0, "digest": "a" * 64, "free_slots": 1, "wait_s": 0},
        "confirm": {"session_epoch": 1, "job_id": "job-1", "version": 0, "digest": "a" * 64, "canary_logprobs": [-1.0]},
        "account": {},
        "leave": {"session_epoch": 9, "reason": "x"},
        "submit": head,
    }

    async def send(route: str, message: Any) -> None:
        body = json.dumps(message).encode("utf-8", "surrogatepass")
        epoch = 0 if route == "join" else worker.epoch
        if route == "submit":
            arrays = {
                "token_ids": np.array([1], np.int32),
                "logprobs": np.array([0], np.float32),
                "versions": np.array([0], np.int32),
            }
            body = encode_frame(body, arrays)
        async with asyncio.timeout(10):
            reply = await worker.call(route, body, content_type=FRAME if route == "submit" else "application/json", epoch=epoch)
        if reply.status == 200:
            if route == "join":
                worker.epoch = json.loads(reply.body)["session_epoch"]
            return
        refused_well(reply)

    @FUZZ
    @given(st.data())
    def examples(data: Any) -> None:
        route = data.draw(st.sampled_from(ROUTES))
        message = mutated(data.draw, valid[route])
        if route != "join" and isinstance(message, dict) and message.get("session_epoch") == 1:
            message["session_epoch"] = worker.epoch
        fuzz(send(route, message))

    await asyncio.to_thread(examples)


def zstd_head(frame: bytes) -> bytes:
    plain = zstandard.ZstdDecompressor().decompress(frame)
    (length,) = struct.unpack_from("<I", plain)
    return plain[4 : 4 + length]


async def test_frames_of_any_bytes_get_words(stranger: Any, fuzz: Any) -> None:
    worker = await stranger().ready()
    good = worker.frame(await worker.lease())

    @FUZZ
    @given(st.data())
    def examples(data: Any) -> None:
        if data.draw(st.booleans()):
            body = data.draw(st.binary(max_size=200))
        else:
            body = bytearray(zstandard.ZstdDecompressor().decompress(good))
            for _ in range(data.draw(st.integers(1, 4))):
                body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
            body = zstandard.ZstdCompressor(write_content_size=True).compress(bytes(body))

        async def send() -> None:
            reply = await worker.call("submit", bytes(body), content_type=FRAME)
            if reply.status != 200:
                refused_well(reply)

        fuzz(send())

    await asyncio.to_thread(examples)


@pytest.fixture
async def fuzz() -> Any:
    """Runs a coroutine on this loop from another thread."""
    loop = asyncio.get_running_loop()
    return lambda coroutine: asyncio.run_coroutine_threadsafe(coroutine, loop).result(20)


async def test_bodies_above_the_limit_are_refused_before_they_are_read(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    for route, size in (("join", (16 << 10) + 1), ("lease", (4 << 10) + 1), ("heartbeat", (1 << 20) + 1)):
        reply = await worker.call(route, b"x" * size, epoch=0 if route == "join" else worker.epoch)
        assert (reply.status, reply.problem.code) == (413, "body_too_large"), route


async def test_a_chunked_body_above_the_limit_is_cut_off(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    headers, _ = worker.sign("POST", "/worker/v1/lease", b"")

    async def chunks() -> Any:
        for _ in range(100):
            yield b"x" * 1000

    url = coordinator.base + "/worker/v1/lease"
    async with coordinator.session.post(url, data=chunks(), headers=headers | {"Content-Type": "application/json"}) as response:
        assert response.status == 413


async def test_a_slow_body_is_given_up_in_words(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    headers, _ = worker.sign("POST", "/worker/v1/heartbeat", b"")
    context = ssl._create_unverified_context()
    host, port = coordinator.base.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    lines = ["POST /worker/v1/heartbeat HTTP/1.1", f"Host: {host}", "Content-Type: application/json", "Content-Length: 100"]
    writer.write(("\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items())]) + "\r\n\r\n{").encode())
    async with asyncio.timeout(5):
        answer = await reader.read(4096)
    writer.close()
    assert b" 408 " in answer.split(b"\r\n")[0]
    assert b"body_too_slow" in answer


async def test_an_encoded_body_is_refused(stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    reply = await worker.call("heartbeat", b"x" * 10, headers={"Content-Encoding": "deflate"})
    assert (reply.status, reply.problem.code) == (415, "content_encoding")


async def test_another_content_type_is_refused(stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    assert (await worker.call("submit", b"x")).problem.code == "content_type"
    assert (await worker.call("heartbeat", b"{}", content_type="text/plain")).problem.code == "content_type"


def bomb(declared: int | None, size: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=3, write_content_size=declared is not None)
    return compressor.compress(b"\0" * size)


async def test_zstd_bombs_are_refused_by_what_they_declare_and_by_what_they_hold(stranger: Any) -> None:
    worker = await stranger().ready()
    lying = bytearray(bomb(1, 70 << 20))
    for body in (bomb(1, 70 << 20), bomb(None, 1 << 20), bytes(lying[:-10]), bomb(1, 10) + bomb(1, 10), b"", b"\x28\xb5\x2f\xfd"):
        reply = await worker.call("submit", body, content_type=FRAME)
        assert (reply.status, reply.problem.code) == (422, "invalid_frame"), len(body)
    reply = await worker.call("submit", bomb(1, 60 << 20), content_type=FRAME)  # within the limit, but no frame
    assert (reply.status, reply.problem.code) == (422, "invalid_frame")


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"token_ids": np.zeros(4, np.int64)},
        {"token_ids": np.zeros((2, 2), np.int32)},
        {"token_ids": np.zeros(3, np.int32)},
        {"logprobs": np.zeros(4, np.float64)},
        {"versions": np.zeros((), np.int32)},
        {"more": np.zeros(4, np.int32)},
    ],
    ids=str,
)
async def test_arrays_of_another_name_type_shape_or_length_are_refused(
    coordinator: Any, stranger: Any, arrays: dict[str, Any]
) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    frame = worker.frame(lease, (0,))
    whole = {"token_ids": np.array([5, 6, 7, 1], np.int32), "logprobs": np.zeros(4, np.float32), "versions": np.zeros(4, np.int32)}
    body = encode_frame(zstd_head(frame), whole | arrays if arrays else {})
    reply = await worker.call("submit", body, content_type=FRAME)
    assert (reply.status, reply.problem.code) == (422, "invalid_frame")
    assert reply.problem.field
    assert await coordinator.rows(Rollout, state=RolloutState.ACCEPTED) == []


@pytest.mark.parametrize("limits", [ProtocolLimits(per_key_rate_s=1.0, per_key_burst=5.0)])
async def test_a_key_that_asks_too_often_is_told_when_to_come_back(coordinator: Any, stranger: Any, limits: Any) -> None:
    worker = stranger()
    await worker.join()
    replies = [await worker.call("account", b"{}") for _ in range(8)]
    assert [r.status for r in replies].count(429) >= 3
    late = replies[-1]
    assert late.problem.code == "too_many_requests"
    assert int(late.headers["Retry-After"]) >= 1
    other = stranger("other")
    await other.join()
    assert (await other.call("account", b"{}")).status == 200, "another key is not held back"


@pytest.mark.parametrize("limits", [ProtocolLimits(failures_rate_s=1.0, failures_burst=5.0)])
async def test_an_address_that_cannot_authenticate_is_held_back(stranger: Any, limits: Any) -> None:
    worker = stranger()
    worker.epoch = 1
    codes = [(await worker.call("heartbeat", b"{}")).problem.code for _ in range(8)]
    assert codes[:5] == ["unknown_worker"] * 5
    assert codes[-1] == "too_many_requests"


@pytest.mark.parametrize("limits", [ProtocolLimits(bodies_in_flight_bytes=10)])
async def test_bodies_beyond_the_budget_come_later(stranger: Any, limits: Any) -> None:
    worker = stranger()
    reply = await worker.send("join", worker.join_request(), epoch=0)
    assert (reply.status, reply.problem.code) == (503, "busy")
    assert "Retry-After" in reply.headers


async def test_unknown_routes_and_names_that_look_like_paths_lead_nowhere(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    for route, status in (
        ("pieces/..%2F..%2Fetc%2Fpasswd?job=job-1", 422),
        ("pieces/" + "a" * 64 + "?job=job-1", 404),
        ("pieces/" + "a" * 64 + "?job=..", 404),
        ("jobs/job-1/manifests/-1?digest=" + "a" * 64, 422),
        ("jobs/job-1/manifests/0", 422),
        ("jobs/%2E%2E/manifests/0?digest=" + "a" * 64, 404),
        ("nothing", 404),
    ):
        reply = await worker.fetch(route)
        assert reply.status == status, (route, reply.body)
