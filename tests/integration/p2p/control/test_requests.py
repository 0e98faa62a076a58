"""Requests over real libp2p on loopback: answers, refusals, deadlines, floods, and who may connect at all."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.control_peers import ControlAddress
from p2p.errors import ControlDown, ControlRefused, ControlTimeout, ControlUnreachable

ECHO = "/echo2/echo/1"


async def echo(key: str, payload: bytes) -> bytes:
    return bytes.fromhex(key) + payload


async def test_requests_both_ways_on_one_connection(nets: Any) -> None:
    one, two = await nets.make(), await nets.make(listen=None)
    one.net.handle(ECHO, echo)
    two.net.handle(ECHO, echo)
    two.net.know(one.address)
    for size in (0, 1, 5000, MAX_MESSAGE - 32):
        assert await two.net.request(one.key, ECHO, bytes(size), timeout_s=5.0) == bytes.fromhex(two.key) + bytes(size)
    assert two.net.addresses == []
    answer = await one.net.request(two.key, ECHO, b"back", timeout_s=5.0)
    assert answer == bytes.fromhex(one.key) + b"back", "it does not listen and is asked on the connection that it made"


async def test_many_requests_at_once_are_all_answered(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()
    one.net.handle(ECHO, echo)
    two.net.know(one.address)
    answers = await asyncio.gather(*(two.net.request(one.key, ECHO, str(i).encode(), timeout_s=20.0) for i in range(100)))
    assert answers == [bytes.fromhex(two.key) + str(i).encode() for i in range(100)]


async def test_too_large_is_refused_before_sending(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()
    two.net.know(one.address)
    with pytest.raises(ControlRefused, match="60001 bytes, above the limit of 60000"):
        await two.net.request(one.key, ECHO, bytes(MAX_MESSAGE + 1), timeout_s=5.0)
    with pytest.raises(ControlRefused, match="60001 bytes, above the limit of 60000"):
        await two.net.publish("t", bytes(MAX_MESSAGE + 1))
    assert two.net.is_alive


async def test_a_too_large_answer_becomes_a_refusal(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()

    async def boast(key: str, payload: bytes) -> bytes:
        return bytes(MAX_MESSAGE + 1)

    one.net.handle(ECHO, boast)
    two.net.know(one.address)
    with pytest.raises(ControlRefused, match="the peer refused: the answer holds 60001 bytes"):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)


async def test_a_refusal_is_told_in_words(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()

    async def refuse(key: str, payload: bytes) -> bytes:
        raise ControlRefused("job x is not here: ask for job y")

    one.net.handle(ECHO, refuse)
    two.net.know(one.address)
    with pytest.raises(ControlRefused, match="the peer refused: job x is not here: ask for job y"):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)


async def test_a_fault_in_a_handler_costs_one_answer(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()
    calls = []

    async def fail(key: str, payload: bytes) -> bytes:
        calls.append(payload)
        raise ZeroDivisionError

    one.net.handle(ECHO, fail)
    two.net.know(one.address)
    with pytest.raises(ControlRefused, match="the peer refused: this node failed to answer"):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)
    one.net.handle(ECHO, echo)
    assert await two.net.request(one.key, ECHO, b"", timeout_s=5.0)
    assert one.net.is_alive


async def test_a_silent_peer_hits_the_deadline_and_others_do_not_wait(nets: Any) -> None:
    silent, good, two = await nets.make(), await nets.make(), await nets.make()

    async def say_nothing(key: str, payload: bytes) -> bytes:
        await asyncio.sleep(60.0)
        return b""

    silent.net.handle(ECHO, say_nothing)
    good.net.handle(ECHO, echo)
    two.net.know(silent.address)
    two.net.know(good.address)
    began = time.monotonic()
    waiting = asyncio.gather(*(two.net.request(silent.key, ECHO, b"", timeout_s=1.0) for _ in range(20)), return_exceptions=True)
    assert await two.net.request(good.key, ECHO, b"", timeout_s=5.0)
    results = await waiting
    assert all(isinstance(result, (ControlTimeout, ControlUnreachable)) for result in results)
    assert any(isinstance(result, ControlTimeout) for result in results)
    assert time.monotonic() - began < 4.0


async def test_a_listener_that_never_speaks_hits_the_deadline(nets: Any) -> None:
    two = await nets.make()
    with socket.create_server(("127.0.0.1", 0)) as mute:
        two.net.know(ControlAddress("ab" * 32, "127.0.0.1", mute.getsockname()[1]))
        began = time.monotonic()
        with pytest.raises(ControlTimeout, match="while connecting"):
            await two.net.request("ab" * 32, ECHO, b"", timeout_s=1.0)
        assert time.monotonic() - began < 2.0


async def test_a_peer_that_is_not_there_or_not_who_it_should_be(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()
    with pytest.raises(ControlUnreachable, match="no known address"):
        await two.net.request("ab" * 32, ECHO, b"", timeout_s=5.0)
    two.net.know(ControlAddress("ab" * 32, *one.net.addresses[0]))
    with pytest.raises(ControlUnreachable, match="handshake failed"):
        await two.net.request("ab" * 32, ECHO, b"", timeout_s=5.0)
    two.net.know(one.address)
    with pytest.raises(ControlUnreachable, match="protocol not supported"):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)


async def test_a_peer_that_comes_back_is_dialled_at_once(nets: Any) -> None:
    """libp2p alone refuses to dial for a minute after a failure."""
    one, two = await nets.make(), await nets.make()
    address = one.address
    await one.net.close()
    two.net.know(address)
    with pytest.raises(ControlUnreachable):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    again = await nets.make(private=Ed25519PrivateKey.from_private_bytes(one.net._config.key), listen=(address.host, address.port))
    again.net.handle(ECHO, echo)
    assert await two.net.request(one.key, ECHO, b"", timeout_s=5.0)


async def test_private_addresses_are_not_dialled(nets: Any) -> None:
    one, two = await nets.make(), await nets.make(allowed_networks=())
    two.net.know(one.address)
    with pytest.raises(ControlUnreachable, match=r"127.0.0.1 is not a public address; the operator must list its network"):
        await two.net.request(one.key, ECHO, b"", timeout_s=5.0)


async def test_denied_networks_are_neither_dialled_nor_accepted(nets: Any) -> None:
    closed = await nets.make(denied_networks=("127.0.0.1/32",))
    open_ = await nets.make()
    open_.net.handle(ECHO, echo)
    closed.net.handle(ECHO, echo)
    closed.net.know(open_.address)
    open_.net.know(closed.address)
    with pytest.raises(ControlUnreachable, match="denied network"):
        await closed.net.request(open_.key, ECHO, b"", timeout_s=5.0)
    with pytest.raises((ControlUnreachable, ControlTimeout)):
        await open_.net.request(closed.key, ECHO, b"", timeout_s=2.0)


async def test_strangers_are_not_answered_once_members_are_known(nets: Any) -> None:
    one, member, stranger = await nets.make(), await nets.make(), await nets.make()
    one.net.handle(ECHO, echo)
    one.net.set_members(frozenset({member.key}))
    member.net.know(one.address)
    stranger.net.know(one.address)
    assert await member.net.request(one.key, ECHO, b"", timeout_s=5.0)
    with pytest.raises((ControlUnreachable, ControlRefused)):
        await stranger.net.request(one.key, ECHO, b"", timeout_s=5.0)


@pytest.mark.long
async def test_connections_from_one_address_are_bounded_and_given_back(nets: Any) -> None:
    """libp2p 0.8.1 alone keeps the slot of every connection it ever accepted: after its maximum it accepts no more."""
    one, two = await nets.make(connections_per_ip=3), await nets.make()
    one.net.handle(ECHO, echo)
    two.net.know(one.address)

    async def is_answered() -> bool:
        try:
            return bool(await two.net.request(one.key, ECHO, b"", timeout_s=1.0))
        except (ControlUnreachable, ControlTimeout):
            return False

    for _ in range(2):
        held = [socket.create_connection(one.net.addresses[0]) for _ in range(3)]
        await asyncio.sleep(0.1)
        assert not await is_answered()
        for connection in held:
            connection.close()
        await asyncio.sleep(0.8)  # what it takes for the slots to come back
    assert await is_answered()


class Flooder:
    """Opens streams past all the limits that an honest node keeps."""

    def __init__(self, peer: Any, target: Any) -> None:
        peer.net.know(target.address)
        self._running, self._target = peer.net._running, target.key
        self.opened = 0

    async def flood(self, streams: int) -> None:
        await self._running.call(lambda: self._open_all(streams), 20.0)

    async def _open_all(self, count: int) -> None:
        import trio

        await self._running.node._connect(self._target)
        async with trio.open_nursery() as nursery:
            for _ in range(count):
                nursery.start_soon(self._open)

    async def _open(self) -> None:
        import trio

        from p2p.adapters.control.node import _peer

        with trio.move_on_after(5.0):
            try:
                stream = await self._running.node._host.new_stream(_peer(self._target), [ECHO])
                await stream.write(bytes(4))
            except Exception:
                return
            self.opened += 1
            await trio.sleep(1.5)


class SlowHandler:
    """Counts who is being answered at once."""

    def __init__(self, good: str) -> None:
        self._good = good
        self.now = self.most = 0

    async def __call__(self, key: str, payload: bytes) -> bytes:
        if key == self._good:
            return b"served"
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(1.0)
        self.now -= 1
        return b""


@pytest.mark.parametrize(("streams", "is_cut"), [pytest.param(40, False, marks=pytest.mark.long), (250, True)])
async def test_a_flood_of_requests_is_bounded(nets: Any, eventually: Callable[..., Any], streams: int, is_cut: bool) -> None:
    """Eight are answered at a time; who keeps more than 64 streams open loses its connection; others are served meanwhile."""
    one, good, bad = await nets.make(), await nets.make(), await nets.make()
    handler = SlowHandler(good.key)
    one.net.handle(ECHO, handler)
    good.net.know(one.address)
    assert await good.net.request(one.key, ECHO, b"", timeout_s=5.0) == b"served"
    flooder = Flooder(bad, one)
    flooding = asyncio.create_task(flooder.flood(streams))
    for _ in range(5):
        await asyncio.sleep(0.2)
        began = time.monotonic()
        assert await good.net.request(one.key, ECHO, b"", timeout_s=5.0) == b"served"
        assert time.monotonic() - began < 2.0
    await flooding
    assert handler.most <= 8
    if not is_cut:
        assert handler.most == 8
    else:
        assert flooder.opened < streams
    assert one.net.is_alive


async def test_a_length_that_lies_is_refused_on_receipt(nets: Any) -> None:
    """Raw frames on a real stream: too long, cut short, and never finished."""
    one, two = await nets.make(), await nets.make()
    asked = []

    async def note(key: str, payload: bytes) -> bytes:
        asked.append(payload)
        return b""

    one.net.handle(ECHO, note)
    two.net.know(one.address)
    running = two.net._running

    async def send(raw: bytes, *, close: bool) -> bytes:
        import trio

        from p2p.adapters.control import streams
        from p2p.adapters.control.node import _peer

        await running.node._connect(one.key)
        stream = await running.node._host.new_stream(_peer(one.key), [ECHO])
        await stream.write(raw)
        if close:
            await stream.close_write()
        with trio.move_on_after(2.0):
            try:
                return bytes(await stream.read(64))
            except streams.LOST:
                return b""
        return b"nothing"

    too_long = (MAX_MESSAGE + 2).to_bytes(4, "little")
    assert await running.call(lambda: send(too_long + bytes(100), close=False), 5.0) == b""
    assert await running.call(lambda: send(b"\x0a\x00\x00\x00abc", close=True), 5.0) == b""
    assert await running.call(lambda: send(b"\x0a\x00\x00\x00abc", close=False), 5.0) == b"nothing", (
        "it waits for the rest, not for ever"
    )
    assert await running.call(lambda: send(b"\x03\x00\x00\x00abc", close=False), 5.0) == b"\x01\x00\x00\x00\x00"
    assert asked == [b"abc"]


async def test_a_lying_answer_is_refused_on_receipt(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()
    two.net.know(one.address)

    async def lie(stream: Any) -> None:
        await stream.read(64)
        await stream.write((2**31).to_bytes(4, "little") + bytes(100))

    async def install() -> None:
        one.net._running.node._host.set_stream_handler(ECHO, lie)

    await one.net._running.call(install, 5.0)
    with pytest.raises(ControlRefused, match="2147483648 bytes is announced, above the limit"):
        await two.net.request(one.key, ECHO, b"x", timeout_s=5.0)


async def test_a_closed_network_raises_a_typed_error(nets: Any) -> None:
    one = await nets.make(start=False)
    with pytest.raises(ControlDown, match="it was not started"):
        await one.net.request("ab" * 32, ECHO, b"", timeout_s=1.0)
    await one.net.start()
    await one.net.close()
    await one.net.close()
    assert not one.net.is_alive
    with pytest.raises(ControlDown):
        await one.net.request("ab" * 32, ECHO, b"", timeout_s=1.0)


async def test_a_taken_port_is_said(nets: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        peer = await nets.make(start=False, listen=("127.0.0.1", taken.getsockname()[1]))
        with pytest.raises(ControlDown, match=f"no listener on 127.0.0.1 port {taken.getsockname()[1]}"):
            await peer.net.start()
