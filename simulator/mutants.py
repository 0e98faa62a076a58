"""Planted faults and the schedules that find them: `.venv/bin/python -m simulator.mutants` prints the table.

Each mutant is one small change to the product's code (`faults/mutations.py`), put in at run time. The seeds of SEEDS are tried first,
then those below BUDGET: a hint saves time and answers nothing, because every run is played anew.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from simulator.faults.mutations import MUTANTS, Mutant
from simulator.faults.patching import planted
from simulator.faults.world import LawBroken, run

BUDGET = 110  # schedules for one mutant
SEEDS: Mapping[str, tuple[int, ...]] = {
    "fence dropped": (27,),
    "lease of another": (1,),
    "seal by arrival": (7,),
    "newest token": (1,),
    "reissue any": (22,),
    "settle twice": (3,),
    "after the deadline": (17,),
    "lost slot": (1,),
    "sessions overlap": (28,),
    "rollback ignored": (20,),
    "batches forgotten": (2,),
    "no canary": (4,),
    "unconfirmed granted": (4,),
    "unconfirmed sent": (1,),
    "wall forgotten": (17,),
    "loss forgotten": (14,),
    "quarantine forgotten": (4,),
    "death forgotten": (4,),
    "publication forgotten": (1,),
    "honest blamed": (48,),
    "no grace": (1,),
    "refusal paid twice": (3,),
    "versions forgotten": (106, 100, 62, 120),
}


@dataclass(frozen=True, slots=True)
class Found:
    """Which schedule found a mutant, after how many commits of it, and what it said."""

    seed: int
    commits: int
    schedules: int  # played, this one included
    words: str


def hunt(mutant: Mutant, *, budget: int = BUDGET, first: Sequence[int] | None = None) -> Found | None:
    """Play schedules until one finds the mutant."""
    hints = SEEDS.get(mutant.name, ()) if first is None else tuple(first)
    for played, seed in enumerate(_order(hints, budget), start=1):
        try:
            with planted(mutant.plant):
                run(seed)
        except LawBroken as broken:
            return Found(seed, broken.commits, played, str(broken).splitlines()[0])
    return None


def _order(hints: Sequence[int], budget: int) -> Iterator[int]:
    yield from hints
    yield from (seed for seed in range(budget) if seed not in hints)


def table(found: Sequence[tuple[Mutant, Found | None]]) -> str:
    """Markdown: one line for each mutant."""
    lines = ["| mutant | what is wrong | law | seed | commits until found | what the run said |", "|---|---|---|---|---|---|"]
    for mutant, how in found:
        cells = ("-", "-", "not found") if how is None else (str(how.seed), str(how.commits), _short(how.words))
        lines.append(f"| {mutant.name} | {mutant.what} | {mutant.law} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _short(words: str) -> str:
    plain = words.replace("|", "/")
    return plain if len(plain) <= 120 else plain[:117] + "..."


def main() -> None:
    """Exit 1 when a mutant is not found."""
    parser = argparse.ArgumentParser(
        prog="python -m simulator.mutants", description="Planted faults, and the seeds that find them."
    )
    parser.add_argument("--only", default="", help="names, comma-separated")
    parser.add_argument("--budget", type=int, default=BUDGET, help="schedules a mutant")
    parser.add_argument("--fresh", action="store_true", help="do not begin with the known seeds")
    args = parser.parse_args()
    only = {name.strip() for name in args.only.split(",") if name.strip()}
    chosen = [mutant for mutant in MUTANTS if not only or mutant.name in only]
    found = [(mutant, hunt(mutant, budget=args.budget, first=() if args.fresh else None)) for mutant in chosen]
    print(table(found))
    sys.exit(any(how is None for _, how in found))


if __name__ == "__main__":
    main()
