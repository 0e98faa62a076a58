"""A worker's control messages against a coordinator's real desk and real network: libp2p comes in when its place is told, and what is said arrives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import ControlPlace
from p2p.adapters.bulk.node import NodeState, TransferState
from p2p.adapters.control import stack
from p2p.adapters.control.desk import Desk
from p2p.adapters.control.net import ControlConfig, ControlNet
from p2p.domain.control_board import Board
from p2p.domain.control_messages import Announcement, HaveMap, SignedBatch, may_say
from worker_node.adapters import control as control_module
from worker_node.adapters import tidings as tidings_module
from worker_node.adapters.control import ControlLine
from worker_node.adapters.tidings import Tidings
from worker_node.config import PeerSettings
from worker_node.domain.weights import Version

PEERS = "/echo2/peers/1"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw().hex()


def announcement(version: int) -> bytes:
    return Announcement("job", version, f"{version:064x}", "ab" * 32).signed(KEY).to_bytes()


@dataclass
class FewPeers:
    """What Tidings uses of Peers."""

    transfers: tuple[TransferState, ...] = ()
    batches: list[tuple[str, str]] = field(default_factory=list)
    uplink: float = 7.0

    def state(self) -> NodeState:
        return NodeState(0.0, 0, (), self.transfers)

    def take_batch(self, text: str, signature: str) -> None:
        self.batches.append((text, signature))


class Worker:
    """One worker's line and tidings, posting straight to a desk."""

    def __init__(self, desk: Desk, **changes: Any) -> None:
        key = Ed25519PrivateKey.generate()
        self.key = key.public_key().public_bytes_raw().hex()
        self.posted: list[str] = []
        self.heard: list[Version] = []
        self.peers = FewPeers()
        self._desk = desk
        options: dict[str, Any] = {"coordinator": (PUBLIC, "127.0.0.1"), "libp2p": True, **changes}
        self.line = ControlLine(self.post, key, options.pop("peer", PeerSettings()), **options)
        self.tidings = Tidings(
            self.line.control,
            self.peers,  # type: ignore[arg-type]  # the part of Peers that it uses
            me=self.key,
            coordinator=PUBLIC,
            heard=self.heard.append,
        )
        self._tasks = [asyncio.create_task(self.line.run()), asyncio.create_task(self.tidings.run())]

    async def post(self, path: str, body: bytes) -> bytes:
        self.posted.append(path)
        return await self._desk.post(self.key, path, body)

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.line.close()


Make = Callable[..., Worker]


@pytest.fixture
def desk() -> Desk:
    made = Desk(Board(), lambda topic, author, payload: may_say(topic, author, payload, coordinator=PUBLIC))

    async def answer(asker: str, payload: bytes) -> bytes:
        return b"over https"

    made.handle(PEERS, answer)
    return made


@pytest.fixture
async def make(desk: Desk) -> AsyncIterator[Make]:
    made: list[Worker] = []

    def one(**changes: Any) -> Worker:
        made.append(Worker(desk, **changes))
        return made[-1]

    yield one
    await asyncio.gather(*(worker.close() for worker in made))


@pytest.fixture
async def net() -> AsyncIterator[ControlNet]:
    if stack.version() is None:
        pytest.skip("libp2p is not installed (extra p2p)")
    running = ControlNet(ControlConfig(KEY.private_bytes_raw(), ("127.0.0.1", 0), is_relay=True, allowed_networks=("127.0.0.0/8",)))

    async def answer(asker: str, payload: bytes) -> bytes:
        return b"over libp2p"

    running.handle(PEERS, answer)
    for what in ("versions", "batches", "haves"):
        running.subscribe(f"job/{what}", lambda *_: None, validate=partial(may_say, f"job/{what}", coordinator=PUBLIC))
    await running.start()
    yield running
    await running.close()


def place(net: ControlNet) -> ControlPlace:
    return ControlPlace(host="0.0.0.0", port=net.addresses[0][1])


async def test_https_until_the_place_is_told_and_libp2p_from_then_on(
    make: Make, net: ControlNet, until: Callable[..., Awaitable[None]]
) -> None:
    """The coordinator says where it listens without an address: it is where the worker reaches it, loopback or not."""
    worker = make()
    assert worker.line.way == "https (the coordinator has no libp2p)"
    assert await worker.line.control.request(PUBLIC, PEERS, b"", timeout_s=5.0) == b"over https"
    worker.line.told(None, ())
    worker.line.told(place(net), ())
    await until(lambda: worker.line.way == "libp2p", "libp2p is taken")
    assert await worker.line.control.request(PUBLIC, PEERS, b"", timeout_s=5.0) == b"over libp2p"
    worker.tidings.work_for("job")
    await net.publish("job/versions", announcement(3))
    await until(lambda: worker.heard == [Version("job", 3, f"{3:064x}")], "the announcement arrives by gossip")
    worker.line.told(None, ())
    assert worker.line.way == "libp2p", "a place that is not told any more may come back"


async def test_a_worker_without_libp2p_hears_and_says_the_same_over_the_board(
    make: Make, desk: Desk, until: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Announcements, batches and what neighbours hold; nothing that another job's coordinator, or a stranger, says."""
    monkeypatch.setattr(tidings_module, "SAY_S", 0.05)
    worker = make(libp2p=False, peer=PeerSettings("127.0.0.1", 2000, "127.0.0.1", 2001))
    assert (worker.line.way, worker.line.port) == ("https (--no-libp2p)", None)
    worker.line.told(ControlPlace(host="127.0.0.1", port=1), ())
    transfer = TransferState("12" * 32, "job", 4, 10, 3, 10, 0, 0, is_complete=False, halted=None, first_sent_at=None, mask=0b1101)
    worker.peers.transfers = (transfer,)
    worker.tidings.meet(["cd" * 32])
    whole = HaveMap("cd" * 32, "12" * 32, 10, ((0, 10),), 1)
    desk.board.put("job/versions", PUBLIC, "", announcement(4))
    desk.board.put("job/batches", PUBLIC, "0", SignedBatch("not checked here", "ab" * 64).to_bytes())
    desk.board.put("job/haves", "cd" * 32, "", whole.to_bytes())
    desk.board.put("job/haves", "ee" * 32, "", HaveMap("ee" * 32, "12" * 32, 10, (), 1).to_bytes())
    worker.tidings.work_for("job")
    await until(lambda: worker.heard == [Version("job", 4, f"{4:064x}")], "the announcement")
    assert worker.peers.batches == [], "no batch without the coordinator's signature"
    assert worker.tidings.words == "1 of 1 neighbours hold what is known of the newest transfer", "a stranger's word does not count"

    def said() -> list[HaveMap]:
        page = desk.board.page(frozenset({"job/haves"}), 0)
        return [HaveMap.from_bytes(one.payload) for one in page.values if one.author == worker.key]

    await until(lambda: said() == [HaveMap(worker.key, "12" * 32, 10, ((0, 1), (2, 2)), 7)], "its own have-map")
    worker.tidings.work_for(None)
    assert worker.tidings.words == ""
    assert worker.line.way == "https (--no-libp2p)", "the place is of no use"


async def test_a_place_that_is_told_while_another_is_tried_is_not_lost(
    make: Make, net: ControlNet, until: Callable[..., Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first place whose name does not resolve fails after the second was told; failing again, it is tried again when it is told again."""
    begun, go = threading.Event(), threading.Event()
    tries: list[int] = []

    def resolve(host: str, family: object) -> str:
        tries.append(len(tries))
        if len(tries) == 1:
            raise OSError("no such name")
        if len(tries) == 2:
            begun.set()
            assert go.wait(10)
            raise OSError("no such name")
        return host

    monkeypatch.setattr(control_module, "resolve", resolve)
    worker = make()
    wrong = ControlPlace(host="0.0.0.0", port=1)
    worker.line.told(wrong, ())
    await until(lambda: worker.line._told is None, "the first try fails")
    worker.line.told(wrong, ())
    await until(begun.is_set, "it is tried again")
    worker.line.told(place(net), ())
    go.set()
    await until(lambda: worker.line.way == "libp2p", "the second place is taken")
    assert len(tries) == 3
