"""Gossip over real libp2p: it reaches the end of a line, is repeated for those who come late, and carries only what its validators accept."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.control_messages import Announcement, HaveMap
from p2p.errors import ControlRefused

TOPIC = "job-1/versions"
COORDINATOR = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = COORDINATOR.public_key().public_bytes_raw().hex()


class Inbox:
    """What a subscriber got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, bytes, float]] = []

    def __call__(self, author: str, payload: bytes) -> None:
        self.got.append((author, payload, time.monotonic()))

    @property
    def payloads(self) -> list[bytes]:
        return [payload for _, payload, _ in self.got]


def anything(author: str, payload: bytes) -> bool:
    return True


def signed_announcement(author: str, payload: bytes) -> bool:
    try:
        Announcement.from_bytes(payload).check(PUBLIC)
    except ControlRefused:
        return False
    return True


def link(first: Any, second: Any) -> None:
    """`first` keeps a connection to `second`."""
    first.net.know(second.address)
    first.net.set_neighbours(frozenset({second.key}))


async def line(nets: Any, count: int, eventually: Callable[..., Any], validate: Any = anything) -> tuple[list[Any], list[Inbox]]:
    peers = [await nets.make() for _ in range(count)]
    inboxes = [Inbox() for _ in peers]
    for peer, inbox in zip(peers, inboxes, strict=True):
        peer.net.subscribe(TOPIC, inbox, validate=validate)
    for before, after in pairwise(peers):
        link(before, after)
    await eventually(lambda: all(peer.net.is_usable and peer.net._running.connections for peer in peers))
    return peers, inboxes


async def test_a_value_reaches_five_nodes_in_a_line(nets: Any, eventually: Callable[..., Any]) -> None:
    peers, inboxes = await line(nets, 5, eventually)
    began = time.monotonic()
    await peers[0].net.publish(TOPIC, b"version 7")
    await eventually(lambda: all(inbox.got for inbox in inboxes[1:]))
    assert [inbox.got[0][:2] for inbox in inboxes[1:]] == [(peers[0].key, b"version 7")] * 4
    assert inboxes[0].got == [], "a node does not hear itself"
    assert inboxes[4].got[0][2] - began < 6.0
    await asyncio.sleep(1.0)
    assert [len(inbox.got) for inbox in inboxes] == [0, 1, 1, 1, 1], "repeats are not delivered again"


async def test_the_largest_value_passes_and_a_larger_one_is_refused(nets: Any, eventually: Callable[..., Any]) -> None:
    peers, inboxes = await line(nets, 3, eventually)
    with pytest.raises(ControlRefused, match="above the limit of 60000"):
        await peers[0].net.publish(TOPIC, bytes(MAX_MESSAGE + 1))
    await peers[0].net.publish(TOPIC, bytes(MAX_MESSAGE))
    await eventually(lambda: inboxes[2].payloads == [bytes(MAX_MESSAGE)])


async def test_only_what_the_coordinator_signed_is_passed_on(nets: Any, eventually: Callable[..., Any]) -> None:
    """The first in the line lies; the second has no scruples. The third neither delivers it nor passes it on."""
    peers, inboxes = await line(nets, 4, eventually, signed_announcement)
    peers[1].net.subscribe(TOPIC, inboxes[1], validate=anything)
    true = Announcement("job-1", 7, "ab" * 32, "cd" * 32).signed(COORDINATOR)
    false = Announcement("job-1", 8, "ab" * 32, "cd" * 32, true.signature)
    await peers[0].net.publish(TOPIC, false.to_bytes(), slot="false")
    await eventually(lambda: inboxes[1].payloads == [false.to_bytes()])
    await peers[0].net.publish(TOPIC, true.to_bytes(), slot="true")
    await eventually(lambda: all(true.to_bytes() in inbox.payloads for inbox in inboxes[1:]))
    assert inboxes[2].payloads == [true.to_bytes()]
    assert inboxes[3].payloads == [true.to_bytes()]


@pytest.mark.long
async def test_a_validator_that_fails_refuses(nets: Any, eventually: Callable[..., Any]) -> None:
    def broken(author: str, payload: bytes) -> bool:
        if payload == b"bad":
            raise ZeroDivisionError
        return True

    peers, inboxes = await line(nets, 2, eventually, broken)
    await peers[0].net.publish(TOPIC, b"bad", slot="0")
    await peers[0].net.publish(TOPIC, b"good", slot="1")
    await eventually(lambda: inboxes[1].payloads == [b"good"])
    assert peers[1].net.is_alive


@pytest.mark.long
async def test_repeats_heal_a_late_subscriber(nets: Any, eventually: Callable[..., Any]) -> None:
    one, late = await nets.make(), await nets.make()
    await one.net.publish(TOPIC, b"old", slot="state")
    await one.net.publish(TOPIC, b"version 7", slot="state")
    await asyncio.sleep(6.0)  # it has been sent into the void, more than once
    inbox = Inbox()
    late.net.subscribe(TOPIC, inbox, validate=anything)
    link(late, one)
    await eventually(lambda: inbox.payloads, 15.0)
    assert inbox.payloads == [b"version 7"]
    await one.net.retract(TOPIC)
    later, another = Inbox(), await nets.make()
    another.net.subscribe(TOPIC, later, validate=anything)
    await asyncio.sleep(6.0)
    link(another, one)
    await asyncio.sleep(6.0)
    assert later.payloads == [], "what is retracted is not repeated"


async def test_a_burst_is_thinned_to_its_last_value(nets: Any, eventually: Callable[..., Any]) -> None:
    """300 values at once: gossipsub by itself lets some ten through and drops the rest, the last ones."""
    peers, inboxes = await line(nets, 2, eventually)
    for number in range(300):
        await peers[0].net.publish(TOPIC, str(number).encode())
    await eventually(lambda: b"299" in inboxes[1].payloads)
    assert len(inboxes[1].payloads) <= 3


@pytest.mark.long
async def test_an_author_who_floods_is_held_to_its_rate_and_others_are_heard(nets: Any, eventually: Callable[..., Any]) -> None:
    """A hostile node publishes 200 values as fast as gossipsub lets it."""
    peers, inboxes = await line(nets, 3, eventually)
    running = peers[0].net._running

    async def flood() -> None:
        import trio

        for number in range(200):
            await running.node.gossip.pubsub.publish(TOPIC, f"flood {number}".encode())
            await trio.sleep(0.002)

    await running.call(flood, 10.0)
    await peers[1].net.publish(TOPIC, b"heard")
    await eventually(lambda: b"heard" in inboxes[2].payloads)
    floods = [payload for payload in inboxes[2].payloads if payload.startswith(b"flood")]
    assert 1 <= len(floods) <= 60
    assert peers[1].net.is_alive
    assert peers[2].net.is_alive


@pytest.mark.long
async def test_a_stranger_is_not_heard_once_members_are_known(nets: Any, eventually: Callable[..., Any]) -> None:
    peers, inboxes = await line(nets, 3, eventually)
    for peer in peers[1:]:
        peer.net.set_members(frozenset({peers[1].key, peers[2].key}))
    await peers[0].net.publish(TOPIC, b"stranger")
    await peers[1].net.publish(TOPIC, b"member")
    await eventually(lambda: b"member" in inboxes[2].payloads)
    await asyncio.sleep(0.5)
    assert inboxes[1].payloads == []
    assert inboxes[2].payloads == [b"member"]


async def test_have_maps_of_many_travel_together(nets: Any, eventually: Callable[..., Any]) -> None:
    peers, inboxes = await line(nets, 4, eventually)
    for peer in peers:
        await peer.net.publish(TOPIC, HaveMap(peer.key, "12" * 32, 800, ((0, 3), (5, 700)), 1_000_000).to_bytes())
    await eventually(lambda: all(len(inbox.got) == 3 for inbox in inboxes))
    for peer, inbox in zip(peers, inboxes, strict=True):
        holders = {HaveMap.from_bytes(payload).holder for payload in inbox.payloads}
        assert holders == {other.key for other in peers} - {peer.key}
        assert all(author == HaveMap.from_bytes(payload).holder for author, payload, _ in inbox.got)
