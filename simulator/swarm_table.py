"""Print how near the rule comes to the fluid bound, case by case, and what star, chain and tree need: `python -m simulator.swarm_table`.

Ratio = time of the last peer to the bound, which has no latency in it. "Before" are the figures of the study that the rule comes
from: another simulation, with the same cases, 50 MB in 128 KiB pieces unless said otherwise.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from statistics import mean

from p2p.domain.swarm_events import Policy
from p2p.domain.swarm_topologies import chain, star, tree
from simulator.swarm_cases import Case, MakePolicy, Outcome, lognormal, name, run, swarm_policy
from simulator.swarm_churn import fastest_dies, last_joins, seeder_dies

RTTS_S = (0.0, 0.1)
TREE_WIDTH = 2


@dataclass(frozen=True, slots=True)
class Row:
    """A case for each seed, and its mean ratio in the study without and with 100 ms of round trip."""

    label: str
    case: Callable[[int], Case]
    before: tuple[float, float]


def _fixed(*ups: float, downs: Sequence[float] = (), piece: int = 128 << 10) -> Callable[[int], Case]:
    return lambda _seed: Case(ups, tuple(downs), piece=piece)


def _mixed(count: int, size: int = 50_000_000) -> Callable[[int], Case]:
    return lambda seed: Case((50.0, *lognormal(count, seed)), size=size)


def _mixed_downs(seed: int) -> Case:
    ups = lognormal(8, seed)
    return Case((50.0, *ups), tuple(4 * up for up in ups))


SMALL = (
    Row("50; 50,50,50", _fixed(50, 50, 50, 50), (1.007, 1.045)),
    Row("50; 10,50,50", _fixed(50, 10, 50, 50), (1.009, 1.044)),
    Row("50; 50,50,10", _fixed(50, 50, 50, 10), (1.009, 1.043)),
    Row("50; 5,5,50", _fixed(50, 5, 5, 50), (1.010, 1.026)),
    Row("20; 4x100", _fixed(20, *[100] * 4), (1.005, 1.016)),
    Row("30; 8,60,60,25", _fixed(30, 8, 60, 60, 25), (1.007, 1.032)),
    Row("80; 5x20", _fixed(80, *[20] * 5), (1.007, 1.025)),
    Row("25; 3,3,3,60", _fixed(25, 3, 3, 3, 60), (1.010, 1.031)),
)
SIXTEEN = (
    Row("50; 16x50", _fixed(50, *[50] * 16), (1.043, 1.098)),
    Row("50; 16x50, 64 KiB", _fixed(50, *[50] * 16, piece=64 << 10), (1.022, 1.076)),
)
DOWNLINKS = (
    Row("50; 4x50, down 20,100,100,100", _fixed(50, *[50] * 4, downs=(20, 100, 100, 100)), (1.000, 1.006)),
    Row("100; 8x20, down 4x50, 4x25", _fixed(100, *[20] * 8, downs=[50] * 4 + [25] * 4), (1.024, 1.033)),
    Row("40; 6x40, down 50", _fixed(40, *[40] * 6, downs=[50] * 6), (1.070, 1.091)),
    Row("50; 8 lognormal, down 4 x up", _mixed_downs, (1.024, 1.041)),
    Row("50; 10,50,50, down 15,60,60", _fixed(50, 10, 50, 50, downs=(15, 60, 60)), (1.002, 1.008)),
    Row("100; 4x100, down 60", _fixed(100, *[100] * 4, downs=[60] * 4), (1.006, 1.041)),
)
CROWD = Row("50; 64 lognormal", _mixed(64), (1.029, 1.052))
THOUSAND = Row("50; 1000 lognormal, 100 MB", _mixed(1000, 100_000_000), (1.022, 1.045))

# mean ratios of the study: fastest peer dies (seen after 0.5 s), seeder dies, last peer joins
CHURN_BEFORE = {
    "50; 50,50,50": ((1.01, 1.04), (1.07, 1.10), (1.01, 1.05)),
    "50; 5,5,50": ((1.28, 1.30), (1.02, 1.03), (1.02, 1.05)),
    "30; 8,60,60,25": ((1.01, 1.04), (1.05, 1.07), (1.01, 1.03)),
    "50; 16x50": ((1.04, 1.09), (1.07, 1.13), (1.04, 1.10)),
    "50; 64 lognormal": ((1.03, 1.06), (1.04, 1.05), (1.03, 1.05)),
}
CHURN: dict[str, Callable[[Case, int], Outcome]] = {
    "fastest peer dies, seen after 0.5 s": partial(fastest_dies, seen_after_s=0.5),
    "seeder dies after a full copy": partial(seeder_dies, seen_after_s=0.5),
    "last peer joins at 30 %": last_joins,
}


def measure(row: Row, rtt_s: float, seeds: int, make: MakePolicy = swarm_policy) -> list[Outcome]:
    """A row at one round trip time, one outcome for each seed."""
    return [run(replace(row.case(seed), rtt_s=rtt_s), seed, make) for seed in range(seeds)]


def mean_ratio(outcomes: Sequence[Outcome]) -> float:
    """Mean over seeds."""
    return mean(one.ratio for one in outcomes)


def topologies() -> dict[str, MakePolicy]:
    """The yardsticks, members in the order of the case."""
    return {"star": _star, "chain": _chain, "tree": _tree}


def _members(case: Case) -> list[str]:
    return [name(number) for number in range(len(case.ups))]


def _star(number: int, case: Case, rng: Random) -> Policy:  # noqa: ARG001 (nothing is drawn here)
    return star(_members(case), name(number), 0.0, 1e6)


def _chain(number: int, case: Case, rng: Random) -> Policy:  # noqa: ARG001
    return chain(_members(case), name(number), 0.0, 1e6)


def _tree(number: int, case: Case, rng: Random) -> Policy:  # noqa: ARG001
    return tree(_members(case), name(number), TREE_WIDTH, 0.0, 1e6)


def _say(outcomes: Sequence[Outcome], before: float | None = None) -> str:
    ratios = [one.ratio for one in outcomes]
    said = f"{mean(ratios):.3f} / {max(ratios):.3f}"
    return said if before is None else f"{said} ({before:.3f}, {mean(ratios) - before:+.3f})"


def _print_static(rows: Sequence[Row], seeds: int) -> None:
    print(
        "| uplinks; Mbit/s | bound s | RTT 0: mean / worst (before, change) | RTT 100 ms | seeder sent, copies | sent twice or aborted |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        none, far = (measure(row, rtt_s, seeds) for rtt_s in RTTS_S)
        both = [*none, *far]
        copies = f"{min(one.seeder_copies for one in both):.2f}-{max(one.seeder_copies for one in both):.2f}"
        wasted = f"{100 * max(one.wasted for one in both):.1f} %"
        bound_s = mean(one.bound_s for one in none)
        print(
            f"| {row.label} | {bound_s:.1f} | {_say(none, row.before[0])} | {_say(far, row.before[1])} | {copies} | {wasted} |",
            flush=True,
        )


def _print_churn(rows: Sequence[Row], seeds: int) -> None:
    print(f"\n| churn | RTT ms | {' | '.join(CHURN)} |\n|---|---|" + "---|" * len(CHURN))
    for row in rows:
        for column, rtt_s in enumerate(RTTS_S):
            cells = []
            for event, before in zip(CHURN.values(), CHURN_BEFORE[row.label], strict=True):
                cells.append(_say([event(replace(row.case(seed), rtt_s=rtt_s), seed) for seed in range(seeds)], before[column]))
            print(f"| {row.label} | {1000 * rtt_s:.0f} | {' | '.join(cells)} |", flush=True)


def _print_topologies(rows: Sequence[Row], rtt_s: float) -> None:
    print(f"\n| RTT {1000 * rtt_s:.0f} ms | swarm | star | chain | tree of {TREE_WIDTH} |\n|---|---|---|---|---|")
    for row in rows:
        whole = replace(row.case(0), rtt_s=rtt_s, neighbours=1000)  # a tree's links are not the swarm's
        fixed = [run(whole, 0, make).ratio for make in topologies().values()]
        cells = [f"{ratio:.2f}" for ratio in (mean_ratio(measure(row, rtt_s, 1)), *fixed)]
        print(f"| {row.label} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="The swarm rule against the fluid bound, on a virtual clock.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--thousand", action="store_true", help="also 1,000 peers: minutes, one seed")
    args = parser.parse_args()
    _print_static((*SMALL, *SIXTEEN, CROWD, *DOWNLINKS), args.seeds)
    if args.thousand:
        _print_static((THOUSAND,), 1)
    _print_churn((SMALL[0], SMALL[3], SMALL[5], SIXTEEN[0], CROWD), min(args.seeds, 3))
    for rtt_s in RTTS_S:
        _print_topologies((*SMALL, SIXTEEN[0], CROWD), rtt_s)


if __name__ == "__main__":
    main()
