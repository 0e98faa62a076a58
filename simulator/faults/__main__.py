"""Fault schedules from the command line.

`python -m simulator.faults` plays schedules and prints which transitions were fired; `--seed N` plays one and prints its story.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

from simulator.faults.coverage import Coverage, missing, report
from simulator.faults.endings import ENDINGS, play
from simulator.faults.schedule import schedule
from simulator.faults.world import LawBroken, Outcome, run


def one(seed: int) -> int:
    """Print the story of a seed; 1 if a law is broken."""
    print(schedule(seed))
    for fault in schedule(seed).faults:
        print(f"planned at {fault.at:9.3f} s, after step {fault.after_step}: {fault}")
    try:
        outcome = run(seed)
    except LawBroken as broken:
        print(broken)
        return 1
    print("\n".join(outcome.story))
    print(f"{outcome.state} after {outcome.steps} steps, {outcome.seconds:.1f} s, {outcome.commits} commits: {outcome.reasons}")
    return 0


def many(seeds: range) -> int:
    """Play schedules; print what they covered. 1 if a law is broken."""
    coverage, states = Coverage(), Counter[str]()
    for seed in seeds:
        try:
            states[_played(seed, coverage).state] += 1
        except LawBroken as broken:
            print(broken)
            return 1
    for ending in ENDINGS:
        play(ending, coverage)
    print(report(coverage))
    ends = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    print(f"\n{len(seeds)} schedules from seed {seeds.start} on: {ends}; {len(ENDINGS)} by hand besides; no law was broken.")
    never = missing(coverage)
    print(f"Reachable transitions that never fired: {', '.join(' '.join(one) for one in never) or 'none'}.")
    return 0


def _played(seed: int, coverage: Coverage) -> Outcome:
    return run(seed, coverage=coverage)


def main() -> None:
    """Exit 1 when a law is broken."""
    parser = argparse.ArgumentParser(prog="python -m simulator.faults", description="Plays seeded fault schedules.")
    parser.add_argument("--seed", type=int, help="play this one and print its story")
    parser.add_argument("--count", type=int, default=300, help="how many to play")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    args = parser.parse_args()
    sys.exit(one(args.seed) if args.seed is not None else many(range(args.first, args.first + args.count)))


if __name__ == "__main__":
    main()
