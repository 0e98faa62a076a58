"""The same messages over HTTPS when libp2p is dead, blocked, silent or missing, and back again."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from p2p.adapters.control.fallback import FallbackControl
from p2p.adapters.control.https import HttpsControl
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.errors import ControlDown, ControlRefused, ControlUnreachable
from tests.integration.p2p.control.over_https import Coordinator, coordinator

ECHO = "/echo2/echo/1"
TOPIC = "job-1/haves"


async def echo(key: str, payload: bytes) -> bytes:
    return bytes.fromhex(key) + payload


def anything(author: str, payload: bytes) -> bool:
    return True


class Inbox:
    def __init__(self) -> None:
        self.got: list[tuple[str, bytes]] = []

    def __call__(self, author: str, payload: bytes) -> None:
        self.got.append((author, payload))


@pytest.fixture
async def server() -> AsyncIterator[Coordinator]:
    async with coordinator() as running:
        yield running


class Scene:
    """A coordinator with both ways open, and two workers that prefer libp2p."""

    def __init__(self, nets: Any, server: Coordinator) -> None:
        self._nets = nets
        self.server = server
        self.controls: list[FallbackControl] = []

    async def open(self) -> None:
        self.desk_peer = await self._nets.make()
        self.desk_peer.net.handle(ECHO, echo)
        self.desk_peer.net.subscribe(TOPIC, Inbox(), validate=anything)
        self.server.desk.handle(ECHO, echo)

    async def worker(self) -> tuple[Any, FallbackControl]:
        peer = await self._nets.make(start=False)
        peer.net.know(self.desk_peer.address)
        peer.net.set_neighbours(frozenset({self.desk_peer.key}))
        https = HttpsControl(self.server.post_as(peer.key), coordinator=self.desk_peer.key, poll_s=0.2)
        control = FallbackControl(peer.net, https, quick_s=0.2, slow_s=1.0, retry_s=0.5)
        self.controls.append(control)
        await control.start()
        return peer, control

    async def close(self) -> None:
        await asyncio.gather(*(control.close() for control in self.controls))


@pytest.fixture
async def scene(nets: Any, server: Coordinator) -> AsyncIterator[Scene]:
    opened = Scene(nets, server)
    await opened.open()
    yield opened
    await opened.close()


async def crash() -> None:
    raise RuntimeError("killed by the test")


def kill(peer: Any) -> None:
    """End the trio thread's loop by an exception from within, as a fault in libp2p would."""
    running = peer.net._running
    running.soon(lambda: running._nursery.start_soon(crash))


async def test_a_killed_trio_thread_costs_time_and_nothing_else(scene: Scene, eventually: Callable[..., Any]) -> None:
    peer, control = await scene.worker()
    _, other = await scene.worker()
    inbox = Inbox()
    other.subscribe(TOPIC, inbox, validate=anything)
    await eventually(lambda: control.way == "libp2p" and other.way == "libp2p")
    assert await control.request(scene.desk_peer.key, ECHO, b"1", timeout_s=5.0) == bytes.fromhex(peer.key) + b"1"
    assert "control/request" not in scene.server.calls, "libp2p carried it"
    await control.publish(TOPIC, b"before")
    await eventually(lambda: (peer.key, b"before") in inbox.got)

    asked = [asyncio.create_task(control.request(scene.desk_peer.key, ECHO, str(i).encode(), timeout_s=5.0)) for i in range(20)]
    kill(peer)
    assert await asyncio.gather(*asked) == [bytes.fromhex(peer.key) + str(i).encode() for i in range(20)]
    await eventually(lambda: not peer.net.is_alive)
    assert control.way.startswith("https (")
    assert await control.request(scene.desk_peer.key, ECHO, b"2", timeout_s=5.0) == bytes.fromhex(peer.key) + b"2"
    assert "control/request" in scene.server.calls
    await control.publish(TOPIC, b"while down")
    await eventually(lambda: (peer.key, b"while down") in inbox.got)

    await eventually(lambda: control.way == "libp2p")
    scene.server.calls.clear()
    assert await control.request(scene.desk_peer.key, ECHO, b"3", timeout_s=5.0) == bytes.fromhex(peer.key) + b"3"
    assert "control/request" not in scene.server.calls, "libp2p carries it again"
    await control.publish(TOPIC, b"after")
    await eventually(lambda: (peer.key, b"after") in inbox.got)
    assert len(inbox.got) == len(set(inbox.got)), "each value once, whichever way it came"


@pytest.mark.long
async def test_a_network_that_starts_again_keeps_its_port_and_what_it_was_told(nets: Any, eventually: Callable[..., Any]) -> None:
    one, two = await nets.make(), await nets.make()
    inbox = Inbox()
    one.net.handle(ECHO, echo)
    one.net.subscribe(TOPIC, inbox, validate=anything)
    await one.net.publish(TOPIC, b"mine")
    two.net.know(one.address)
    two.net.set_neighbours(frozenset({one.key}))
    before = one.net.addresses
    for _ in range(2):
        kill(one)
        await eventually(lambda: not one.net.is_alive)
        with pytest.raises(ControlDown, match=r"killed by the test|was closed"):
            await one.net.request(two.key, ECHO, b"", timeout_s=1.0)
        await eventually(lambda: one.net.is_alive)
    assert one.net.addresses == before
    assert await two.net.request(one.key, ECHO, b"x", timeout_s=5.0) == bytes.fromhex(two.key) + b"x"
    await two.net.publish(TOPIC, b"heard")
    await eventually(lambda: (two.key, b"heard") in inbox.got)


async def test_requests_in_flight_fail_typed_when_the_thread_dies(nets: Any) -> None:
    one, two = await nets.make(), await nets.make()

    async def slow(key: str, payload: bytes) -> bytes:
        await asyncio.sleep(30.0)
        return b""

    one.net.handle(ECHO, slow)
    two.net.know(one.address)
    asked = [asyncio.create_task(two.net.request(one.key, ECHO, b"", timeout_s=20.0)) for _ in range(5)]
    await asyncio.sleep(0.6)
    began = time.monotonic()
    kill(two)
    results = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(result) for result in results] == [ControlDown] * 5
    assert time.monotonic() - began < 3.0


async def test_a_blocked_libp2p_is_noticed_by_its_missing_connections(scene: Scene, eventually: Callable[..., Any]) -> None:
    """A firewall lets HTTPS through and nothing else: the neighbour's address answers nothing."""
    peer, control = await scene.worker()
    await eventually(lambda: control.way == "libp2p")
    await scene.desk_peer.net.close()
    await eventually(lambda: control.way.startswith("https (libp2p is down or has no connection"))
    assert peer.net.is_alive
    assert await control.request(scene.desk_peer.key, ECHO, b"1", timeout_s=5.0) == bytes.fromhex(peer.key) + b"1"


@pytest.mark.long
async def test_a_silent_libp2p_is_noticed_by_what_the_board_brings(scene: Scene, eventually: Callable[..., Any]) -> None:
    """Connected, and yet nothing comes: here because the value stands on the board only, its author being without libp2p."""
    peer, control = await scene.worker()
    inbox = Inbox()
    control.subscribe(TOPIC, inbox, validate=anything)
    await eventually(lambda: control.way == "libp2p")
    control._silence._grace_s = 0.5
    alone = HttpsControl(scene.server.post_as("ab" * 32), coordinator=scene.desk_peer.key)
    await alone.publish(TOPIC, b"by the board")
    await eventually(lambda: ("ab" * 32, b"by the board") in inbox.got)
    await eventually(lambda: control.way == "https (libp2p is connected but silent)")
    await scene.desk_peer.net.publish(TOPIC, b"by gossip")
    await eventually(lambda: control.way == "libp2p")
    assert (scene.desk_peer.key, b"by gossip") in inbox.got
    assert peer.net.is_alive


async def test_a_peer_that_libp2p_cannot_reach_does_not_condemn_the_rest(scene: Scene, eventually: Callable[..., Any]) -> None:
    _, control = await scene.worker()
    await eventually(lambda: control.way == "libp2p")
    with pytest.raises(ControlUnreachable, match="only the coordinator can be asked"):
        await control.request("ab" * 32, ECHO, b"", timeout_s=2.0)
    assert control.way == "libp2p"


async def test_both_ways_closed_is_a_typed_error_and_what_was_published_comes_later(
    scene: Scene, eventually: Callable[..., Any]
) -> None:
    peer, control = await scene.worker()
    await eventually(lambda: control.way == "libp2p")
    await peer.net.close()
    scene.server.is_cut = True
    with pytest.raises(ControlDown, match="cannot be reached over HTTPS"):
        await control.request(scene.desk_peer.key, ECHO, b"", timeout_s=2.0)
    assert not control.is_usable
    await control.publish(TOPIC, b"old")
    await control.publish(TOPIC, b"new")
    scene.server.is_cut = False
    await eventually(lambda: scene.server.desk.board.page(frozenset({TOPIC}), 0).values)
    assert [(one.author, one.payload) for one in scene.server.desk.board.page(frozenset({TOPIC}), 0).values] == [(peer.key, b"new")]
    assert control.is_usable


# --- HTTPS alone


async def test_values_and_requests_over_https_alone(server: Coordinator, eventually: Callable[..., Any]) -> None:
    server.desk.handle(ECHO, echo)
    one, two = (HttpsControl(server.post_as(key * 32), coordinator="cc" * 32, poll_s=0.05) for key in ("aa", "bb"))
    inbox = Inbox()
    await one.publish(TOPIC, b"early")
    two.subscribe(TOPIC, inbox, validate=lambda author, payload: payload != b"unwanted")
    await two.start()
    await eventually(lambda: inbox.got == [("aa" * 32, b"early")])
    await one.publish(TOPIC, b"unwanted", slot="1")
    await one.publish(TOPIC, bytes(MAX_MESSAGE), slot="2")
    await eventually(lambda: len(inbox.got) == 2)
    assert inbox.got[1] == ("aa" * 32, bytes(MAX_MESSAGE))
    assert await one.request("cc" * 32, ECHO, b"x", timeout_s=5.0) == bytes.fromhex("aa" * 32) + b"x"
    await one.close()
    await two.close()


async def test_what_https_refuses(server: Coordinator) -> None:
    one = HttpsControl(server.post_as("aa" * 32), coordinator="cc" * 32)

    async def boast(key: str, payload: bytes) -> bytes:
        return bytes(MAX_MESSAGE + 1)

    server.desk.handle("/echo2/boast/1", boast)
    for call, why in (
        (lambda: one.publish(TOPIC, b"no: not admitted"), "not admitted"),
        (lambda: one.publish(TOPIC, bytes(MAX_MESSAGE + 1)), "above the limit of 60000"),
        (lambda: one.publish("no such topic", b""), "the publication is refused: topic"),
        (lambda: one.request("cc" * 32, ECHO, b"", timeout_s=5.0), "does not answer /echo2/echo/1: it knows"),
        (lambda: one.request("cc" * 32, "/echo2/boast/1", b"", timeout_s=5.0), "60001 bytes"),
        (lambda: one.request("cc" * 32, "/other", b"", timeout_s=5.0), "the request is refused: protocol"),
        (lambda: server.post_as("aa" * 32)("control/other", b""), "is no path of the control plane"),
    ):
        with pytest.raises(ControlRefused, match=why):
            await call()
    with pytest.raises(ControlUnreachable, match="only the coordinator can be asked"):
        await one.request("ab" * 32, ECHO, b"", timeout_s=5.0)


WITHOUT_LIBP2P = Path(__file__).with_name("without_libp2p.py")


def test_without_libp2p_everything_goes_over_https() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(WITHOUT_LIBP2P)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[4],
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "requests, values and errors are right"
