"""The figure: reward against S, a line a loss, with standard errors. Part of `reward_against_staleness`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

STYLE = {
    "dppo": ("#1f5fa8", "o", "dppo (the default)"),
    "ppo_clip": ("#2e7d4f", "D", "ppo_clip with dual clip at 2"),
    "decoupled": ("#6a4c93", "^", "decoupled with its mask"),
    "plain": ("#8c2d2d", "s", "plain ppo_clip, no dual clip"),
}
DPI, COLOURS_KEPT = 100, 96
SHIFT = 0.05  # of a place on the axis, between losses: error bars side by side
NOTE = (
    "digit sorting, 312,816 parameters, 80 steps of 16 groups of 8 at a learning rate of 1e-4; the batch of step t is sampled by"
    "\nversion max(0, t - S); right: the same seeds' reward at S = 0 taken away; bars: one standard error"
)


def draw(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: left the rewards, right their differences to S = 0."""
    figure = Figure(figsize=(11, 5.2))
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    bounds = sorted({int(run["S"]) for run in runs})
    here = [loss for loss in STYLE if any(run["loss"] == loss for run in runs)]
    for place, loss in enumerate(here):
        rewards = {bound: _by_seed(runs, loss, bound) for bound in bounds}
        shift = SHIFT * (place - (len(here) - 1) / 2)
        _line(left, loss, shift, bounds, [list(rewards[bound].values()) for bound in bounds])
        fresh = rewards.get(0, {})
        gaps = [[value - fresh[seed] for seed, value in rewards[bound].items() if seed in fresh] for bound in bounds]
        _line(right, loss, shift, bounds, gaps)
    for axes in (left, right):
        axes.set_xticks(range(len(bounds)), [str(bound) for bound in bounds])
        axes.set_xlabel("S, updates that data is old")
        axes.grid(axis="y", color="#dddddd")
        axes.spines[["top", "right"]].set_visible(False)
    right.axhline(0.0, color="#555555", linewidth=1)
    left.set_title("reward of the current policy, mean of the last 20 steps", fontsize=11)
    right.set_title("difference to S = 0", fontsize=11)
    left.legend(frameon=False, loc="lower left", fontsize=9)
    seeds = len({run["seed"] for run in runs})
    figure.suptitle(f"Reward against S, {seeds} seeds", fontsize=13)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.text(0.01, 0.015, NOTE, fontsize=7.5, va="bottom", color="#333333")
    canvas = BytesIO()
    figure.savefig(canvas, dpi=DPI, format="png")
    Image.open(canvas).convert("RGB").quantize(COLOURS_KEPT).save(path, optimize=True)


def _by_seed(runs: Sequence[Mapping[str, Any]], loss: str, bound: int) -> dict[int, float]:
    return {int(run["seed"]): float(run["reward"]) for run in runs if (run["loss"], run["S"]) == (loss, bound)}


def _line(axes: Any, loss: str, shift: float, bounds: Sequence[int], values: Sequence[Sequence[float]]) -> None:
    """Means with error bars, where there are any runs."""
    colour, mark, label = STYLE[loss]
    known = [(place, row) for place, row in enumerate(values) if row and place < len(bounds)]
    errors = [stdev(row) / sqrt(len(row)) if len(row) > 1 else 0.0 for _, row in known]
    where, means = [place + shift for place, _ in known], [fmean(row) for _, row in known]
    axes.errorbar(where, means, yerr=errors, color=colour, marker=mark, markersize=6, linewidth=1.6, capsize=3, label=label)
