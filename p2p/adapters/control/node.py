"""The libp2p side of the control network: lives in one trio thread, speaks in keys and bytes.

Noise only and TCP only, on listener and dialler alike: what libp2p 0.8.1 offers by default includes unauthenticated plaintext, under which
anybody who knows a peer's public key is taken for it. Identify, ping and gossipsub are libp2p's; requests are `streams.py`; addresses and
numbers of connections are `guard.py`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from random import Random

import trio
from libp2p import new_host
from libp2p.abc import IHost, INetStream
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as new_x25519_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.config import ConnectionConfig
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.rcmgr.manager import ResourceLimits, ResourceManager
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from p2p.adapters.control import streams
from p2p.adapters.control.guard import Guard, GuardedTCP, Limits
from p2p.adapters.control.pubsub import Gossip
from p2p.adapters.control.relay import Relay, RelayRole
from p2p.domain.control import Retry
from p2p.domain.control_frames import answer, printable, refusal
from p2p.domain.control_peers import ControlAddress, peer_id_of, public_key_of
from p2p.errors import ControlError, ControlTimeout, ControlUnreachable

__all__ = ["Limits", "Node", "NodeConfig", "RelayRole", "open_node"]

ANSWER_S = 30.0  # for a handler here to answer
READ_S = 10.0  # for an asker to send its whole request
_ASKED_AT_ONCE = 32  # requests of ours in flight, all peers together
_ASKED_OF_ONE = 8
_ANSWERED_AT_ONCE = 64
_ANSWERED_TO_ONE = 8
_STREAMS_OF_ONE = 64
_NEGOTIATE_S = 5
_DIAL_S = 8.0
_STRIKES = 2  # requests in a row without an answer, after which the connection is taken for dead
_NEIGHBOUR_TICK_S = 0.5
_RESERVED_S = 1200.0
_CIRCUIT_IDLE_S = 60.0

Answerer = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """How one node runs. `listen` is None for a node behind NAT; port 0 takes any. `relay`: what it does with circuit relays."""

    listen: tuple[str, int] | None
    limits: Limits
    relay: RelayRole = RelayRole.CLIENT


@contextlib.asynccontextmanager
async def open_node(key: bytes, config: NodeConfig) -> AsyncIterator[Node]:
    """A running node with the Ed25519 private key `key` (32 bytes, as in the worker's identity)."""
    guard = Guard(config.limits)
    transport = GuardedTCP(guard)
    host = _host(key, config.limits, transport)
    listen = [_multiaddr(*config.listen)] if config.listen else []
    async with contextlib.AsyncExitStack() as last:
        last.callback(transport.close_sockets)
        await last.enter_async_context(host.run(listen))
        if config.listen and not host.get_transport_addrs():
            raise ControlUnreachable(f"no listener on {config.listen[0]} port {config.listen[1]}: the port is taken or forbidden")
        gossip = Gossip(host)
        relay = Relay(host, config.relay, config.limits.connections)
        async with (
            background_trio_service(gossip.router),
            background_trio_service(gossip.pubsub),
            background_trio_service(relay.protocol),
            trio.open_nursery() as nursery,
        ):
            await gossip.pubsub.wait_until_ready()
            await relay.open()
            node = Node(host, guard, gossip, relay, nursery)
            nursery.start_soon(node.keep_neighbours)
            nursery.start_soon(gossip.publish_due)
            try:
                yield node
            finally:
                nursery.cancel_scope.cancel()


class Node:
    """A host with its neighbours, requests and gossip. Use from its trio thread only."""

    def __init__(self, host: IHost, guard: Guard, gossip: Gossip, relay: Relay, nursery: trio.Nursery) -> None:
        self._host = host
        self._guard = guard
        self._swarm = host.get_network()
        assert isinstance(self._swarm, Swarm)
        self._swarm.retry_config.max_retries = 0  # when to try again is decided here
        self._nursery = nursery
        self._relay = relay
        self.gossip = gossip
        self._members: frozenset[str] | None = None
        self._addresses: dict[str, ControlAddress] = {}
        self._neighbours: dict[str, Retry] = {}
        self._relayed: dict[str, float] = {}  # peers reached through a relay, and when they were last asked
        self._connecting: dict[str, trio.Lock] = {}
        self._asking = trio.Semaphore(_ASKED_AT_ONCE)
        self._asking_one: dict[str, trio.Semaphore] = {}
        self._answering: dict[str, int] = {}
        self._strikes: dict[str, int] = {}

    def set_members(self, keys: frozenset[str] | None) -> None:
        """Answer, hear and relay for these peers only; None: for everybody."""
        self._members = self.gossip.members = self._relay.members = keys

    def addresses(self) -> list[tuple[str, int]]:
        """Where this node listens."""
        return [
            (
                str(address.value_for_protocol("ip6" if "/ip6/" in str(address) else "ip4")),
                int(address.value_for_protocol("tcp") or 0),
            )
            for address in self._host.get_transport_addrs()
        ]

    def connected(self) -> list[str]:
        """Keys of the peers with a live connection."""
        keys = (_key(peer) for peer in list(self._swarm.get_connections_map()) if self._is_connected(peer))
        return [key for key in keys if key is not None]

    def know(self, address: ControlAddress) -> None:
        """Remember where a peer listens."""
        self._addresses[address.key] = address

    def allow(self, networks: frozenset[str]) -> None:
        """Private networks (CIDR) that may be dialled, besides those of the limits."""
        self._guard.allow(networks)

    def set_neighbours(self, keys: frozenset[str]) -> None:
        """Keep connections to these peers, as far as their addresses are known."""
        self._neighbours = {key: self._neighbours.get(key) or Retry(first_s=0.5, most_s=60.0, rng=Random()) for key in keys}  # noqa: S311

    async def request(self, key: str, protocol: str, payload: bytes, timeout_s: float) -> bytes:
        """The peer's answer. Raises ControlRefused, ControlTimeout, ControlUnreachable."""
        at = _Stage()
        scope = trio.CancelScope(deadline=trio.current_time() + timeout_s)
        with scope:
            async with self._asking, self._asking_one.setdefault(key, trio.Semaphore(_ASKED_OF_ONE)):
                try:
                    return await self._ask(key, protocol, payload, at)
                except trio.Cancelled:
                    await self._cut_off(key, at)
                    raise
                except (BaseLibp2pError, OSError) as error:
                    raise ControlUnreachable(f"peer {key[:16]}... does not take {protocol}: {_cause(error)}") from error
        raise ControlTimeout(f"peer {key[:16]}... gave no answer to {protocol} within {timeout_s:g} s (while {at.doing})")

    def answer(self, protocol: str, answerer: Answerer) -> None:
        """Answer requests of this protocol."""

        async def serve(stream: INetStream) -> None:
            key = _key(stream.muxed_conn.peer_id)
            if key is None or not self._begin_answer(key):
                await streams.finish(stream)
                return
            try:
                await _answer(stream, key, answerer)
            except Exception:  # whatever one stranger brings about must not end the node
                await streams.finish(stream)
            finally:
                self._end_answer(key)

        self._host.set_stream_handler(TProtocol(protocol), serve)

    async def keep_reserved(self, relays: tuple[str, ...]) -> None:
        """Be reachable through each of these relays, for ever: reserve anew when the connection is another one, and now and then."""
        retries = {key: Retry(first_s=1.0, most_s=60.0, rng=Random()) for key in relays}  # noqa: S311
        held: dict[str, tuple[object, float]] = {}
        while relays:
            for key, retry in retries.items():
                connection, at = held.get(key, (None, 0.0))
                is_held = connection in self._swarm.get_connections(_peer(key)) and time.monotonic() - at < _RESERVED_S
                if not is_held and key in self._addresses and retry.is_due(time.monotonic()):
                    retry.failed(time.monotonic())
                    with trio.move_on_after(_DIAL_S), contextlib.suppress(ControlError, BaseLibp2pError, OSError):
                        await self._connect(key)
                        await self._relay.reserve(_peer(key), self._nursery)
                        held[key] = (self._swarm.get_connections(_peer(key))[0], time.monotonic())
                        retry.succeeded()
            await trio.sleep(_NEIGHBOUR_TICK_S)

    async def keep_neighbours(self) -> None:
        """Dial neighbours that are not connected, each with its own back-off."""
        while True:
            now = time.monotonic()
            for key, retry in list(self._neighbours.items()):
                if key in self._addresses and retry.is_due(now) and not self._is_connected(_peer(key)):
                    retry.failed(now)
                    self._nursery.start_soon(self._dial_neighbour, key, retry)
            await self._drop_floods()
            await self._drop_idle_circuits()
            await trio.sleep(_NEIGHBOUR_TICK_S)

    async def _drop_idle_circuits(self) -> None:
        """Give up connections through relays that were not used for a while: a node behind one takes few."""
        now = time.monotonic()
        for key in [key for key, used_at in self._relayed.items() if now - used_at > _CIRCUIT_IDLE_S]:
            del self._relayed[key]
            with streams.shielded(_DIAL_S):
                await self._swarm.close_peer(_peer(key))

    async def _drop_floods(self) -> None:
        """Close connections on which a peer keeps more streams open than any use of ours needs: libp2p bounds them by the host only."""
        for peer, connections in list(self._swarm.get_connections_map().items()):
            if any(len(connection.get_streams()) > _STREAMS_OF_ONE for connection in connections):
                with streams.shielded(_DIAL_S):
                    await self._swarm.close_peer(peer)

    async def _dial_neighbour(self, key: str, retry: Retry) -> None:
        with trio.move_on_after(_DIAL_S), contextlib.suppress(ControlError, BaseLibp2pError, OSError):
            await self._connect(key)
            retry.succeeded()

    async def _connect(self, key: str) -> None:
        """Have a connection to the peer: the one there is, or one made now. Whoever comes meanwhile waits for the same one."""
        lock = self._connecting.setdefault(key, trio.Lock())
        try:
            async with lock:
                if key in self._relayed:
                    self._relayed[key] = time.monotonic()
                if self._is_connected(_peer(key)):
                    return
                address = self._addresses.get(key)
                if address is None:
                    await self._connect_relayed(key)
                    self._relayed[key] = time.monotonic()
                else:
                    await self._dial(address)
        finally:
            if not lock.locked():
                self._connecting.pop(key, None)

    async def _dial(self, address: ControlAddress) -> None:
        key, peer = address.key, _peer(address.key)
        if reason := self._guard.refuse_dial(address.host, address.port):
            raise ControlUnreachable(f"peer {key[:16]}... is not dialled: {reason}")
        self._swarm.unblock_peer(peer)  # libp2p would not dial for a minute after a failure; the wait is ours to choose
        store = self._host.get_peerstore()
        store.clear_addrs(peer)  # what it told of itself does not count
        try:
            await self._host.connect(PeerInfo(peer, [_multiaddr(address.host, address.port)]))
        except (BaseLibp2pError, OSError) as error:
            raise ControlUnreachable(f"peer {key[:16]}... at {address.host} port {address.port}: {_cause(error)}") from error

    async def _connect_relayed(self, key: str) -> None:
        """Reach the peer through any relay that we are connected to."""
        error: ControlError = ControlUnreachable(f"peer {key[:16]}... has no known address and no relay is connected")
        for relay in self._relay.known(self._addresses.keys()):
            try:
                await self._connect(relay)
                await self._relay.dial(
                    _peer(relay), _multiaddr(self._addresses[relay].host, self._addresses[relay].port), _peer(key)
                )
                return
            except ControlError as failed:
                error = failed
        raise error

    def use_relay(self, key: str) -> None:
        """Peers without an address of their own may be reached through this one."""
        self._relay.keys.add(key)

    async def _ask(self, key: str, protocol: str, payload: bytes, at: _Stage) -> bytes:
        at.doing = "connecting"
        await self._connect(key)
        at.doing = "opening a stream"
        stream = await self._host.new_stream(_peer(key), [TProtocol(protocol)])
        at.doing = "waiting for the answer"
        body = await streams.ask(stream, payload)
        self._strikes.pop(key, None)
        return body

    async def _cut_off(self, key: str, at: _Stage) -> None:
        """A request cancelled where it may have written half a frame spoils the connection; a silent peer loses it after some strikes."""
        self._strikes[key] = self._strikes.get(key, 0) + 1
        if at.doing == "opening a stream" or self._strikes[key] >= _STRIKES:
            self._strikes.pop(key, None)
            with streams.shielded(_DIAL_S):
                await self._swarm.close_peer(_peer(key))

    def _begin_answer(self, key: str) -> bool:
        if self._members is not None and key not in self._members:
            return False
        if sum(self._answering.values()) >= _ANSWERED_AT_ONCE or self._answering.get(key, 0) >= _ANSWERED_TO_ONE:
            return False
        self._answering[key] = self._answering.get(key, 0) + 1
        return True

    def _end_answer(self, key: str) -> None:
        self._answering[key] -= 1
        if not self._answering[key]:
            del self._answering[key]

    def _is_connected(self, peer: ID) -> bool:
        return any(not connection.is_closed for connection in self._swarm.get_connections(peer))


@dataclass(slots=True)
class _Stage:
    """How far a request got."""

    doing: str = "waiting for its turn"


async def _answer(stream: INetStream, key: str, answerer: Answerer) -> None:
    """Read a request, write its answer. Raises trio.TooSlowError, and whatever a broken stream raises."""
    with trio.fail_after(READ_S):
        payload = await streams.read_frame(stream)
    with trio.fail_after(ANSWER_S):
        reply = await _reply(answerer, key, payload)
    await streams.write(stream, reply)
    await streams.close_after(stream)


async def _reply(answerer: Answerer, key: str, payload: bytes) -> bytes:
    try:
        return answer(await answerer(key, payload))
    except ControlError as error:
        return refusal(str(error))


def _host(key: bytes, limits: Limits, transport: GuardedTCP) -> IHost:
    private = Ed25519PrivateKey.from_bytes(key)
    pair = KeyPair(private, private.get_public_key())
    most = limits.connections
    return new_host(
        key_pair=pair,
        sec_opt={NOISE: NoiseTransport(pair, noise_privkey=new_x25519_pair().private_key)},
        muxer_opt={TProtocol(YAMUX): Yamux},
        transports=[transport],
        connection_config=ConnectionConfig(
            max_connections=2 * most,
            min_connections=0,
            low_watermark=0,  # never dials by itself
            high_watermark=2 * most,
            max_connections_per_peer=2,
            inbound_stream_protocol_negotiation_timeout=_NEGOTIATE_S,
            deny_list=list(limits.denied_networks),
        ),
        resource_manager=ResourceManager(
            ResourceLimits(max_connections=2 * most, max_memory_mb=256, max_streams=64 * most), enable_rate_limiting=False
        ),
        negotiate_timeout=_NEGOTIATE_S,
        disable_identify_address_discovery=True,
    )


def _peer(key: str) -> ID:
    return ID.from_base58(peer_id_of(key))


def _key(peer: ID) -> str | None:
    """The public key in a peer id; None for a stranger with another kind of key."""
    try:
        return public_key_of(str(peer))
    except ControlError:
        return None


def _multiaddr(host: str, port: int) -> Multiaddr:
    return Multiaddr(f"/{'ip6' if ':' in host else 'ip4'}/{host}/tcp/{port}")


def _cause(error: BaseException) -> str:
    """The innermost words: libp2p wraps them several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    return printable(str(error))
