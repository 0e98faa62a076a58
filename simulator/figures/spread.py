"""Figure (b): seconds until the last of N workers has a version, over star, chain, tree and swarm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from p2p.domain.fluid import fluid_bound
from simulator.figures import assumptions as given
from simulator.fleet.spread import MOST_BY_PIECE, Class, Swarm, Topology, fluid, last_s, piecewise
from simulator.swarm_cases import MBIT

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
BY_PIECE = (1, 2, 4, 8, 16)  # the others by formula, for the time that it takes;
SWARM_BY_PIECE = (*BY_PIECE, MOST_BY_PIECE)  # the swarm, whose time is not arithmetic, also where the models meet
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)
SIZES = {"full snapshot, 8B as bf16: 16.4 GB": given.LARGE.bf16_bytes, "delta, 8B: 61 MB": given.LARGE.delta_bytes}
SEEDER_MBPS = 500.0
CROWDS = {
    "all at 500 Mbit/s": ((1.0, 500.0),),
    "a quarter at 500, half at 100, a quarter at 25 Mbit/s up": ((0.5, 100.0), (0.25, 500.0), (0.25, 25.0)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """One dissemination."""

    crowd: str
    size: str
    topology: Topology
    workers: int
    last_s: float
    bound_s: float
    by_piece: bool


def crowd_of(parts: tuple[tuple[float, float], ...], workers: int, topology: Topology = "swarm") -> Swarm:
    """So many workers with these shares of uplinks; the rest goes to the first kind."""
    counts = [int(share * workers) for share, _ in parts]
    counts[0] += workers - sum(counts)
    classes = tuple(Class(count, up) for count, (_, up) in zip(counts, parts, strict=True))
    return Swarm(classes, SEEDER_MBPS, given.RTT_S, topology)


def points() -> list[Point]:
    """All of the figure."""
    return [
        _point(crowd, size, topology, workers)
        for crowd in CROWDS
        for size in SIZES
        for topology in TOPOLOGIES
        for workers in WORKERS
    ]


def _point(crowd: str, size: str, topology: Topology, workers: int) -> Point:
    swarm, nbytes = crowd_of(CROWDS[crowd], workers, topology), SIZES[size]
    by_piece = workers in (SWARM_BY_PIECE if topology == "swarm" else BY_PIECE)
    seconds = last_s(piecewise(swarm, nbytes, given.SEED) if by_piece else fluid(swarm, nbytes))
    ups = [one.up_mbps * MBIT for one in swarm.classes for _ in range(one.count)]
    return Point(crowd, size, topology, workers, seconds, fluid_bound(nbytes, SEEDER_MBPS * MBIT, ups), by_piece)


def assumptions() -> list[str]:
    """Beside the figure."""
    return [
        f"the coordinator's uplink {SEEDER_MBPS:g} Mbit/s, round trip {1000 * given.RTT_S:g} ms, downlinks unlimited; members of chain and"
        " tree (two children each) in the order of the crowd, slow ones last",
        "marks: piece by piece with the objects that run in production (at most 800 pieces a file, no TCP), the swarm up to 64 workers, the"
        " fixed trees up to 16; else by formula, for the swarm 1.03 times the fluid bound, and two round trips and 80 ms for each hop",
        "dashed: the fluid bound, which no schedule beats",
        given.BYTES,
    ]


def table(found: list[Point]) -> list[str]:
    """Markdown: seconds by crowd, file and topology."""
    lines = [
        f"| links | file | topology | {' | '.join(map(str, WORKERS))} |",
        "|---|---|---|" + "---|" * len(WORKERS),
    ]
    for crowd in CROWDS:
        for size in SIZES:
            for topology in TOPOLOGIES:
                row = [one for one in found if (one.crowd, one.size, one.topology) == (crowd, size, topology)]
                lines.append(f"| {crowd} | {size} | {topology} | {' | '.join(_short(one.last_s) for one in row)} |")
    return lines


def _short(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.1f}"
