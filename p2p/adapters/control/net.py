"""`ControlNet`: the control plane over libp2p, for a program that runs on asyncio.

libp2p runs on trio, so it gets a thread and a loop of its own: the two cross with bytes and keys only, never with a stream or a task. The
thread may die of anything; then calls raise ControlDown, it starts again after a wait, and what was subscribed, handled and published is
set up anew. Nothing else is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

from p2p.adapters.control import stack
from p2p.adapters.control.ports import Handler, Receiver, Validator
from p2p.domain.control import MAX_SLOTS, MAX_TOPICS, Retry
from p2p.domain.control_frames import check_size
from p2p.domain.control_peers import ControlAddress, peer_id_of
from p2p.errors import ControlDown, ControlError, ControlRefused

if TYPE_CHECKING:
    from p2p.adapters.control.running import Running

_START_S = 30.0
_STOP_S = 10.0
_STUCK_S = 15.0
_HEALTHY_S = 60.0  # a life this long starts the back-off over
_GRACE_S = 5.0  # for a deadline that the trio side keeps to be reported
_UNDELIVERED = 1024


@dataclass(frozen=True, slots=True)
class ControlConfig:
    """How a ControlNet runs.

    Attributes:
        key: The Ed25519 private key, 32 bytes: the worker's identity.
        listen: Host and port to listen on, port 0 for any; None behind NAT.
        is_relay: Whether others may be reached through this node.
        relays: Keys of the nodes to be reachable through; their addresses must be known too.
        allowed_networks: CIDRs that may be dialled though they are not public.
        denied_networks: CIDRs that are neither dialled nor accepted.
        connections: Accepted connections at once.
        connections_per_ip: The same from one IPv4 address, or one IPv6 network of 64 bits.
    """

    key: bytes = field(repr=False)
    listen: tuple[str, int] | None = None
    is_relay: bool = False
    relays: tuple[str, ...] = ()
    allowed_networks: tuple[str, ...] = ()
    denied_networks: tuple[str, ...] = ()
    connections: int = 256
    connections_per_ip: int = 8


@dataclass(slots=True)
class _Setup:
    """What a node that starts again is given again."""

    handlers: dict[str, Handler] = field(default_factory=dict)
    topics: dict[str, tuple[Receiver, Validator]] = field(default_factory=dict)
    values: dict[tuple[str, str], bytes] = field(default_factory=dict)
    addresses: dict[str, ControlAddress] = field(default_factory=dict)
    relays: set[str] = field(default_factory=set)
    neighbours: frozenset[str] = frozenset()
    networks: frozenset[str] = frozenset()
    members: frozenset[str] | None = None

    def put(self, topic: str, slot: str, payload: bytes) -> None:
        """Keep a value, within what one node publishes. Raises ControlRefused."""
        if len({place[0] for place in self.values} | {topic}) > MAX_TOPICS:
            raise ControlRefused(f"{MAX_TOPICS} topics are published already: retract one before {topic}")
        self.values.pop((topic, slot), None)
        self.values[topic, slot] = payload
        slots = [place for place in self.values if place[0] == topic]
        if len(slots) > MAX_SLOTS:
            del self.values[slots[0]]


class ControlNet:
    """The control plane over libp2p: noise over TCP, gossipsub, circuit relays. One for each process."""

    def __init__(self, config: ControlConfig) -> None:
        self._config = config
        self._setup = _Setup()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._running: Running | None = None
        self._listen = config.listen
        self._addresses: list[tuple[str, int]] = []
        self._started: Future[None] = Future()
        self._last_error = "it was not started"
        self._undelivered = 0

    @property
    def is_alive(self) -> bool:
        """Whether the trio thread runs and its loop turns."""
        running = self._running
        return running is not None and time.monotonic() - running.beat_at < _STUCK_S

    @property
    def is_usable(self) -> bool:
        """Alive, and connected to some neighbour if it has any."""
        running = self._running
        return running is not None and self.is_alive and (not self._setup.neighbours or running.connections > 0)

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where it listens; the port stays the same when it starts again."""
        return list(self._addresses)

    async def start(self) -> None:
        """Load libp2p, start the thread. Raises ControlMissing, or ControlDown: then it goes on trying until closed."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(stack.load)
        self._thread = threading.Thread(target=self._keep_running, name="echo2-control", daemon=True)
        self._thread.start()
        try:
            async with asyncio.timeout(_START_S):
                await asyncio.wrap_future(self._started)
        except (TimeoutError, ControlError) as error:
            raise ControlDown(f"the control network does not start: {error or 'no sign of life'}") from error

    async def close(self) -> None:
        """Stop the thread and wait for it, a few seconds at most."""
        self._stop.set()
        running = self._running
        if running is not None:
            running.end()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _STOP_S)

    async def request(self, peer: str, protocol: str, payload: bytes, *, timeout_s: float) -> bytes:
        """The answer of `peer` (public key, hex). Raises ControlRefused, ControlTimeout, ControlUnreachable, ControlDown."""
        check_size(f"the request for {protocol}", payload)
        peer_id_of(peer)
        running = self._up()
        return await running.call(lambda: running.node.request(peer, protocol, payload, timeout_s), timeout_s + _GRACE_S)

    def handle(self, protocol: str, handler: Handler) -> None:
        """Answer requests of this protocol; the handler runs on the loop that called `start`."""
        self._setup.handlers[protocol] = handler
        self._tell(lambda running: running.node.answer(protocol, self._on_loop(running, handler)))

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None:
        """Make `payload` our value of the slot. Raises ControlRefused; while the thread is down the value waits for it."""
        check_size(f"the value for {topic}", payload)
        self._setup.put(topic, slot, payload)
        self._tell(lambda running: running.node.gossip.publish(topic, slot, payload))

    async def retract(self, topic: str) -> None:
        """Stop repeating our values of the topic."""
        for place in [place for place in self._setup.values if place[0] == topic]:
            del self._setup.values[place]
        self._tell(lambda running: running.node.gossip.retract(topic))

    def subscribe(self, topic: str, receive: Receiver, *, validate: Validator) -> None:
        """Deliver the topic's values; `validate` runs in the network's thread, before anything is passed on."""
        self._setup.topics[topic] = (receive, validate)
        self._tell(lambda running: running.spawn(lambda: self._settle(running, topic)))

    def unsubscribe(self, topic: str) -> None:
        """Deliver and pass on nothing of the topic any more."""
        self._setup.topics.pop(topic, None)
        self._tell(lambda running: running.spawn(lambda: self._settle(running, topic)))

    def allow(self, networks: frozenset[str]) -> None:
        """Dial in these private networks (CIDR) too, besides those of the config; replaces what was allowed before."""
        self._setup.networks = networks
        self._tell(lambda running: running.node.allow(networks))

    def use_relay(self, key: str) -> None:
        """Reach peers without an address of their own through this one; its address must be known too."""
        self._setup.relays.add(key)
        self._tell(lambda running: running.node.use_relay(key))

    def know(self, address: ControlAddress) -> None:
        """Remember where a peer listens."""
        self._setup.addresses[address.key] = address
        self._tell(lambda running: running.node.know(address))

    def set_neighbours(self, keys: frozenset[str]) -> None:
        """Keep connections to these peers: gossip travels along them."""
        self._setup.neighbours = keys
        self._tell(lambda running: running.node.set_neighbours(keys))

    def set_members(self, keys: frozenset[str] | None) -> None:
        """Answer, hear and relay for these peers only; None: for everybody."""
        self._setup.members = keys
        self._tell(self._set_members)

    def _up(self) -> Running:
        running = self._running
        if running is None or not self.is_alive:
            raise ControlDown(f"the control network is down: {self._last_error}")
        return running

    def _tell(self, act: Callable[[Running], object]) -> None:
        """Do something in the trio thread if it runs; what it must not forget is in the setup."""
        running = self._running
        if running is not None:
            running.soon(lambda: act(running))

    def _keep_running(self) -> None:
        """The thread: run trio until stopped, again after a wait when it dies."""
        import trio

        retry = Retry(first_s=1.0, most_s=60.0, rng=Random())  # noqa: S311  # spreads restarts, guards nothing
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                trio.run(self._live)
            except BaseException as error:  # whatever it was, the program goes on without libp2p
                self._last_error = f"its thread died of {_innermost(error)!r}"
            self._take_down()
            if time.monotonic() - began > _HEALTHY_S:
                retry.succeeded()
            self._stop.wait(retry.failed(time.monotonic()))

    async def _live(self) -> None:
        """One life of the node, in the trio thread."""
        import trio

        from p2p.adapters.control.node import Limits, NodeConfig, RelayRole, open_node
        from p2p.adapters.control.running import Running

        config = self._config
        limits = Limits(config.allowed_networks, config.denied_networks, config.connections, config.connections_per_ip)
        role = RelayRole.HOP if config.is_relay else RelayRole.CLIENT
        async with open_node(config.key, NodeConfig(self._listen, limits, role)) as node, trio.open_nursery() as nursery:
            running = Running(node, nursery)
            self._running = running
            await self._set_up(running)
            nursery.start_soon(node.keep_reserved, config.relays)
            if not self._started.done():
                self._started.set_result(None)
            if self._stop.is_set():
                running.end()
            await running.beat()

    async def _set_up(self, running: Running) -> None:
        """Give a new node what the one before had. Calls that come meanwhile reach it too: all of this may be done twice."""
        node, setup = running.node, self._setup
        self._addresses = node.addresses()
        if self._listen is not None:
            self._listen = (self._listen[0], self._addresses[0][1])
        self._set_members(running)
        node.allow(setup.networks)
        for address in list(setup.addresses.values()):
            node.know(address)
        for relay in (*self._config.relays, *list(setup.relays)):
            node.use_relay(relay)
        node.set_neighbours(setup.neighbours)
        for protocol, handler in list(setup.handlers.items()):
            node.answer(protocol, self._on_loop(running, handler))
        for topic in list(setup.topics):
            await self._settle(running, topic)
        for (topic, slot), payload in list(setup.values.items()):
            node.gossip.publish(topic, slot, payload)

    async def _settle(self, running: Running, topic: str) -> None:
        """Be subscribed to the topic or not, as the setup says when it is this call's turn."""
        gossip = running.node.gossip
        async with gossip.turn:
            wanted = self._setup.topics.get(topic)
            if wanted is None:
                await gossip.unsubscribe(topic)
            else:
                await gossip.subscribe(topic, self._deliver(wanted[0]), wanted[1])

    def _set_members(self, running: Running) -> None:
        running.node.set_members(self._setup.members)

    def _take_down(self) -> None:
        running, self._running = self._running, None
        reason = self._last_error or "it was closed"
        if running is not None:
            running.fail_all(ControlDown(f"the control network went down: {reason}"))
        if not self._started.done():
            self._started.set_exception(ControlDown(reason))

    def _on_loop(self, running: Running, handler: Handler) -> Callable[[str, bytes], Awaitable[bytes]]:
        async def answer(key: str, payload: bytes) -> bytes:
            assert self._loop is not None
            return await running.ask_loop(self._loop, handler(key, payload))

        return answer

    def _deliver(self, receive: Receiver) -> Callable[[str, bytes], None]:
        def arrived(key: str, payload: bytes) -> None:
            self._undelivered -= 1
            receive(key, payload)

        def deliver(key: str, payload: bytes) -> None:
            if self._undelivered >= _UNDELIVERED or self._loop is None:
                return  # the loop is stuck; values are repeated
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(arrived, key, payload)
                self._undelivered += 1

        return deliver


def _innermost(error: BaseException) -> BaseException:
    """The first error inside trio's groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
