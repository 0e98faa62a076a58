"""The figures as PNG: small, the same bytes for the same numbers and the same matplotlib."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from simulator.figures import assumptions as given
from simulator.figures import cost, spread, staleness
from simulator.figures.jobs import WAYS

COLOURS = ("#8c2d2d", "#c8671d", "#1f5fa8", "#2e7d4f", "#6a4c93")
MARKS = ("s", "^", "o", "D")
DPI = 100
TICKS = {1: "1 s", 10: "10 s", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h", 360_000: "100 h"}
COLOURS_KEPT = 96


def staleness_figure(found: list[staleness.Point], path: Path) -> None:
    """Figure (a)."""
    figure, (left, right) = _figure(1, 2, (11, 5.4))
    for place, way in enumerate(WAYS):
        row = [one for one in found if one.way is way]
        for axes, values in ((left, [100 * one.ran.utilisation for one in row]), (right, [one.usd_per_step for one in row])):
            where = list(range(len(row)))
            axes.plot(where, values, color=COLOURS[place], label=way.name, zorder=2)
            for at, value, one in zip(where, values, row, strict=True):
                fill = "white" if one.ran.too_few else COLOURS[place]
                axes.plot(at, value, MARKS[place], color=COLOURS[place], markerfacecolor=fill, markersize=7, zorder=3)
    for axes in (left, right):
        axes.set_xticks(range(len(staleness.BOUNDS)), [str(bound) for bound in staleness.BOUNDS])
        axes.set_xlabel("S, updates that data may be old")
        axes.grid(axis="y", color="#dddddd")
    left.set(title="learner's utilisation, %", ylim=(0, 105))
    right.set(title="cost of a step, USD (learner and workers)", ylim=(0, None))
    left.legend(frameon=False, loc="lower right", fontsize=8.5)
    _finish(
        figure, "Utilisation and cost against S: 4B, activation buys the fleet", [*staleness.assumptions(), *given.common()], path
    )


def spread_figure(found: list[spread.Point], path: Path) -> None:
    """Figure (b)."""
    figure, grid = _figure(2, 2, (11, 9))
    for row, crowd in enumerate(spread.CROWDS):
        for column, size in enumerate(spread.SIZES):
            axes = grid[row][column]
            here = [one for one in found if (one.crowd, one.size) == (crowd, size)]
            for place, topology in enumerate(("star", "chain", "tree", "swarm")):
                line = [one for one in here if one.topology == topology]
                axes.plot([one.workers for one in line], [one.last_s for one in line], color=COLOURS[place], zorder=2)
                exact = [one for one in line if one.by_piece]
                axes.plot(
                    [one.workers for one in exact],
                    [one.last_s for one in exact],
                    MARKS[place],
                    color=COLOURS[place],
                    label=topology,
                    markersize=5,
                    zorder=3,
                )
            bound = [one for one in here if one.topology == "swarm"]
            axes.plot([one.workers for one in bound], [one.bound_s for one in bound], "k--", linewidth=1, label="fluid bound")
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(spread.WORKERS, [str(count) for count in spread.WORKERS])
            axes.set_yticks(list(TICKS), list(TICKS.values()))
            axes.minorticks_off()
            axes.tick_params(axis="x", labelsize=8)
            axes.set_ylim(0.7 * min(one.bound_s for one in here), 1.4 * max(one.last_s for one in here))
            axes.set_title(f"{size}\n{crowd}", fontsize=10)
            axes.grid(color="#e5e5e5")
            if column == 0:
                axes.set_ylabel("until the last worker has it")
            if row == 1:
                axes.set_xlabel("workers (marks: piece by piece; lines: also by formula)")
    grid[0][0].legend(frameon=False, loc="upper left", fontsize=9)
    _finish(figure, "Dissemination against the number of workers", spread.assumptions(), path)


def cost_figure(found: list[cost.Point], path: Path) -> None:
    """Figure (c)."""
    ways = (cost.TOGETHER, cost.APART, cost.ECHO_IDLE, cost.ECHO_FULL, cost.ECHO_DELTA)
    figure, grid = _figure(1, 2, (12.5, 7))
    for axes, model in zip(grid, given.MODELS, strict=True):
        here = {one.way: one for one in found if one.model is model and one.mean_tokens == given.MEAN_TOKENS}
        width = 0.16
        for place, way in enumerate(ways):
            values = [here[way].usd[prices.name] for prices in given.PRICES]
            where = [group + (place - 2) * width for group in range(len(values))]
            axes.bar(where, values, width * 0.92, color=COLOURS[(0, 1, 4, 3, 2)[place]], label=way)
            if way == cost.ECHO_DELTA:
                _mark_savings(axes, where, values, here)
        for group, prices in enumerate(given.PRICES):
            base = here[cost.TOGETHER].usd[prices.name]
            low, high = (base * (1 - share) for share in reversed(given.PAPER_SAVING))
            label = "33.3 to 36.3 % below together (the paper's claim)" if group == 0 else None
            axes.fill_between(
                [group - 0.42, group + 0.42], low, high, color="black", alpha=0.35, linewidth=0, label=label, zorder=3
            )
        axes.set_xticks(range(len(given.PRICES)), [_price_label(prices) for prices in given.PRICES], fontsize=8.5)
        axes.set_title(f"{model.name}: USD a step")
        axes.set_ylim(0, max(max(one.usd.values()) for one in here.values()) * 1.25)
    grid[0].legend(frameon=False, loc="upper left", fontsize=8.5)
    _finish(figure, "Cost of a step: a data centre against ECHO-2", [*cost.assumptions(), *given.common()], path)


def _price_label(prices: given.Prices) -> str:
    return f"{prices.name}\nH100 {prices.h100:.2f}\n4090 {prices.rtx4090:.2f}"


def _mark_savings(axes: Any, where: list[float], values: list[float], here: dict[str, cost.Point]) -> None:
    for at, value, prices in zip(where, values, given.PRICES, strict=True):
        change = value / here[cost.TOGETHER].usd[prices.name] - 1
        label = f"{100 * change:+.0f} %"
        box = {"facecolor": "white", "alpha": 0.75, "linewidth": 0, "pad": 0.6}
        axes.text(at + 0.05, 1.01 * value, label, ha="center", va="bottom", fontsize=7.5, color="black", zorder=4, bbox=box)


def _figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    figure = Figure(figsize=size)
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns)


def _finish(figure: Figure, title: str, lines: list[str], path: Path) -> None:
    """Title above, assumptions below, both outside the axes."""
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    text = "\n".join(_folded(line) for line in lines)
    rows = text.count("\n") + 1
    height = figure.get_figheight()
    foot = rows * 0.145 + 0.15
    figure.set_figheight(height + foot)
    figure.suptitle(title, fontsize=13, y=1 - 0.12 / (height + foot), va="top")
    figure.tight_layout(rect=(0, foot / (height + foot), 1, 1))
    figure.text(0.01, 0.06 / (height + foot), text, fontsize=7.2, va="bottom", ha="left", color="#333333", linespacing=1.35)
    canvas = BytesIO()
    figure.savefig(canvas, dpi=DPI, format="png")
    Image.open(canvas).convert("RGB").quantize(COLOURS_KEPT).save(path, optimize=True)  # a quarter of the bytes


def _folded(line: str, width: int = 175) -> str:
    words, rows = line.split(" "), ["·"]
    for word in words:
        if len(rows[-1]) + len(word) > width:
            rows.append(" ")
        rows[-1] += f" {word}"
    return "\n".join(rows)
