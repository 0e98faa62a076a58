"""Print how kappa's default does against every other kappa: `.venv/bin/python -m simulator.kappa_table [--every N]`.

`capacity_table` sets kappa itself, so it says nothing of the default. Here the fleets are those that pause for long, each bought at 1.15
of the rate that the default asks for, and each is rehearsed at every kappa from 1 to S - 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

from coordinator.domain.capacity import chosen_kappa, warning_line
from coordinator.domain.capacity_forecast import rehearsal_of
from coordinator.domain.rehearsal import Rehearsed, rehearse
from simulator.capacity import PAUSING, TAILS, Case, inputs_of

BOUNDS = (3, 4, 6, 8, 11)
PAIRS = ((0.1, 0.4), (0.1, 1.2), (0.5, 0.1), (0.5, 0.4), (1.0, 0.4), (1.5, 0.1))  # T_bcast and T_gen, times T_train
LOAD = 1.15
STEPS = 200
SEED = 7
FAR = 0.03


@dataclass(frozen=True, slots=True)
class Compared:
    """One fleet at every kappa: the default's, the bound S, and by kappa what a rehearsal gave and what S the warning line asks for."""

    case: Case
    default: int
    found: dict[int, Rehearsed]
    lines: dict[int, int]

    def lost(self, kappa: int) -> float:
        """The learner's utilisation below that of the best kappa."""
        return max(one.utilisation for one in self.found.values()) - self.found[kappa].utilisation


Rule = Callable[[Compared], int]


def _inside(one: Compared) -> int:
    """The largest kappa up to the default that is inside the warning line; the default where none is."""
    return max((kappa for kappa in one.found if kappa <= one.default and one.lines[kappa] <= one.case.bound), default=one.default)


def _least_line(one: Compared) -> int:
    """The largest kappa up to the default whose line asks for the least S."""
    below = [kappa for kappa in one.found if kappa <= one.default]
    return min(below, key=lambda kappa: (one.lines[kappa], -kappa))


RULES: dict[str, Rule] = {
    "the default (5 % of pauses, at most S - 1)": lambda one: one.default,
    "S - 1 (the paper's)": lambda one: one.case.bound - 1,
    "1": lambda _: 1,
    "the default, or less where that is inside the warning line": _inside,
    "the default, or less where the warning line asks for a smaller S": _least_line,
}


def cases() -> list[Case]:
    """All fleets; those whose default is 1 have nothing to choose."""
    every = [Case(mix, tail, bound, 1, *pair) for mix, tail, bound, pair in product(PAUSING, TAILS, BOUNDS, PAIRS)]
    return [case for case in every if chosen_kappa(inputs_of(case, LOAD, is_auto=True)[0]) > 1]


def compared(case: Case) -> Compared:
    """Rehearse the fleet at every kappa."""
    inputs, _ = inputs_of(case, LOAD, is_auto=True)
    found, lines = {}, {}
    for kappa in range(1, case.bound):
        at = replace(inputs, job=replace(inputs.job, publish_every=kappa))
        found[kappa] = rehearse(rehearsal_of(at, kappa, steps=STEPS), at.lengths.draw, SEED)
        lines[kappa] = warning_line(at, kappa).bound
    return Compared(case, chosen_kappa(inputs), found, lines)


def report(results: Sequence[Compared]) -> str:
    """Markdown: one line for each rule."""
    lines = [
        f"{len(results)} fleets whose default is above 1.",
        "",
        f"| κ | utilisation lost against the best κ: mean | more than {FAR:g} | most | discards, mean |",
        "|---|---|---|---|---|",
    ]
    for name, rule in RULES.items():
        lost = [one.lost(rule(one)) for one in results]
        discards = sum(one.found[rule(one)].discards for one in results) / len(results)
        far = sum(share > FAR for share in lost)
        lines.append(f"| {name} | {sum(lost) / len(lost):.3f} | {far} | {max(lost):.3f} | {discards:.3f} |")
    return "\n".join(lines)


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description="Kappa's default against every other kappa.")
    parser.add_argument("--every", type=int, default=1, help="take every N-th fleet; all take about two minutes of one core")
    args = parser.parse_args()
    print(report([compared(case) for case in cases()[:: args.every]]))


if __name__ == "__main__":
    main()
