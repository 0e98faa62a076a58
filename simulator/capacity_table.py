"""Print how the capacity model does against long simulations: `.venv/bin/python -m simulator.capacity_table [--every N]`.

One line for each S, kappa and tail, over all mixes, T_bcast, T_gen, R and T_train of the grid; then the worst cases, and what a
laxer reading of the warning line would let in.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable, Sequence

from coordinator.domain.capacity import WarningLine
from simulator.capacity import LOADS, Result, grid, inputs_of, measure

BUSY, DISCARDED, ERROR = 0.97, 0.02, 0.03  # what must hold
SHORT = (0.85, 0.93)  # at 0.9 of the rate, where pauses take no more than MILD of a period
MILD = 0.3


def broken(result: Result) -> list[str]:
    """Which of the promises this result breaks."""
    long, found = result.long, []
    if max(map(abs, result.errors)) > ERROR:
        found.append("prediction")
    if not result.inside:
        return found
    if result.load == 0.9 and abs(long.utilisation - result.forecast.assessment.utilisation) > ERROR:
        found.append("formula")
    if result.load == 0.9 and result.pause_share <= MILD and not SHORT[0] <= long.utilisation <= SHORT[1]:
        found.append("utilisation at 0.9")
    if result.load > 1 and long.utilisation < BUSY:
        found.append("utilisation")
    if result.load > 1.1 and long.discards > DISCARDED:
        found.append("discards")
    return found


def table(results: Sequence[Result]) -> str:
    """Markdown: one line for each S, kappa and tail."""
    lines = [
        "| S | κ | T_gen | inside at 1.15 | least utilisation inside, 1.05 | most discards inside, 1.15 | utilisation inside, 0.9 "
        "| least utilisation outside, 1.05 | most discards outside, 1.15 | worst error: utilisation, discards |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    keys = sorted({(one.case.bound, one.case.kappa, one.case.tail) for one in results})
    lines += [_line(key, [one for one in results if (one.case.bound, one.case.kappa, one.case.tail) == key]) for key in keys]
    return "\n".join(lines)


def _line(key: tuple[int, int, str], results: Sequence[Result]) -> str:
    low, right, high = ([one for one in results if one.load == load] for load in LOADS)
    short = [one.long.utilisation for one in low if one.inside]
    cells = [
        *map(str, key),
        f"{sum(one.inside for one in high)} of {len(high)}",
        _number(min, (one.long.utilisation for one in right if one.inside)),
        _number(max, (one.long.discards for one in high if one.inside)),
        f"{min(short):.3f} to {max(short):.3f}" if short else "-",
        _number(min, (one.long.utilisation for one in right if not one.inside)),
        _number(max, (one.long.discards for one in high if not one.inside)),
        f"{max(abs(one.errors[0]) for one in results):.3f}, {max(abs(one.errors[1]) for one in results):.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def _number(choose: Callable[[Iterable[float]], float], values: Iterable[float]) -> str:
    found = list(values)
    return f"{choose(found):.3f}" if found else "-"


def describe(result: Result) -> str:
    """One result in words."""
    case, said, long = result.case, result.forecast, result.long
    line = said.assessment.line
    return (
        f"{case.mix}, {case.tail}, S {case.bound}, κ {case.kappa}, T_bcast {case.bcast} and T_gen {case.generation} of T_train, "
        f"R {case.group_size * case.groups_per_step}, at {result.load}: line {line.bound}; utilisation {said.utilisation:.3f} said, "
        f"{long.utilisation:.3f} found; discards {said.discards:.3f} said, {long.discards:.3f} found"
    )


def by_completion(result: Result) -> WarningLine:
    """The line with the p99 of one completion and the mean delivery, as if a group were one completion in a free slot."""
    inputs, _ = inputs_of(result.case, result.load)
    line = result.forecast.assessment.line
    slowest_s = max(worker.generation_s for worker in inputs.workers) * inputs.lengths.quantile_of_longest(0.99, 1)
    bcast_s = max(worker.bcast_s for worker in inputs.workers)
    return WarningLine(line.kappa, math.ceil((bcast_s + slowest_s + inputs.grade_s) / inputs.train_s), line.queue)


def lax(results: Sequence[Result]) -> str:
    """How often that reading of the line lets in what wastes or starves."""
    inside = [one for one in results if one.reachable and one.load > 1 and by_completion(one).bound <= one.case.bound]
    starved = [one for one in inside if one.load < 1.1 and one.long.utilisation < BUSY]
    wasted = [one for one in inside if one.load > 1.1 and one.long.discards > DISCARDED]
    words = f"With the p99 of one completion and the mean T_bcast, {len(inside)} results are inside the line at 1.05 and 1.15"
    return f"{words}; {len(starved)} of them starve the learner and {len(wasted)} discard too much."


def sharpness(results: Sequence[Result]) -> str:
    """How many fleets outside the line do well all the same."""
    pairs = [
        (right, high) for right, high in zip(results[1 :: len(LOADS)], results[2 :: len(LOADS)], strict=True) if not high.inside
    ]
    good = sum(right.long.utilisation >= BUSY and high.long.discards <= DISCARDED for right, high in pairs)
    return f"Of {len(pairs)} jobs outside the line at 1.15, {good} keep the promises of those inside all the same."


def report(results: Sequence[Result]) -> str:
    """Table, worst cases and broken promises; `results` holds each case at all LOADS, in turn."""
    faults = [f"* {', '.join(broken(one))}: {describe(one)}" for one in results if broken(one)]
    worst = sorted(results, key=lambda one: -max(map(abs, one.errors)))[:5]
    return "\n".join(
        [
            table(results),
            "",
            f"{len(results)} results; promises broken: {len(faults)}.",
            *faults,
            "",
            "Largest errors of the forecast:",
            "",
            *(f"* {describe(one)}" for one in worst),
            "",
            lax(results),
            "",
            sharpness(results),
        ]
    )


def main() -> None:
    """Print it."""
    parser = argparse.ArgumentParser(description="The capacity model against long simulations.")
    parser.add_argument(
        "--every", type=int, default=1, help="take every N-th case of the grid; the whole takes about seven minutes"
    )
    args = parser.parse_args()
    print(report([measure(case, load) for case in grid()[:: args.every] for load in LOADS]))


if __name__ == "__main__":
    main()
