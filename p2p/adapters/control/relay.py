"""Circuit relay v2, wired by hand: a node without an open port is asked through a relay that it holds a reservation at.

libp2p 0.8.1 finds no relays by itself in time and does not dial relayed addresses (`Swarm` leaves them out), so both ends name the relay.
What runs through it is noise between the two ends: the relay sees lengths and times, nothing else. For requests only; never for weights.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import trio
from libp2p.abc import IHost, INetStream
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.config import RelayConfig
from libp2p.relay.circuit_v2.config import RelayRole as Role
from libp2p.relay.circuit_v2.protocol import PROTOCOL_ID as HOP
from libp2p.relay.circuit_v2.protocol import CircuitV2Protocol
from libp2p.relay.circuit_v2.resources import RelayLimits
from libp2p.relay.circuit_v2.transport import CircuitV2Transport
from multiaddr import Multiaddr

from p2p.adapters.control.streams import finish
from p2p.domain.control_peers import public_key_of
from p2p.errors import ControlRefused, ControlUnreachable

_CIRCUIT_S = 3600
_CIRCUIT_BYTES = 64 << 20
_CIRCUITS_OF_ONE = 16
_LOOK_S = 2.0


class RelayRole(enum.Enum):
    """CLIENT uses relays; HOP is one as well."""

    CLIENT = "client"
    HOP = "hop"


class _Circuits(CircuitV2Protocol):  # type: ignore[misc]  # libp2p is skipped by the type checker: it may be missing
    """libp2p's protocol, with circuits kept apart.

    In 0.8.1 the end of a circuit closes the streams of the newest circuit to the same peer instead of its own: the new one breaks, the old
    one stays, and its place is never given back. And a read is not woken when its connection closes, so both are watched here.
    """

    def __init__(self, host: IHost, limits: RelayLimits, *, allow_hop: bool) -> None:
        super().__init__(host, limits, allow_hop=allow_hop)
        self._active_relays = _Forgetful()
        self._directions: dict[frozenset[int], list[trio.CancelScope]] = {}

    async def _relay_data(self, src_stream: INetStream, dst_stream: INetStream, *rest: Any) -> None:
        """Pass on one direction; its end ends the other."""
        ends = (src_stream, dst_stream)
        circuit = frozenset(map(id, ends))
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = trio.current_time() + _CIRCUIT_S
            self._directions.setdefault(circuit, []).append(nursery.cancel_scope)
            nursery.start_soon(_until_gone, ends, nursery.cancel_scope)
            try:
                await super()._relay_data(*ends, *rest)
            finally:
                for scope in self._directions.pop(circuit, []):
                    scope.cancel()
        for stream in ends:
            await finish(stream)


async def _until_gone(ends: tuple[INetStream, INetStream], scope: trio.CancelScope) -> None:
    while not any(stream.muxed_conn.is_closed for stream in ends):  # noqa: ASYNC110  # libp2p tells nobody
        await trio.sleep(_LOOK_S)
    scope.cancel()


class _Forgetful(dict[ID, Any]):
    """Where libp2p looks for what to close: nothing is kept."""

    def __setitem__(self, key: ID, value: Any) -> None:
        """Forget it."""


class Relay:
    """Reservations at relays, and circuits through them. Use from its trio thread only."""

    def __init__(self, host: IHost, role: RelayRole, most: int) -> None:
        limits = RelayLimits(duration=_CIRCUIT_S, data=_CIRCUIT_BYTES, max_circuit_conns=_CIRCUITS_OF_ONE, max_reservations=most)
        self._host = host
        self.keys: set[str] = set()
        self.protocol = _Circuits(host, limits, allow_hop=role is RelayRole.HOP)
        self.members: frozenset[str] | None = None
        self._transport = CircuitV2Transport(host, self.protocol, RelayConfig(roles=Role.STOP, limits=limits))

    async def open(self) -> None:
        """Wait until libp2p has its handlers in place, and let only members past ours. libp2p lets anybody reserve."""
        await self.protocol.event_started.wait()
        if self.protocol.allow_hop:
            self._host.set_stream_handler(HOP, self._serve)

    async def _serve(self, stream: INetStream) -> None:
        if not self._is_member(stream.muxed_conn.peer_id):
            await finish(stream)
            return
        await self.protocol._handle_hop_stream(stream)

    def _is_member(self, peer: ID) -> bool:
        try:
            return self.members is None or public_key_of(str(peer)) in self.members
        except ControlRefused:
            return False

    def known(self, reachable: Iterable[str]) -> list[str]:
        """Keys of the relays whose address is known."""
        return sorted(self.keys.intersection(reachable))

    async def reserve(self, relay: ID, nursery: trio.Nursery) -> None:
        """Let the relay pass circuits on to us; kept up in `nursery`. Raises ControlUnreachable."""
        stream = await self._host.new_stream(relay, [HOP])
        try:
            if not await self._transport.reserve(stream, relay, nursery):
                raise ControlUnreachable(f"relay {relay} gives no reservation: it is full, or not a relay")
        finally:
            await stream.close()

    async def dial(self, relay: ID, place: Multiaddr, peer: ID) -> None:
        """Connect to `peer` through the relay that listens at `place`. Raises ControlUnreachable."""
        try:
            await self._transport.dial(Multiaddr(f"{place}/p2p/{relay}/p2p-circuit/p2p/{peer}"))
        except (BaseLibp2pError, OSError) as error:
            raise ControlUnreachable(f"peer {peer} is not reachable through relay {relay}: {error}") from error
