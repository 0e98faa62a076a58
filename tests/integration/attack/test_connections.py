"""Connections that say nothing, say it slowly, or are too many: they are bounded, and others are served meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from coordinator.api.listening import ConnectionLimits, OpenConnections, connection_limits, listen
from coordinator.api.rest import RUNNER_OPTIONS
from p2p.adapters.tls import self_signed, server_context


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


class Place:
    """A served application and its listener's counts."""

    def __init__(self, port: int, counted: OpenConnections) -> None:
        self.port = port
        self.counted = counted

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def is_served(self) -> bool:
        try:
            url, timeout = f"http://127.0.0.1:{self.port}/", aiohttp.ClientTimeout(5)
            async with aiohttp.request("GET", url, timeout=timeout, headers={"Connection": "close"}) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, ConnectionError):
            return False


@pytest.fixture
def bounds() -> ConnectionLimits:
    return ConnectionLimits(20, None)


@pytest.fixture
def tls() -> Any:
    return None


@pytest.fixture
def runner_options() -> dict[str, Any]:
    return dict(RUNNER_OPTIONS)


@pytest.fixture
async def place(bounds: ConnectionLimits, tls: Any, runner_options: dict[str, Any]) -> AsyncIterator[Place]:
    app = web.Application()
    app.router.add_get("/", hello)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5, **runner_options)
    await runner.setup()
    (listener,) = listen("127.0.0.1", 0, bounds)
    await web.SockSite(runner, listener, ssl_context=tls).start()
    yield Place(listener.getsockname()[1], listener.open_connections)
    await runner.cleanup()


async def until(condition: Any, within_s: float = 5.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "it did not come true"
        await asyncio.sleep(0.01)


async def test_idle_connections_are_bounded_and_their_places_come_back(place: Place) -> None:
    idle = [await place.open() for _ in range(60)]
    await until(lambda: place.counted.refused == 40)
    assert place.counted.total == 20
    assert not await place.is_served(), "every place is taken"
    for _, writer in idle:
        writer.close()
    await until(lambda: place.counted.total == 0)
    assert await place.is_served()


@pytest.mark.parametrize("bounds", [ConnectionLimits(40, 10)])
async def test_one_address_cannot_take_every_place(place: Place) -> None:
    held = [await place.open() for _ in range(30)]
    await until(lambda: place.counted.refused == 20)
    assert place.counted.by_address == {"127.0.0.1": 10}
    assert place.counted.admit("192.0.2.7"), "another address is admitted"
    place.counted.closed("192.0.2.7")
    for _, writer in held:
        writer.close()
    await until(lambda: not place.counted.by_address)


async def _trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, header: bytes) -> None:
    """One more header a moment, until the other end hangs up (which raises)."""
    while True:
        writer.write(header)
        await writer.drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.readexactly(1)


@pytest.mark.parametrize("runner_options", [{**RUNNER_OPTIONS, "keepalive_timeout": 0.4}])
@pytest.mark.parametrize("begun", [b"", b"GET / HTTP/1.1\r\n", b"GET / HT"])
async def test_headers_that_never_end_are_hung_up_on(place: Place, begun: bytes) -> None:
    """Slowloris: one header a moment, for ever. The time counts from the connection, not from the last byte."""
    reader, writer = await place.open()
    writer.write(begun)
    began = time.monotonic()
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):  # both are hanging up
        async with asyncio.timeout(5):
            await _trickle(reader, writer, b"X-A: b\r\n" if begun.endswith(b"\n") else b"")
    assert time.monotonic() - began < 3
    await until(lambda: place.counted.total == 0)
    writer.close()


@pytest.mark.parametrize("runner_options", [{**RUNNER_OPTIONS, "keepalive_timeout": 0.4}])
async def test_a_second_request_that_never_ends_is_hung_up_on_too(place: Place) -> None:
    reader, writer = await place.open()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    assert b"200" in await reader.readuntil(b"\r\n")
    writer.write(b"GET / HTTP/1.1\r\nHost:")
    async with asyncio.timeout(5):
        await reader.read()  # the rest of the first answer, then the end
    writer.close()
    await until(lambda: place.counted.total == 0)


async def test_headers_without_end_are_too_large(place: Place) -> None:
    for sent in (b"X" * 70_000, b"".join(b"X-%d: y\r\n" % n for n in range(2000))):
        reader, writer = await place.open()
        writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nX-A: " + sent + b"\r\n\r\n")
        async with asyncio.timeout(5):
            assert b" 400 " in await reader.readuntil(b"\r\n")
        writer.close()
    assert await place.is_served()


async def test_a_stranger_who_never_shakes_hands_counts_as_well(tmp_path: Any) -> None:
    """Places are counted before TLS: half-open handshakes take no more than their share."""
    certificate, key, _ = self_signed(tmp_path, ["127.0.0.1"])
    app = web.Application()
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    (listener,) = listen("127.0.0.1", 0, ConnectionLimits(5, None))
    await web.SockSite(runner, listener, ssl_context=server_context(certificate, key)).start()
    counted = listener.open_connections
    mute = [socket.create_connection(listener.getsockname()) for _ in range(9)]
    await until(lambda: counted.refused == 4)
    assert counted.total == 5
    for one in mute:
        one.close()
    await until(lambda: counted.total == 0)
    await runner.cleanup()


def test_limits_leave_descriptors_for_everything_else() -> None:
    found = connection_limits(behind_proxy=False)
    assert 64 <= found.total <= 8192
    assert found.per_address is not None
    assert found.per_address < found.total or found.total == 64
    assert connection_limits(behind_proxy=True).per_address is None


def test_a_taken_port_is_an_error_and_both_addresses_of_a_name_share_a_port() -> None:
    listeners = listen("localhost", 0, ConnectionLimits(5, None))
    try:
        assert len({listener.getsockname()[1] for listener in listeners}) == 1
        assert len({id(listener.open_connections) for listener in listeners}) == 1
        with pytest.raises(OSError, match="in use"):
            listen("127.0.0.1", listeners[0].getsockname()[1], ConnectionLimits(5, None))
    finally:
        for listener in listeners:
            listener.close()
