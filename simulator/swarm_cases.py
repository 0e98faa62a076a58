"""The swarm's table: cases, the times of the last peer against the fluid bound, and what they were measured at before."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import exp, inf
from random import Random

from coordinator.domain.neighbours import Member, neighbours, takes_from_seeder
from p2p.domain.fluid import fluid_bound
from p2p.domain.swarm import Swarm
from p2p.domain.swarm_events import Added, Completed, Policy
from p2p.domain.swarm_limits import SwarmLimits
from simulator.swarm import FILLED, Network, Node

MBIT = 1e6 / 8
LIMITS = replace(SwarmLimits(), filled=FILLED)


@dataclass(frozen=True, slots=True)
class Case:
    """Rates in Mbit/s, the seeder's first; `downs` without the seeder, empty for no limit."""

    ups: tuple[float, ...]
    downs: tuple[float, ...] = ()
    size: int = 50_000_000
    piece: int = 128 << 10
    rtt_s: float = 0.0
    neighbours: int = 16


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a case came to."""

    bound_s: float
    last_s: float
    seeder_copies: float
    wasted: float  # bytes that came twice or were aborted, per byte delivered
    gave_up: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Time of the last peer to the fluid bound."""
        return self.last_s / self.bound_s


MakePolicy = Callable[[int, Case, Random], Policy]


def swarm_policy(number: int, case: Case, rng: Random) -> Policy:
    """The rule; member 0 is the seeder."""
    return Swarm(uplink=case.ups[number] * MBIT, now=0.0, rng=rng, is_seeder=number == 0, limits=LIMITS)


def cut(size: int, piece: int) -> tuple[int, ...]:
    """Sizes of the pieces of a file."""
    whole, rest = divmod(size, piece)
    return (piece,) * whole + ((rest,) if rest else ())


def build(case: Case, seed: int, make: MakePolicy = swarm_policy, late: frozenset[int] = frozenset()) -> Network:
    """The network of a case at time 0: connected, the file at the seeder, without the members that are to `join` later."""
    rng = Random(seed)  # noqa: S311 (seeded on purpose)
    sizes = cut(case.size, case.piece)
    network = Network(sizes, case.rtt_s, rng)
    for number, up in enumerate(case.ups):
        down = case.downs[number - 1] * MBIT if number and case.downs else inf
        policy = make(number, case, Random(rng.random()))  # noqa: S311 (seeded on purpose)
        node = Node(name(number), policy, up * MBIT, down, number == 0, up * MBIT, alive=number not in late)
        network.add(node)
    for number in range(len(case.ups)):
        if number not in late:
            tell_row(network, case, number)
    for a, b in links(case):
        if not late & {a, b}:
            network.connect(name(a), name(b))
    return network


def tell_row(network: Network, case: Case, number: int) -> None:
    """The whole row of pieces becomes known to a member; the seeder holds it."""
    node = network.nodes[name(number)]
    network.tell(node, Added(cut(case.size, case.piece), held=number == 0))
    network.tell(node, Completed())


def join(network: Network, case: Case, number: int) -> None:
    """A late member comes: it learns the row and is connected to its neighbours."""
    network.nodes[name(number)].alive = True
    tell_row(network, case, number)
    for a, b in links(case):
        if number in {a, b} and network.nodes[name(a)].alive and network.nodes[name(b)].alive:
            network.connect(name(a), name(b))


def links(case: Case) -> list[tuple[int, int]]:
    """Who is connected to whom: everybody in a small swarm, else as the coordinator chooses neighbours."""
    members = [Member(str(number), up * MBIT, True) for number, up in enumerate(case.ups) if number]
    pairs = {(0, int(one.worker_id)) for one in members if takes_from_seeder(one.worker_id, members, most=case.neighbours)}
    for one in members:
        me = int(one.worker_id)
        pairs |= {(min(me, other), max(me, other)) for other in dialled(one.worker_id, members, case.neighbours)}
    return sorted(pairs)


def dialled(me: str, members: list[Member], most: int) -> list[int]:
    """The numbers of those that a member dials."""
    return [int(one.worker_id) for one in neighbours(me, members, most=most)]


def name(number: int) -> str:
    """A member's name."""
    return "seeder" if number == 0 else f"p{number}"


def bound(case: Case) -> float:
    """The fluid bound of a case, seconds."""
    ups = [up * MBIT for up in case.ups]
    return fluid_bound(case.size, ups[0], ups[1:], [down * MBIT for down in case.downs])


def outcome(network: Network, case: Case, bound_s: float | None = None) -> Outcome:
    """Run a network to its end. `bound_s`: the fluid bound where it is not the case's own, as under churn."""
    last = network.run()
    seeder = network.nodes["seeder"]
    wasted = sum(node.wasted_bytes for node in network.nodes.values())
    stories = tuple(f"{node.name}: {node.gave_up}" for node in network.nodes.values() if node.gave_up)
    least = bound(case) if bound_s is None else bound_s
    return Outcome(least, last, seeder.sent_bytes / case.size, wasted / case.size / (len(case.ups) - 1), stories)


def run(case: Case, seed: int, make: MakePolicy = swarm_policy) -> Outcome:
    """One case, one seed."""
    return outcome(build(case, seed, make), case)


def lognormal(count: int, seed: int, median: float = 20.0, sigma: float = 0.8) -> tuple[float, ...]:
    """Uplinks of a mixed crowd, Mbit/s."""
    rng = Random(f"lognormal {seed}")  # noqa: S311 (seeded on purpose)
    return tuple(median * exp(rng.gauss(0.0, sigma)) for _ in range(count))
