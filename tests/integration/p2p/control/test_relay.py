"""Circuit relay: a node that does not listen is asked through one that does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from p2p.errors import ControlTimeout, ControlUnreachable

ECHO = "/echo2/echo/1"


async def echo(key: str, payload: bytes) -> bytes:
    return bytes.fromhex(key) + payload


async def hidden_behind(nets: Any, relay: Any, eventually: Callable[..., Any]) -> Any:
    """A node without a listener that holds a reservation at the relay."""
    hidden = await nets.make(listen=None, relays=(relay.key,))
    hidden.net.handle(ECHO, echo)
    hidden.net.know(relay.address)
    manager = relay.net._running.node._relay.protocol.resource_manager
    from p2p.adapters.control.node import _peer

    await eventually(lambda: manager.has_reservation(_peer(hidden.key)))
    return hidden


async def test_a_node_that_does_not_listen_is_asked_through_the_relay(nets: Any, eventually: Callable[..., Any]) -> None:
    relay = await nets.make(is_relay=True)
    hidden = await hidden_behind(nets, relay, eventually)
    asker = await nets.make(listen=None)
    asker.net.know(relay.address)
    asker.net.use_relay(relay.key)
    for payload in (b"", b"hello", bytes(59_000)):
        answer = await asker.net.request(hidden.key, ECHO, payload, timeout_s=8.0)
        assert answer == bytes.fromhex(asker.key) + payload, "the asker's own key arrives: the relay is not taken for it"


@pytest.mark.long
async def test_several_askers_and_requests_at_once(nets: Any, eventually: Callable[..., Any]) -> None:
    relay = await nets.make(is_relay=True)
    hidden = await hidden_behind(nets, relay, eventually)
    askers = [await nets.make(listen=None) for _ in range(3)]
    for asker in askers:
        asker.net.know(relay.address)
        asker.net.use_relay(relay.key)
    answers = await asyncio.gather(
        *(asker.net.request(hidden.key, ECHO, str(i).encode(), timeout_s=15.0) for i in range(10) for asker in askers)
    )
    assert answers == [bytes.fromhex(asker.key) + str(i).encode() for i in range(10) for asker in askers]


async def test_without_a_reservation_the_relay_refuses(nets: Any) -> None:
    relay, asker, hidden = await nets.make(is_relay=True), await nets.make(), await nets.make(listen=None)
    asker.net.know(relay.address)
    asker.net.use_relay(relay.key)
    with pytest.raises((ControlUnreachable, ControlTimeout)):
        await asker.net.request(hidden.key, ECHO, b"", timeout_s=5.0)


async def test_an_asker_that_leaves_costs_the_others_nothing(nets: Any, eventually: Callable[..., Any]) -> None:
    """libp2p 0.8.1 alone closes the newest circuit of the peer in its place, and never gives the old one's place back."""
    relay = await nets.make(is_relay=True)
    hidden = await hidden_behind(nets, relay, eventually)
    askers = [await nets.make(listen=None) for _ in range(3)]
    for asker in askers:
        asker.net.know(relay.address)
        asker.net.use_relay(relay.key)
        assert await asker.net.request(hidden.key, ECHO, b"", timeout_s=8.0)
    running = relay.net._running
    from p2p.adapters.control.node import _peer

    reservation = running.node._relay.protocol.resource_manager.get_reservation(_peer(hidden.key))
    assert reservation.active_connections == 3
    await askers[0].net.close()
    await eventually(lambda: reservation.active_connections == 2)
    for asker in askers[1:]:
        assert await asker.net.request(hidden.key, ECHO, b"", timeout_s=8.0)
    assert reservation.active_connections == 2, "they are still asked on the circuits that they had"
    for asker in askers[1:]:
        await asker.net.close()
    await eventually(lambda: reservation.active_connections == 0)


@pytest.mark.long
async def test_strangers_are_not_relayed_for_once_members_are_known(nets: Any, eventually: Callable[..., Any]) -> None:
    relay = await nets.make(is_relay=True)
    hidden = await hidden_behind(nets, relay, eventually)
    stranger, member = await nets.make(listen=None), await nets.make(listen=None)
    relay.net.set_members(frozenset({hidden.key, member.key}))
    for asker in (stranger, member):
        asker.net.know(relay.address)
        asker.net.use_relay(relay.key)
    with pytest.raises((ControlUnreachable, ControlTimeout)):
        await stranger.net.request(hidden.key, ECHO, b"", timeout_s=3.0)
    assert await member.net.request(hidden.key, ECHO, b"", timeout_s=8.0)


@pytest.mark.long
async def test_a_relay_that_starts_again_is_used_again(nets: Any, eventually: Callable[..., Any]) -> None:
    relay = await nets.make(is_relay=True)
    hidden = await hidden_behind(nets, relay, eventually)
    asker = await nets.make(listen=None)
    asker.net.know(relay.address)
    asker.net.use_relay(relay.key)
    assert await asker.net.request(hidden.key, ECHO, b"1", timeout_s=8.0)
    relay.net._running.end()
    await eventually(lambda: not relay.net.is_alive)
    await eventually(lambda: relay.net.is_alive)

    async def answers() -> bool:
        try:
            return bool(await asker.net.request(hidden.key, ECHO, b"2", timeout_s=4.0))
        except (ControlUnreachable, ControlTimeout):
            return False

    for _ in range(10):
        if await answers():
            return
        await asyncio.sleep(0.5)
    pytest.fail("the relay is not used again")
