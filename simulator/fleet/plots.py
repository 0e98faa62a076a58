"""Plots of one simulated fleet: who was active, what it cost, how busy the learner was, how stale the data, how long a version travelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from simulator.fleet.outcome import Outcome
from simulator.fleet.scenario import Scenario

SMOOTH = 10  # samples of 200: shorter looks show single steps
BLUE, ORANGE, GREY, GREEN = "#1f5fa8", "#c8671d", "#9a9a9a", "#2e7d4f"


def draw(scenario: Scenario, outcome: Outcome, out: Path) -> Path:
    """Write `fleet.png` into the folder."""
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(2, 2)
    figure.suptitle(f"{scenario.name}: S = {scenario.job.staleness}, R = {scenario.rollouts_per_step}, seed {scenario.seed}")
    _workers(axes[0][0], outcome)
    _money(axes[0][1], outcome)
    _staleness(axes[1][0], outcome)
    _broadcast(axes[1][1], outcome)
    for place in axes.flat:
        place.spines[["top", "right"]].set_visible(False)
    path = out / "fleet.png"
    figure.savefig(path, dpi=90, metadata={"Software": None})
    return path


def _workers(axes: Any, outcome: Outcome) -> None:
    hours = [one.hours for one in outcome.samples]
    axes.plot(hours, [one.active for one in outcome.samples], color=BLUE, label="active")
    axes.plot(hours, [one.standby for one in outcome.samples], color=GREEN, label="standby")
    axes.plot(hours, [one.gone for one in outcome.samples], color=GREY, label="gone")
    axes.set(title="workers", xlabel="hours", ylim=(0, None))
    axes.legend(frameon=False)


def _money(axes: Any, outcome: Outcome) -> None:
    pairs = list(zip(outcome.samples, outcome.samples[SMOOTH:], strict=False))
    middle = [(before.hours + after.hours) / 2 for before, after in pairs]
    busy = [(after.trained_s - before.trained_s) / max((after.hours - before.hours) * 3600, 1e-9) for before, after in pairs]
    axes.plot([one.hours for one in outcome.samples], [one.usd_per_hour for one in outcome.samples], color=ORANGE)
    axes.set(title="asked prices of the active workers, learner's utilisation", xlabel="hours", ylim=(0, None))
    axes.set_ylabel("USD per hour", color=ORANGE)
    other = axes.twinx()
    other.plot(middle, [min(share, 1.0) for share in busy], color=BLUE, linewidth=1)
    other.set_ylim(0, 1.05)
    other.set_ylabel("utilisation", color=BLUE)
    other.spines["top"].set_visible(False)


def _staleness(axes: Any, outcome: Outcome) -> None:
    ages = {int(age): count for age, count in outcome.figures["staleness"].items()}
    total = max(sum(ages.values()), 1)
    axes.bar(list(ages), [100 * count / total for count in ages.values()], color=BLUE)
    axes.set(title="staleness of the trained groups", xlabel="steps", ylabel="% of groups")
    axes.set_xticks(range(max(ages, default=0) + 1))


def _broadcast(axes: Any, outcome: Outcome) -> None:
    axes.set(title="from publication to the last active worker", xlabel="seconds", ylabel="publications")
    if outcome.broadcasts_s:
        axes.hist(outcome.broadcasts_s, bins=20, color=GREEN)
    else:
        axes.text(0.5, 0.5, "one version only", ha="center", transform=axes.transAxes)
