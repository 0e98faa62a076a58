"""The live view: step, reward curve, staleness, learner, and each worker's rate, price and version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.demo.report import Points, moving_average
from pricing.money import uusd_to_usd

BARS = " ▁▂▃▄▅▆▇█"
WIDTH = 72


def sparkline(points: Points, width: int = WIDTH) -> str:
    """Values in [0, 1] as one line of bars; the newest `width` columns, each the mean of its points."""
    if not points:
        return ""
    per_column = -(-len(points) // width)
    columns = [points[place : place + per_column] for place in range(0, len(points), per_column)]
    heights = [sum(value for _, value in column) / len(column) for column in columns]
    return "".join(BARS[min(len(BARS) - 1, max(0, round(height * (len(BARS) - 1))))] for height in heights)


def view(job: Mapping[str, Any], workers: Sequence[Mapping[str, Any]], rewards: Points, elapsed_s: float) -> Group:
    """One frame."""
    smooth = moving_average(rewards, 10)
    header = Table.grid(padding=(0, 2))
    header.add_row(
        Text(f"{job['name']} {job['state']}", style="bold"),
        f"step {job['committed_steps']}/{job['planned_steps']}",
        ProgressBar(total=job["planned_steps"], completed=job["committed_steps"], width=30),
        f"{elapsed_s:.0f} s",
    )
    newest = f"{smooth[-1][1]:.3f}" if smooth else "none yet"
    reward = Text.assemble(("reward ", "bold"), f"{newest:>8} ", (sparkline(smooth), "cyan"))
    staleness, learner = job["staleness"], job["learner"]
    ages = "  ".join(f"{age}: {count}" for age, count in sorted(staleness["histogram"].items(), key=lambda item: int(item[0])))
    busy = "not measured" if learner["utilisation"] is None else f"{learner['utilisation']:.0%}"
    lines = Text(
        f"staleness (bound {staleness['bound']}): {ages or 'none yet'}\nlearner busy: {busy}   newest version: {job['newest_version']}"
    )
    return Group(Panel(Group(header, reward, lines), title="ECHO-2"), _workers(workers))


def _workers(workers: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(header_style="bold", expand=False)
    for column in ("worker", "state", "version", "tok/s", "price", "accepted", "doing"):
        table.add_column(column)
    for worker in sorted(workers, key=lambda w: str(w["name"])):
        table.add_row(
            worker["name"],
            worker["state"],
            str(worker["version"]),
            f"{worker['tokens_per_s']:.0f}",
            f"${uusd_to_usd(worker['price_uusd_per_hour']):.2f}/h",
            str(worker["accepted_rollouts"]),
            worker["activity"] or worker["reason"],
        )
    return table
