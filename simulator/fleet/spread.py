"""How long a snapshot needs to each worker: piece by piece with the product's policy up to 64 workers, by the fluid model above.

The fluid model is the bound of `p2p.domain.fluid` with what the policy was seen to add to it: 3 %, and for each hop between neighbours two
round trips and the wait for an announcement. A worker whose downlink is slower than the swarm waits for its own downlink and holds nobody up.
Star, chain and tree have their textbook times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, inf, log
from typing import Literal

from p2p.domain.fluid import fluid_bound
from simulator.swarm_cases import MBIT, Case, build, name, swarm_policy
from simulator.swarm_table import TREE_WIDTH, topologies

Topology = Literal["swarm", "star", "chain", "tree"]

MOST_BY_PIECE = 64  # workers
OVER_BOUND = 1.03  # of the fluid bound, where latency is nothing
ROUND_TRIPS, ANNOUNCED_S = 2.0, 0.08  # beside it, for each hop: have and request; have-maps are told every 50 ms or so
NEIGHBOURS = 16  # so many workers are reached with each hop
MOST_PIECES = 800  # in one simulated file; real ones have more, and lose less
PIECE_BYTES = (64 << 10, 1 << 20)


@dataclass(frozen=True, slots=True)
class Class:
    """Equal workers: how many, and their links in Mbit/s."""

    count: int
    up_mbps: float
    down_mbps: float = inf


@dataclass(frozen=True, slots=True)
class Swarm:
    """The links that one file crosses. Classes without workers keep their place."""

    classes: tuple[Class, ...]
    seeder_up_mbps: float
    rtt_s: float
    topology: Topology = "swarm"

    @property
    def workers(self) -> int:
        """In all classes."""
        return sum(one.count for one in self.classes)


def arrivals(swarm: Swarm, size: float, seed: int = 0) -> tuple[tuple[float, ...], ...]:
    """Seconds until the file is at its workers, by class, ascending; a class's workers are alike, so the order says nothing.

    Piece by piece one entry for each worker, by the fluid model one for all.
    """
    if swarm.workers == 0:
        return tuple(() for _ in swarm.classes)
    by_piece = swarm.workers <= MOST_BY_PIECE
    return piecewise(swarm, size, seed) if by_piece else fluid(swarm, size)


def piece_bytes(size: float, workers: int) -> int:
    """How the policy wants a file to be cut."""
    low, high = PIECE_BYTES
    return ceil(min(max(size / (MOST_PIECES if workers >= NEIGHBOURS else MOST_PIECES / 2), low), high))


def fluid(swarm: Swarm, size: float) -> tuple[tuple[float, ...], ...]:
    """By formula."""
    shared_s = _FLUID[swarm.topology](swarm, size)
    return tuple((max(shared_s, size / (one.down_mbps * MBIT)),) if one.count else () for one in swarm.classes)


def _ups(swarm: Swarm) -> list[float]:
    return [one.up_mbps * MBIT for one in swarm.classes for _ in range(one.count)]


def _swarm_s(swarm: Swarm, size: float) -> float:
    hops = max(ceil(log(swarm.workers, NEIGHBOURS) - 1e-9), 1)
    latency_s = hops * (ROUND_TRIPS * swarm.rtt_s + ANNOUNCED_S)
    return OVER_BOUND * fluid_bound(size, swarm.seeder_up_mbps * MBIT, _ups(swarm)) + latency_s


def _star_s(swarm: Swarm, size: float) -> float:
    return swarm.workers * size / (swarm.seeder_up_mbps * MBIT) + swarm.rtt_s / 2


def _chain_s(swarm: Swarm, size: float) -> float:
    return _tree_of(1, swarm, size)


def _tree_s(swarm: Swarm, size: float) -> float:
    return _tree_of(TREE_WIDTH, swarm, size)


def _tree_of(width: int, swarm: Swarm, size: float) -> float:
    """The busiest sender's time for all its children, and one piece down the deepest branch."""
    ups = [swarm.seeder_up_mbps * MBIT, *_ups(swarm)]
    senders = range(ceil((len(ups) - 1) / width))
    busiest_s = max(min(width, len(ups) - 1 - i * width) * size / ups[i] for i in senders)
    piece, place, branch_s = piece_bytes(size, swarm.workers), len(ups) - 1, 0.0
    while place > 0:
        place = (place - 1) // width
        branch_s += width * piece / ups[place] + swarm.rtt_s / 2
    return busiest_s + branch_s - width * piece / ups[0]


_FLUID = {"swarm": _swarm_s, "star": _star_s, "chain": _chain_s, "tree": _tree_s}


@lru_cache(maxsize=4096)
def piecewise(swarm: Swarm, size: float, seed: int = 0) -> tuple[tuple[float, ...], ...]:
    """By the policy objects of `p2p.domain` on a virtual clock; a worker's downlink is a floor on its own time.

    A file of more than MOST_PIECES pieces is simulated as a smaller one over a shorter round trip, and the clock runs slower: pieces stay
    as small as the policy's timers expect. Where the swarm gives up all the same the formula stands in.
    """
    ups = [one.up_mbps for one in swarm.classes for _ in range(one.count)]
    near = NEIGHBOURS if swarm.topology == "swarm" else len(ups) + 1  # a tree's links are not the swarm's
    piece = piece_bytes(size, len(ups))
    slower = max(size / (MOST_PIECES * piece), 1.0)
    case = Case((swarm.seeder_up_mbps, *ups), size=int(size / slower), piece=piece, rtt_s=swarm.rtt_s / slower, neighbours=near)
    network = build(case, seed, topologies().get(swarm.topology, swarm_policy))
    network.run()
    done: list[tuple[float, ...]] = []
    first = 1
    for one, (formula_s, *_) in zip(swarm.classes, (times or (inf,) for times in fluid(swarm, size)), strict=True):
        own_s = size / (one.down_mbps * MBIT) + swarm.rtt_s
        times = (network.nodes[name(number)].done_at for number in range(first, first + one.count))
        done.append(tuple(sorted(max(formula_s if time is None else slower * time, own_s) for time in times)))
        first += one.count
    return tuple(done)


def last_s(times: Sequence[Sequence[float]]) -> float:
    """Until the last worker has it; 0 without workers."""
    return max((one[-1] for one in times if one), default=0.0)


def p95_s(times: Sequence[Sequence[float]], counts: Sequence[int]) -> float:
    """The 95th percentile over workers."""
    spread = sorted((time, count / len(one)) for one, count in zip(times, counts, strict=True) if one for time in one)
    left = 0.95 * sum(weight for _, weight in spread)
    for time, weight in spread:
        left -= weight
        if left <= 1e-9:
            return time
    return 0.0
