"""The demo's picture: reward, staleness, who did the work, and where the learner's time went."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coordinator.demo.report import ENDS, Points, moving_average

BLUE, ORANGE, GREEN, GREY = "#2563eb", "#ea580c", "#16a34a", "#9ca3af"


def draw(report: Mapping[str, Any], series: Mapping[str, Points], path: Path) -> None:
    """Write a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 7.5), layout="constrained")
    figure.suptitle(
        f"ECHO-2 demo: {report['steps']} steps, staleness bound S = {report['S']}, "
        f"{report['workers_contributing']} workers, {report['wall_s']:.0f} s",
        fontsize=14,
    )
    _reward(axes[0][0], series)
    _staleness(axes[0][1], report)
    _workers(axes[1][0], report)
    _learner(axes[1][1], report, series)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _reward(axis: Any, series: Mapping[str, Points]) -> None:
    points = series.get("reward/all/mean", ())
    axis.plot([s for s, _ in points], [v for _, v in points], color=GREY, linewidth=0.8, label="sampled reward, raw")
    smooth = moving_average(points, ENDS)
    axis.plot([s for s, _ in smooth], [v for _, v in smooth], color=BLUE, linewidth=2.2, label=f"mean of {ENDS} steps")
    held_out = series.get("eval/all/mean", ())
    axis.plot([s for s, _ in held_out], [v for _, v in held_out], "o--", color=GREEN, label="held-out, greedy")
    axis.set(title="Reward", xlabel="learner step", ylim=(0, 1.05))
    axis.legend(loc="lower right")
    axis.grid(alpha=0.25)


def _staleness(axis: Any, report: Mapping[str, Any]) -> None:
    histogram = {int(age): count for age, count in report["staleness_histogram"].items()}
    ages = list(range(max([report["S"], *histogram]) + 1))
    bars = axis.bar(ages, [histogram.get(age, 0) for age in ages], color=BLUE)
    axis.bar_label(bars, padding=2)
    axis.axvline(report["S"] + 0.5, color=ORANGE, linestyle="--", label=f"bound S = {report['S']}")
    axis.set(
        title="Staleness of trained groups", xlabel="learner updates between sampling and training", ylabel="groups", xticks=ages
    )
    axis.legend(loc="upper left")
    axis.margins(y=0.15)


def _workers(axis: Any, report: Mapping[str, Any]) -> None:
    workers = report["workers"]
    names = [
        f"{w['name']}\n${w['price_usd_per_hour']:.2f}/h" + ("\nkilled" if w["name"] == report["killed_worker"] else "")
        for w in workers
    ]
    bars = axis.bar(names, [w["accepted_rollouts"] for w in workers], color=GREEN)
    axis.bar_label(bars, [f"{w['accepted_rollouts']}\n${w['cost_usd']:.4f}" for w in workers], padding=2)
    axis.margins(y=0.25)
    rejected = ", ".join(f"{reason} {count}" for reason, count in report["rejected"].items()) or "none"
    axis.set(title=f"Accepted rollouts and simulated cost (not trained: {rejected})", ylabel="rollouts")
    axis.title.set_wrap(True)


def _learner(axis: Any, report: Mapping[str, Any], series: Mapping[str, Points]) -> None:
    train, wait = dict(series.get("time/step", ())), dict(series.get("time/wait_for_batch", ()))
    steps = sorted(step for step in train if step > 0)
    axis.stackplot(
        steps,
        [train[s] for s in steps],
        [wait.get(s, 0.0) for s in steps],
        labels=["training", "waiting for rollouts"],
        colors=[BLUE, ORANGE],
        alpha=0.85,
    )
    share = report["learner_utilisation"]
    axis.set(
        title=f"Learner: busy {share:.0%} of the time" if share is not None else "Learner",
        xlabel="learner step",
        ylabel="seconds a step",
    )
    if steps:
        axis.legend(loc="upper right")
    axis.grid(alpha=0.25)
