"""A swarm on a virtual clock: uplinks, downlinks, round trips and deaths around the policy objects that run in production.

Rates are max-min fair and change at once; there is no TCP, no loss and no header. A piece that ends at t is there at t + RTT/2;
a request or cancel takes RTT/2; an advert takes RTT/2 and up to `advert_delay_s` more. Whoever knows a transfer's bytes knows
how many of a piece that has begun are left.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import Random

from p2p.domain.swarm_events import (
    Abort,
    Advertise,
    Announced,
    Arrived,
    Began,
    Cancel,
    Cancelled,
    Closed,
    Downlink,
    Drop,
    Event,
    Failed,
    GiveUp,
    Instruction,
    Opened,
    Policy,
    Refuse,
    Request,
    Requested,
    Send,
    Sent,
    Tick,
    Uplink,
)

FILLED = 0.98  # of a link: from there on it counts as full
UPLOADS = 8


@dataclass(slots=True)
class Flow:
    """A piece on its way; `left` bytes at `since`."""

    source: Node
    target: Node
    piece: int
    flag: int
    left: float
    since: float
    rate: float = 0.0
    version: int = 0


@dataclass(slots=True)
class Node:
    """A member of the swarm. Rates in bytes a second."""

    name: str
    policy: Policy
    up: float
    down: float = inf
    is_seeder: bool = False
    advertised: float = 0.0  # uplink as the others are told
    alive: bool = True
    ticking: bool = False
    full: bool = False
    out: dict[tuple[str, int], Flow] = field(default_factory=dict)
    links: set[str] = field(default_factory=set)
    adverts: int = 0
    heard: dict[str, tuple[int, Announced]] = field(default_factory=dict)
    done_at: float | None = None
    sent_bytes: float = 0.0
    got: int = 0  # mask of pieces here
    wasted_bytes: float = 0.0  # arrived twice, or aborted on the way here
    died: bool = False
    gave_up: str | None = None


class Network:
    """The discrete-event loop. Add nodes, connect them, schedule faults, run."""

    def __init__(self, sizes: tuple[int, ...], rtt_s: float, rng: Random, advert_delay_s: float = 0.05) -> None:
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.events = 0
        self._sizes = sizes
        self._rtt_s = rtt_s
        self._rng = rng
        self._advert_delay_s = advert_delay_s
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._has_downlinks = False

    def add(self, node: Node) -> None:
        """A new member, without connections."""
        self.nodes[node.name] = node
        self._has_downlinks |= node.down < inf

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._heap, (time, next(self._order), action))

    def connect(self, a: str, b: str) -> None:
        """Open a connection, unless there is one or an end is dead; both ends are told at once."""
        one, two = self.nodes[a], self.nodes[b]
        if b in one.links or not (one.alive and two.alive):
            return
        one.links.add(b)
        two.links.add(a)
        self.tell(one, Opened(b, two.advertised, self._rtt_s, two.is_seeder))
        if b in one.links:  # not refused at once
            self.tell(two, Opened(a, one.advertised, self._rtt_s, one.is_seeder))

    def cut(self, a: str, b: str) -> None:
        """End a connection; both ends are told at once."""
        one, two = self.nodes[a], self.nodes[b]
        if b not in one.links:
            return
        one.links.discard(b)
        two.links.discard(a)
        for source, target in ((one, two), (two, one)):
            source.heard.pop(target.name, None)
            for flow in [flow for flow in source.out.values() if flow.target is target]:
                self._end(flow)
            self.tell(source, Closed(target.name))

    def kill(self, name: str, seen_after_s: float) -> None:
        """A member dies. What it sends is lost at once, what is sent to it stops; its neighbours learn of it later."""
        dead = self.nodes[name]
        dead.alive = False
        dead.died = True
        for flow in tuple(dead.out.values()):
            self._end(flow)
        for flow in self._incoming(dead):
            self._set_rate(flow, 0.0)
            self._share(flow.source)
            self.tell(flow.source, self._uplink(flow.source))
        for peer in [self.nodes[other] for other in sorted(dead.links)]:
            self.at(self.now + seen_after_s, partial(self._bury, peer, name))

    def run(self, until: float = 1e6) -> float:
        """Go on until every living node is complete or gave up; the time when the last one was."""
        while self._heap and not self._is_over():
            time, _, action = heapq.heappop(self._heap)
            if time > until:
                break
            self.now = time
            self.events += 1
            action()
        return max(inf if node.done_at is None else node.done_at for node in self.nodes.values() if not node.died)

    def tell(self, node: Node, event: Event) -> None:
        """Give a node an event and carry out what it answers."""
        if not node.alive:
            return
        if self._has_downlinks and node.out:
            self._perform(node, node.policy.handle(self._uplink(node), self.now))
        self._perform(node, node.policy.handle(event, self.now))
        while 0 < len(node.out) < UPLOADS:
            uplink = self._uplink(node)
            if uplink.used >= FILLED * uplink.rate:
                break
            before = len(node.out)
            self._perform(node, node.policy.handle(uplink, self.now))
            if len(node.out) == before:
                break
        self._schedule_tick(node)
        if node.done_at is None and node.policy.complete:
            node.done_at = self.now

    # --- instructions

    def _perform(self, node: Node, instructions: Iterable[Instruction]) -> None:
        for one in instructions:
            match one:
                case Send():
                    self._begin(node, one)
                case Abort():
                    self._abort(node, one)
                case Request():
                    self._message(node, one.peer, Requested(node.name, one.piece))
                case Cancel():
                    self._message(node, one.peer, Cancelled(node.name, one.piece))
                case Refuse():
                    self._message(node, one.peer, Failed(node.name, one.piece, "absent"))
                case Advertise():
                    self._advertise(node, one)
                case Drop():
                    self.cut(node.name, one.peer)
                    self.at(max(one.until, self.now), partial(self.connect, node.name, one.peer))
                case GiveUp():
                    node.gave_up = one.reason

    def _message(self, node: Node, peer: str, event: Event) -> None:
        target = self.nodes[peer]
        self.at(self.now + self._rtt_s / 2, lambda: self._deliver(node, target, event))

    def _deliver(self, node: Node, target: Node, event: Event) -> None:
        if node.name in target.links:
            self.tell(target, event)

    def _advertise(self, node: Node, advert: Advertise) -> None:
        node.adverts += 1
        number = node.adverts
        event = Announced(node.name, advert.pieces, advert.queue, node.advertised, advert.serves)
        arrival = self.now + self._rtt_s / 2 + self._rng.uniform(0, self._advert_delay_s)
        targets = [self.nodes[peer] for peer in advert.peers]
        self.at(arrival, lambda: self._announce(node, targets, number, event))

    def _announce(self, node: Node, targets: list[Node], number: int, event: Announced) -> None:
        for target in targets:
            self._hear(node, target, number, event)

    def _hear(self, node: Node, target: Node, number: int, event: Announced) -> None:
        """Adverts may overtake each other: pieces add up, the rest is believed of the newest."""
        if node.name not in target.links:
            return
        newest, last = target.heard.get(node.name, (0, event))
        if newest > number:
            event = Announced(event.peer, event.pieces, last.queue, event.uplink, last.serves)
        else:
            target.heard[node.name] = (number, event)
        self.tell(target, event)

    # --- flows

    def _begin(self, node: Node, send: Send) -> None:
        target = self.nodes[send.peer]
        flow = Flow(node, target, send.piece, send.flag, self._sizes[send.piece], self.now)
        node.out[send.peer, send.piece] = flow
        self._share(node)
        self.at(self.now + self._rtt_s / 2, lambda: self._show(flow))

    def _show(self, flow: Flow) -> None:
        """The receiver sees how far a piece is."""
        if flow.rate and flow.source.name in flow.target.links:
            left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
            self.tell(flow.target, Began(flow.source.name, flow.piece, int(left), flow.rate))

    def _finish(self, flow: Flow, version: int) -> None:
        if flow.version != version:
            return
        size = self._sizes[flow.piece]
        flow.left, flow.since = 0.0, self.now
        flow.source.sent_bytes += size
        self._remove(flow)
        self.at(self.now + self._rtt_s / 2, lambda: self._arrive(flow))
        self.tell(flow.source, Sent(flow.target.name, flow.piece))

    def _arrive(self, flow: Flow) -> None:
        target = flow.target
        if flow.source.name not in target.links or not target.alive:
            return
        if target.got >> flow.piece & 1:
            target.wasted_bytes += self._sizes[flow.piece]
        target.got |= 1 << flow.piece
        self.tell(target, Arrived(flow.source.name, flow.piece, flow.flag))

    def _abort(self, node: Node, abort: Abort) -> None:
        flow = node.out.get((abort.peer, abort.piece))
        if flow is not None:
            self._end(flow)
            self.tell(node, Sent(abort.peer, abort.piece))

    def _end(self, flow: Flow) -> None:
        """A piece ends before its last byte."""
        left = flow.left - flow.rate * (self.now - flow.since)
        flow.source.sent_bytes += self._sizes[flow.piece] - left
        flow.target.wasted_bytes += self._sizes[flow.piece] - left
        self._remove(flow)

    def _remove(self, flow: Flow) -> None:
        flow.version = -1
        flow.rate = 0.0
        del flow.source.out[flow.target.name, flow.piece]
        self._share(flow.source)

    def _share(self, node: Node) -> None:
        """Rates after flows of `node` began or ended."""
        if not self._has_downlinks:
            moving = [flow for flow in node.out.values() if flow.target.alive]
            for flow in moving:
                self._set_rate(flow, node.up / len(moving))
            return
        flows = [flow for other in self.nodes.values() for flow in other.out.values() if flow.target.alive]
        for flow, rate in zip(flows, max_min(flows), strict=True):
            self._set_rate(flow, rate)
        for other in self.nodes.values():
            if other.down < inf:
                self._tell_downlink(other)

    def _set_rate(self, flow: Flow, rate: float) -> None:
        if rate == flow.rate:
            return
        flow.left = max(0.0, flow.left - flow.rate * (self.now - flow.since))
        shown = flow.rate > 0
        flow.since, flow.rate = self.now, rate
        flow.version += 1
        version = flow.version
        if rate == 0.0:
            return
        self.at(self.now + flow.left / rate, lambda: self._finish(flow, version))
        if shown:
            self.at(self.now + self._rtt_s / 2, lambda: self._show(flow))

    def _tell_downlink(self, node: Node) -> None:
        full = sum(flow.rate for flow in self._incoming(node)) >= FILLED * node.down
        if full != node.full:
            node.full = full
            self.at(self.now, lambda: self.tell(node, Downlink(node.full)))

    def _incoming(self, node: Node) -> list[Flow]:
        return [flow for other in self.nodes.values() for flow in other.out.values() if flow.target is node]

    def _uplink(self, node: Node) -> Uplink:
        return Uplink(node.up, sum(flow.rate for flow in node.out.values()))

    # --- time and death

    def _schedule_tick(self, node: Node) -> None:
        due = node.policy.next_deadline()
        if node.ticking or due is None:
            return
        node.ticking = True
        self.at(max(due, self.now), lambda: self._tick(node))

    def _tick(self, node: Node) -> None:
        node.ticking = False
        self.tell(node, Tick())

    def _bury(self, peer: Node, name: str) -> None:
        if name not in peer.links:
            return
        peer.links.discard(name)
        for flow in [flow for flow in peer.out.values() if flow.target.name == name]:
            self._end(flow)
        self.tell(peer, Closed(name))

    def _is_over(self) -> bool:
        return all(node.done_at is not None or node.gave_up or node.died for node in self.nodes.values())


def max_min(flows: list[Flow]) -> list[float]:
    """Max-min fair rates: all grow alike until a link is full; its flows stay, the others grow on."""
    rates = [0.0] * len(flows)
    free: dict[tuple[str, str], float] = {}
    users: dict[tuple[str, str], set[int]] = {}
    for i, flow in enumerate(flows):
        for link, rate in ((("up", flow.source.name), flow.source.up), (("down", flow.target.name), flow.target.down)):
            free[link] = rate
            users.setdefault(link, set()).add(i)
    while any(users.values()):
        share, tightest = min((free[link] / len(members), link) for link, members in users.items() if members)
        for i in tuple(users[tightest]):
            rates[i] = share
            for link in (("up", flows[i].source.name), ("down", flows[i].target.name)):
                free[link] -= share
                users[link].discard(i)
    return rates
