"""Which way this worker's control messages go: HTTPS from the start, libp2p before it once the coordinator has named its place there.

libp2p costs half a second of CPU to load and some 45 MB: it is loaded only if the owner did not forbid it, it is installed, and the
coordinator has it too. Without an open port this worker is reachable through the coordinator, as a relay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import ControlPlace
from p2p.adapters.control import stack
from p2p.adapters.control.fallback import FallbackControl
from p2p.adapters.control.https import HttpsControl, Post
from p2p.adapters.control.net import ControlConfig, ControlNet
from p2p.domain.control_messages import Neighbour, topic_of
from p2p.domain.control_peers import ControlAddress
from worker_node.adapters.neighbourhood import FAMILIES, resolve
from worker_node.config import PeerSettings

log = structlog.get_logger("control")
NEIGHBOURS = 4  # besides the coordinator: gossip finds its way without it

_Told = tuple[ControlPlace, frozenset[str]]  # where the coordinator listens, and the private networks that may be dialled


class ControlLine:
    """`control` is usable at once; `run` brings libp2p in when it can be had."""

    def __init__(
        self, post: Post, key: Ed25519PrivateKey, peer: PeerSettings, *, coordinator: tuple[str, str], libp2p: bool
    ) -> None:
        """`coordinator`: its public key (hex), and the name or address literal under which it is reached."""
        self._coordinator_key, self._coordinator_host = coordinator
        self._why = "" if libp2p else "--no-libp2p"
        if libp2p and stack.version() is None:
            self._why = "libp2p is not installed"
        listens = bool(peer.port and peer.control_port and not self._why)
        self.port = peer.control_port if listens else None
        self._net = ControlNet(
            ControlConfig(
                key.private_bytes_raw(),
                (peer.bind, peer.control_port) if listens else None,
                relays=() if listens else (self._coordinator_key,),
            )
        )
        self._net.set_neighbours(frozenset({self._coordinator_key}))
        self._net.use_relay(self._coordinator_key)
        self.control = FallbackControl(
            self._net, HttpsControl(post, coordinator=self._coordinator_key), is_proof=self._comes_both_ways
        )
        self._told: _Told | None = None  # what is tried, or holds
        self._is_started = False
        self._news = asyncio.Event()

    @property
    def way(self) -> str:
        """Which way messages go now, and why not by libp2p."""
        if self._is_started:
            return self.control.way
        return f"https ({self._why or 'the coordinator has no libp2p'})"

    def told(self, place: ControlPlace | None, networks: Collection[str]) -> None:
        """Where the coordinator listens, and the private networks that may be dialled. One that has gone may come back: nothing is undone."""
        if place is not None and not self._why and (place, frozenset(networks)) != self._told:
            self._told = (place, frozenset(networks))
            self._news.set()

    def meet(self, neighbours: Iterable[Neighbour]) -> None:
        """Keep connections to some neighbours that listen, besides the coordinator."""
        found = [
            ControlAddress(peer.key, peer.control.host, peer.control.port)
            for peer in neighbours
            if peer.control is not None and peer.key != self._coordinator_key
        ][:NEIGHBOURS]
        for address in found:
            self._net.know(address)
        self._net.set_neighbours(frozenset({self._coordinator_key, *(address.key for address in found)}))

    async def run(self) -> None:
        """Follow what `told` says. Ends when cancelled."""
        await self.control.start_second()
        while True:
            await self._news.wait()
            self._news.clear()
            if self._told is not None:
                await self._try(self._told)

    async def close(self) -> None:
        """End both ways."""
        await self.control.close()

    async def _try(self, told: _Told) -> None:
        try:
            await self._follow(*told)
        except OSError as error:
            log.info("the coordinator's name is not resolved", reason=str(error))
            if self._told is told:  # else another place was told meanwhile, and is tried next
                self._told = None  # the next beat says it again

    async def _follow(self, place: ControlPlace, networks: frozenset[str]) -> None:
        family = FAMILIES.get(place.host)
        host = place.host if family is None else await asyncio.to_thread(resolve, self._coordinator_host, family)
        self._net.allow(networks | {host})  # whom we trust may be anywhere
        self._net.know(ControlAddress(self._coordinator_key, host, place.port))
        if not self._is_started:
            self._is_started = True
            await self.control.start_first()
            log.info("control messages", way=self.control.way)

    def _comes_both_ways(self, topic: str, author: str) -> bool:
        """The coordinator repeats what it says of versions by libp2p until something newer replaces it."""
        return author == self._coordinator_key and topic.endswith(topic_of("", "versions"))
