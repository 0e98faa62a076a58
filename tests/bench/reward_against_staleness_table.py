"""What the runs say: means, standard errors, differences to S = 0 in standard errors, and the verdict. Pure.

Part of `reward_against_staleness`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, sqrt
from statistics import fmean, stdev
from typing import Any

from coordinator.wire.job import AlgorithmConfig

SHIPPED = AlgorithmConfig().loss
PLAIN = "plain"
SAFE_UP_TO, FAR = 6, 11  # bounds of the two claims
MOST_ERRORS = 2.0  # standard errors that a claim may be missed by

Runs = Mapping[tuple[str, int], Mapping[int, float]]
"""(loss, S) -> seed -> mean reward of the last steps."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of paired differences (same seed: same prompts, same sampling seeds), and its standard error; None with one seed."""

    mean: float
    error: float | None
    pairs: int

    @property
    def errors(self) -> float | None:
        """The mean in standard errors; None where there is none."""
        if self.error is None:
            return None
        return self.mean / self.error if self.error > 0 else (0.0 if self.mean == 0 else inf * self.mean)


@dataclass(frozen=True, slots=True)
class Claim:
    """What was to be shown, in words; whether it holds (None: runs are missing)."""

    words: str
    holds: bool | None


def rewards(runs: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], dict[int, float]]:
    """The runs by what was run."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    for run in runs:
        found.setdefault((run["loss"], run["S"]), {})[run["seed"]] = run["reward"]
    return found


def difference(one: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """`one` minus `other`, over the seeds that both have; None of none."""
    gaps = [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]
    if not gaps:
        return None
    return Difference(fmean(gaps), stdev(gaps) / sqrt(len(gaps)) if len(gaps) > 1 else None, len(gaps))


def claims(found: Runs, seeds: int) -> tuple[Claim, ...]:
    """The claims about the shipped default. A claim needs `seeds` pairs of runs, at least two."""
    bounds = sorted({bound for loss, bound in found if loss == SHIPPED and 0 < bound <= SAFE_UP_TO})
    drops = [_drop(found, bound, seeds) for bound in bounds]
    return (*drops, _against_plain(found, seeds))


def _drop(found: Runs, bound: int, seeds: int) -> Claim:
    gap = _gap(found, (SHIPPED, bound), (SHIPPED, 0), seeds)
    words = f"{SHIPPED}, S = {bound}: at most {MOST_ERRORS:g} standard errors below S = 0"
    if gap is None or gap.errors is None:
        return Claim(f"{words}: not enough runs", None)
    return Claim(f"{words}: {_told(gap)}", gap.errors >= -MOST_ERRORS)


def _against_plain(found: Runs, seeds: int) -> Claim:
    gap = _gap(found, (SHIPPED, FAR), (PLAIN, FAR), seeds)
    words = f"{SHIPPED} no worse than {PLAIN} at S = {FAR}"
    if gap is None:
        return Claim(f"{words}: not enough runs", None)
    return Claim(f"{words}: {_told(gap)}", gap.mean >= 0)


def _gap(found: Runs, one: tuple[str, int], other: tuple[str, int], seeds: int) -> Difference | None:
    gap = difference(found.get(one, {}), found.get(other, {}))
    return gap if gap is not None and gap.pairs >= max(2, seeds) else None


def _told(gap: Difference) -> str:
    errors = gap.errors
    in_errors = "" if errors is None or not isfinite(errors) else f", {errors:+.1f} standard errors"
    return f"{gap.mean:+.3f}{in_errors}"


def table(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: a row for each loss and bound."""
    found = rewards(runs)
    lines = [
        "| loss | S | reward (each seed) | to S = 0 | in s.e. | KL | effective samples | largest gradient |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for loss, bound in found:
        here = [run for run in runs if (run["loss"], run["S"]) == (loss, bound)]
        lines.append(_row(loss, bound, here, found))
    return lines


def _row(loss: str, bound: int, here: Sequence[Mapping[str, Any]], found: Runs) -> str:
    values = [run["reward"] for run in sorted(here, key=lambda run: int(run["seed"]))]
    error = f" ± {stdev(values) / sqrt(len(values)):.3f}" if len(values) > 1 else ""
    each = " ".join(f"{value:.3f}".lstrip("0") for value in values)
    gap = difference(found[loss, bound], found.get((loss, 0), {})) if bound else None
    if gap is None:
        to_fresh, in_errors = "", ""
    else:
        to_fresh = f"{gap.mean:+.3f}" + ("" if gap.error is None else f" ± {gap.error:.3f}")
        in_errors = "" if gap.errors is None else f"{gap.errors:+.1f}"
    kl, samples = fmean(run["kl"] for run in here), fmean(run["effective_samples"] for run in here)
    largest = max(run["grad_norm_max"] for run in here)
    return f"| {loss} | {bound} | {fmean(values):.3f}{error} ({each}) | {to_fresh} | {in_errors} | {kl:.4f} | {samples:.3f} | {largest:.1f} |"
