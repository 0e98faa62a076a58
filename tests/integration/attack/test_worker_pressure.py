"""Strangers who try to use up what workers share: the budget of bodies, an address's share of failures, places in memory."""

from __future__ import annotations

import asyncio
import ssl
import struct
import tracemalloc
from typing import Any

import aiohttp
import pytest
import zstandard
from aiohttp import web

from coordinator.api.worker import add_worker_routes
from coordinator.api.worker_calls import Desk
from coordinator.domain.model import Worker
from coordinator.service.worker_limits import ProtocolLimits
from coordinator.wire.messages import Heartbeat, HeartbeatReply

FRAME = "application/vnd.echo2.frame"


class Stalled:
    """A connection that announces a large submission under somebody's id and sends little of it."""

    def __init__(self, coordinator: Any, stranger: Any, *, worker: str, announced: int) -> None:
        headers, _ = stranger.sign("POST", "/worker/v1/submit", b"", worker=worker)
        lines = ["POST /worker/v1/submit HTTP/1.1", "Host: x", f"Content-Type: {FRAME}", f"Content-Length: {announced}"]
        self._head = ("\r\n".join([*lines, *(f"{k}: {v}" for k, v in headers.items())]) + "\r\n\r\n").encode()
        self._address = coordinator.base.removeprefix("https://").split(":")

    async def open(self, body: bytes = b"x") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(
            self._address[0], int(self._address[1]), ssl=ssl._create_unverified_context()
        )
        writer.write(self._head + body)
        await writer.drain()
        return reader, writer


@pytest.mark.parametrize("limits", [ProtocolLimits(bodies_in_flight_bytes=64 << 20, body_timeout_s=5.0)])
async def test_announced_bytes_take_nothing_from_others(coordinator: Any, stranger: Any, limits: Any) -> None:
    """Ten times 32 MiB announced under a known worker's id and never sent: the real one still submits and beats."""
    worker = await stranger().ready()
    lease = await worker.lease()
    thief = stranger("thief")
    thief.epoch = worker.epoch
    stalled = [await Stalled(coordinator, thief, worker=worker.id, announced=32 << 20).open() for _ in range(10)]
    await asyncio.sleep(0.1)
    (await worker.send("heartbeat", Heartbeat(session_epoch=worker.epoch))).read(HeartbeatReply)
    assert (await worker.submit(lease)).accepted == lease.slots
    for _, writer in stalled:
        writer.close()


@pytest.mark.parametrize("limits", [ProtocolLimits(bodies_in_flight_bytes=1 << 20, body_timeout_s=5.0)])
async def test_a_body_of_nobody_is_not_read(coordinator: Any, stranger: Any, limits: Any) -> None:
    thief = stranger("thief")
    thief.epoch = 1
    reader, writer = await Stalled(coordinator, thief, worker=thief.id, announced=32 << 20).open()
    async with asyncio.timeout(3):  # before the body's time is over
        answer = await reader.read(4096)
    assert b"unknown_worker" in answer
    writer.close()


@pytest.mark.parametrize("limits", [ProtocolLimits(bodies_in_flight_bytes=3000)])
async def test_bytes_held_come_back_when_their_request_ends(coordinator: Any, stranger: Any, limits: Any) -> None:
    worker = await stranger().ready()
    for _ in range(5):
        reply = await worker.call("submit", b"x" * 4000, content_type=FRAME)
        assert (reply.status, reply.problem.code) == (503, "busy")
        assert int(reply.headers["Retry-After"]) >= 1
    for _ in range(5):
        assert (await worker.call("submit", b"x" * 2000, content_type=FRAME)).problem.code == "invalid_frame"


class Forwarded:
    """A request as a proxy passes it on."""

    def __init__(self, *lines: str) -> None:
        from multidict import CIMultiDict

        self.headers = CIMultiDict([("X-Forwarded-For", line) for line in lines])
        self.remote = "10.0.0.1"


@pytest.mark.parametrize(
    ("lines", "address"),
    [
        ((), "10.0.0.1"),
        (("198.51.100.7",), "198.51.100.7"),
        (("203.0.113.9, 198.51.100.7",), "198.51.100.7"),  # the first was written by the client itself
        (("203.0.113.9", "198.51.100.7"), "198.51.100.7"),
        (("203.0.113.9,",), "10.0.0.1"),
        (("x" * 4000,), "x" * 64),
    ],
)
def test_behind_a_proxy_the_address_is_what_the_proxy_saw(lines: tuple[str, ...], address: str) -> None:
    seen = Desk.address_of(_Trusting(True), Forwarded(*lines))  # type: ignore[arg-type]
    assert seen == address
    assert Desk.address_of(_Trusting(False), Forwarded(*lines)) == "10.0.0.1"  # type: ignore[arg-type]


class _Trusting:
    def __init__(self, trusts: bool) -> None:
        self._trusts_proxy = trusts


async def test_one_stranger_behind_a_proxy_does_not_shut_everyone_out(coordinator: Any, stranger: Any) -> None:
    """Garbage from one address uses up that address's share of failures, not that of the proxy which all come through."""
    app = web.Application()
    limits = ProtocolLimits(failures_rate_s=0.1, failures_burst=5.0)
    add_worker_routes(app, coordinator.deps, certificate_sha256=None, limits=limits, trusts_proxy=True)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, auto_decompress=False)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    coordinator.base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    codes = []
    async with aiohttp.ClientSession() as session:
        for _ in range(12):
            headers = {"X-Forwarded-For": "198.51.100.7", "Content-Type": "application/json"}
            async with session.post(coordinator.base + "/worker/v1/heartbeat", data=b"{}", headers=headers) as answer:
                codes.append((await answer.json(content_type=None))["code"])
    assert codes[-1] == "too_many_requests"
    worker = stranger()
    body = worker.join_request().model_dump_json().encode()
    joined = await worker.call("join", body, headers={"X-Forwarded-For": "203.0.113.5"}, epoch=0)
    assert joined.status == 200, joined.body
    await runner.cleanup()


async def test_a_thousand_joins_are_a_thousand_sessions_of_one_worker(coordinator: Any, stranger: Any) -> None:
    """A worker that only ever joins: one row, one use of its invite, one open session, nothing kept in memory for each."""
    worker = stranger()
    for _ in range(1000):
        await worker.join()
    assert worker.epoch == 1000
    assert [row.session_epoch for row in await coordinator.rows(Worker)] == [1000]
    assert len(list(coordinator.deps.presence.all())) == 1
    account = await worker.call("account", b"{}")
    assert account.status == 200


@pytest.mark.parametrize("limits", [ProtocolLimits(per_key_rate_s=5.0, per_key_burst=20.0)])
async def test_a_flood_of_one_key_is_put_off_with_a_time_and_costs_no_strike(coordinator: Any, stranger: Any, limits: Any) -> None:
    worker = await stranger().ready()
    begun = asyncio.get_running_loop().time()
    replies = await asyncio.gather(*(worker.call("account", b"{}") for _ in range(200)))
    took_s = asyncio.get_running_loop().time() - begun
    statuses = [reply.status for reply in replies]
    assert set(statuses) == {200, 429}
    assert statuses.count(200) <= 20 + 5 * took_s + 1  # burst and what the bucket refilled meanwhile
    assert all("Retry-After" in reply.headers for reply in replies if reply.status == 429)
    assert (await coordinator.get(Worker, worker.id)).strikes == 0


def _bomb(size: int, declared: int | None) -> bytes:
    """`size` zeros in a frame that declares another content size (single-segment frames with an 8-byte size field)."""
    body = zstandard.ZstdCompressor(level=3, write_content_size=True).compress(b"\0" * size)
    parameters = zstandard.get_frame_parameters(body)
    if declared is None:
        return zstandard.ZstdCompressor(level=3, write_content_size=False).compress(b"\0" * size)
    at = body.index(struct.pack("<I", parameters.content_size))
    return body[:at] + struct.pack("<I", declared) + body[at + 4 :]


@pytest.mark.parametrize(
    ("size", "declared", "words"),
    [
        (70 << 20, 70 << 20, "must declare a content size of at most 67108864 bytes, it declares 73400320"),
        (1 << 20, None, "must declare a content size"),
        (70 << 20, 1 << 20, ""),
    ],
    ids=["declared", "silent", "lying"],
)
async def test_a_bomb_is_refused_before_it_takes_memory(stranger: Any, size: int, declared: int | None, words: str) -> None:
    """A few kilobytes that would be 70 MiB: what is held while it is refused stays below the frame's limit."""
    worker = await stranger().ready()
    bomb = _bomb(size, declared)
    assert len(bomb) < 20_000
    tracemalloc.start()
    reply = await worker.call("submit", bomb, content_type=FRAME)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (reply.status, reply.problem.code, reply.problem.field) == (422, "invalid_frame", "body")
    assert words in reply.problem.detail
    assert peak < 32 << 20
