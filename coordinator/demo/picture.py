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

    rows = 3 if report["market"] else 2
    figure, axes = pyplot.subplots(rows, 2, figsize=(12, 3.75 * rows), layout="constrained")
    figure.suptitle(
        f"ECHO-2 demo: {report['steps']} steps, staleness bound S = {report['S']}, "
        f"{report['workers_contributing']} workers, {report['wall_s']:.0f} s",
        fontsize=14,
    )
    _reward(axes[0][0], series)
    _staleness(axes[0][1], report)
    _workers(axes[1][0], report)
    _learner(axes[1][1], report, series)
    if report["market"]:
        _rates(axes[2][0], report["market"], series)
        _who(axes[2][1], report["market"])
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


def _rates(axis: Any, market: Mapping[str, Any], series: Mapping[str, Points]) -> None:
    """Required and offered rate, and idle time predicted and measured, by step."""
    for name, color in (("required_rate", ORANGE), ("offered_rate", BLUE)):
        points = series.get(f"market/{name}", ())
        axis.step([s for s, _ in points], [v for _, v in points], where="post", color=color, label=name.replace("_", " "))
    for act in market["acts"]:
        axis.axvline(act["step"], color=GREY, linestyle=":", label=f"{act['kind']} {act['worker']}")
    axis.set(title="Market: completions a second", xlabel="learner step", ylim=(0, None))
    idle = axis.twinx()
    for name, style in (("predicted_idle", "--"), ("measured_idle", "-")):
        points = series.get(f"market/{name}", ())
        idle.plot([s for s, _ in points], [v for _, v in points], style, color=GREEN, linewidth=1, label=name.replace("_", " "))
    idle.set(ylim=(0, 1), ylabel="learner idle")
    lines = [*axis.get_lines(), *idle.get_lines()]
    axis.legend(lines, [line.get_label() for line in lines], loc="upper right", fontsize=8)


def _who(axis: Any, market: Mapping[str, Any]) -> None:
    """Who was active at which step."""
    names = sorted({name for active in market["active_by_step"].values() for name in active}, reverse=True)
    for place, name in enumerate(names):
        steps = [int(step) for step, active in market["active_by_step"].items() if name in active]
        axis.scatter(steps, [place] * len(steps), marker="s", s=12, color=BLUE)
    paid, everyone = market["usd_per_thousand"], market["usd_per_thousand_all_on"]
    known = paid is not None and everyone is not None
    cost = f"\n{paid:.4f} USD per 1,000 rollouts, {everyone:.4f} with all on" if known else ""
    axis.set(title=f"Active workers{cost}", xlabel="learner step", yticks=range(len(names)), yticklabels=names)
