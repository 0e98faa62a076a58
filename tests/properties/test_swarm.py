"""Whatever is lost, cut, corrupted or overtaken: everybody ends with everything or says why not, and no rule is broken on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.domain.swarm import Swarm
from p2p.domain.swarm_events import (
    Abort,
    Added,
    Advertise,
    Arrived,
    Cancel,
    Closed,
    Completed,
    Drop,
    Event,
    Failed,
    GiveUp,
    Instruction,
    Opened,
    Refuse,
    Request,
    Requested,
    Send,
    Sent,
    Tick,
)
from p2p.domain.swarm_limits import SwarmLimits
from simulator.swarm import Flow, Network, Node

PIECE = 50_000
LIMITS = SwarmLimits(no_progress_s=20.0)
PATIENT = SwarmLimits(no_progress_s=200.0)  # the slowest draw takes as long for one file


@dataclass(slots=True)
class Watched:
    """A policy under watch: breaks as soon as it answers what it must not."""

    policy: Swarm
    is_seeder: bool
    asked: set[tuple[str, int]] = field(default_factory=set)
    sending: set[tuple[str, int]] = field(default_factory=set)
    said: int = 0
    stories: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return self.policy.complete

    def next_deadline(self) -> float | None:
        return self.policy.next_deadline()

    def handle(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Closed() | Opened():
                self._forget(event.peer)
            case Arrived() | Failed():
                self.asked.discard((event.peer or "", event.piece))
            case Sent():
                self.sending.discard((event.peer, event.piece))
        out = self.policy.handle(event, now)
        for one in out:
            self._check(one)
        self._check_state()
        deadline = self.policy.next_deadline()
        assert deadline is None or deadline > now or not isinstance(event, Tick)
        return out

    def _check(self, one: Instruction) -> None:
        held = self.policy.held
        match one:
            case Request():
                assert (one.peer, one.piece) not in self.asked
                assert not held >> one.piece & 1
                self.asked.add((one.peer, one.piece))
                assert sum(peer == one.peer for peer, _ in self.asked) <= LIMITS.window
            case Cancel():
                self.asked.discard((one.peer, one.piece))
            case Send():
                assert held >> one.piece & 1
                assert (one.peer, one.piece) not in self.sending
                assert one.flag in {-1, 0, 1}
                self.sending.add((one.peer, one.piece))
                assert len(self.sending) <= LIMITS.uploads
            case Abort():
                assert (one.peer, one.piece) in self.sending
            case Advertise():
                assert not one.pieces & ~held
            case Drop():
                self._forget(one.peer)
            case GiveUp():
                assert "missing" in one.reason or "goes on" in one.reason
                self.stories.append(one.reason)

    def _check_state(self) -> None:
        board = self.policy._board
        assert not board.wanted & board.mine
        assert not board.wanted & sum(1 << piece for piece in board.asked)
        for peer in board.neighbours.values():
            assert 0 <= peer.window <= LIMITS.window
            assert len(peer.asks) <= LIMITS.window
            assert len(peer.waiting) <= LIMITS.window
            assert peer.waits == sum(1 << piece for piece in peer.waiting)
            assert not peer.unreported & ~board.known
        assert set(board.asked) == {piece for peer in board.neighbours.values() for piece in (*peer.asks, *peer.pushes)}
        assert self.policy._sender._active == len(self.sending)

    def _forget(self, peer: str) -> None:
        self.asked = {one for one in self.asked if one[0] != peer}
        self.sending = {one for one in self.sending if one[0] != peer}


class Lossy(Network):
    """Requests vanish, pieces come damaged or are refused, each with its own odds; members may be told of the row late."""

    def __init__(self, sizes: tuple[int, ...], rtt_s: float, rng: Random, odds: tuple[float, float, float]) -> None:
        super().__init__(sizes, rtt_s, rng, advert_delay_s=0.3)
        self._odds = odds
        self._chance = Random(rng.random())

    def _message(self, node: Node, peer: str, event: Event) -> None:
        if isinstance(event, Requested) and self._chance.random() < self._odds[0]:
            return
        super()._message(node, peer, event)

    def _arrive(self, flow: Flow) -> None:
        drawn = self._chance.random()
        if drawn < self._odds[1]:
            self._deliver(flow.source, flow.target, Failed(flow.source.name, flow.piece, "corrupt"))
        elif drawn < self._odds[1] + self._odds[2]:
            self._deliver(flow.source, flow.target, Failed(flow.source.name, flow.piece, "absent"))
        else:
            super()._arrive(flow)


def swarm(
    ups: list[int],
    pieces: int,
    batches: int,
    rtt_s: float,
    seed: int,
    odds: tuple[float, float, float],
    limits: SwarmLimits = LIMITS,
) -> Lossy:
    """The seeder and its peers, fully connected; the row becomes known in batches, a second apart and to each at another time."""
    rng = Random(seed)
    sizes = (PIECE,) * pieces
    network = Lossy(sizes, rtt_s, rng, odds)
    for number, up in enumerate(ups):
        policy = Swarm(uplink=up, now=0.0, rng=Random(rng.random()), is_seeder=number == 0, limits=limits)
        network.add(
            Node(f"n{number}", Watched(policy, number == 0), up, is_seeder=number == 0, advertised=up * rng.uniform(0.3, 3))
        )
    for a in network.nodes:
        for b in network.nodes:
            if a < b:
                network.connect(a, b)
    for node in network.nodes.values():
        reveal(network, node, sizes, batches, rng)
    return network


def reveal(network: Network, node: Node, sizes: tuple[int, ...], batches: int, rng: Random) -> None:
    each = -(-len(sizes) // batches)
    late = 0.0 if node.is_seeder else rng.uniform(0, 0.5)
    for number in range(batches):
        some = sizes[number * each : (number + 1) * each]
        network.at(number + late, partial(network.tell, node, Added(some, held=node.is_seeder)))
    network.at(batches - 1 + late, partial(network.tell, node, Completed()))


Fault = tuple[float, int, int, float]  # when, two members, for how long they are apart


def cut_and_heal(network: Network, fault: Fault) -> None:
    at, a, b, apart_s = fault
    one, two = f"n{a % len(network.nodes)}", f"n{b % len(network.nodes)}"
    if one == two:
        return
    network.at(at, partial(network.cut, one, two))
    network.at(at + apart_s, partial(network.connect, one, two))


UPS = st.lists(st.sampled_from([30_000, 100_000, 1_000_000]), min_size=2, max_size=5)
FAULTS = st.lists(st.tuples(st.floats(0, 8), st.integers(0, 9), st.integers(0, 9), st.floats(0.01, 6)), max_size=8)
CHANCE = st.sampled_from([0.0, 0.05, 0.3])
SLOW = [HealthCheck.too_slow]


def finish(network: Lossy, until: float = 3600.0) -> dict[str, Watched]:
    network.run(until)
    return {name: node.policy for name, node in network.nodes.items() if isinstance(node.policy, Watched)}


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(UPS, st.integers(1, 30), st.integers(1, 3), st.sampled_from([0.0, 0.05, 0.4]), st.integers(0, 999), FAULTS)
def test_everybody_ends_with_everything_once_links_heal(
    ups: list[int], pieces: int, batches: int, rtt_s: float, seed: int, faults: list[Fault]
) -> None:
    network = swarm(ups, pieces, batches, rtt_s, seed, (0.0, 0.0, 0.0), PATIENT)
    for fault in faults:
        cut_and_heal(network, fault)
    members = finish(network)
    assert {name: member.policy.complete for name, member in members.items()} == dict.fromkeys(members, True)
    assert not any(member.stories for member in members.values())


@settings(max_examples=100, deadline=None, suppress_health_check=SLOW)
@given(
    UPS, st.integers(1, 30), st.integers(1, 3), st.integers(0, 999), FAULTS, st.tuples(CHANCE, CHANCE, CHANCE), st.integers(0, 4)
)
def test_losses_lies_and_deaths_end_with_everything_or_a_reason(
    ups: list[int], pieces: int, batches: int, seed: int, faults: list[Fault], odds: tuple[float, float, float], deaths: int
) -> None:
    network = swarm(ups, pieces, batches, 0.05, seed, odds)
    for fault in faults:
        cut_and_heal(network, fault)
    for number in range(min(deaths, len(ups) - 1)):
        network.at(0.7 * (number + 1), partial(network.kill, f"n{number}", 1e9))
    members = finish(network)
    for name, member in members.items():
        assert member.policy.complete or network.nodes[name].died or member.stories or member.is_seeder


@settings(max_examples=200, deadline=None, suppress_health_check=SLOW)
@given(st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(-2, 9), st.floats(0, 2)), max_size=120), st.booleans())
def test_no_order_of_words_from_peers_breaks_a_rule(words: list[tuple[int, int, int, float]], is_seeder: bool) -> None:
    """Peers may say anything at any time; the driver's own reports stay true."""
    watched = Watched(Swarm(uplink=1e5, now=0.0, rng=Random(1), is_seeder=is_seeder, limits=LIMITS), is_seeder)
    watched.handle(Added((PIECE,) * 6, held=is_seeder), 0.0)
    now = 0.0
    for kind, who, piece, later in words:
        now += later
        for event in events(watched, kind, f"p{who}", max(piece, 0), piece):
            watched.handle(event, now)


def events(watched: Watched, kind: int, peer: str, piece: int, number: int) -> list[Event]:
    from p2p.domain import swarm_events as say

    is_open = peer in watched.policy._board.neighbours
    known = watched.policy._board.count
    arriving = [(who, what) for who, what in sorted(watched.asked) if who == peer]
    sending = sorted(watched.sending)
    saying: list[Callable[[], list[Event]]] = [
        lambda: [say.Opened(peer, number * 1e4, 0.05, number == 3)],
        lambda: [Closed(peer)],
        lambda: [say.Announced(peer, piece * 37, number, number * 1e5, number % 3 != 0)],
        lambda: [Requested(peer, piece)],
        lambda: [say.Cancelled(peer, piece)],
        lambda: [say.Began(peer, piece, number * 1000, number * 10.0)],
        lambda: [Arrived(*arriving[0], number % 3 - 1)] if arriving else [],
        lambda: [Failed(*arriving[0], "corrupt" if number % 2 else "absent")] if arriving else [],
        lambda: [Sent(*sending[0])] if sending else [],
        lambda: [say.Tick(), say.Uplink(1e5, number * 1e4), say.Downlink(number % 2 == 0)],
        lambda: [Arrived(None, piece)] if piece < known else [],
        lambda: [Added((PIECE,), held=watched.is_seeder)] if known < 9 and not watched.policy._board.closed else [Completed()],
    ]
    return [one for one in saying[kind]() if is_open or not isinstance(one, Refuse)]
