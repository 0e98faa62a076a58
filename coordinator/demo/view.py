"""The live view: step, reward curve, staleness, learner, and each worker's rate, price and version."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from rich.console import Group
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coordinator.demo.report import ENDS, Points, moving_average, utilisation
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


def view(
    job: Mapping[str, Any],
    workers: Sequence[Mapping[str, Any]],
    series: Mapping[str, Points],
    *,
    elapsed_s: float,
    killed: Collection[str],
) -> Group:
    """One frame; the learner's share is counted as in the report."""
    smooth = moving_average(series.get("reward/all/mean", ()), ENDS)
    header = Table.grid(padding=(0, 2))
    header.add_row(
        Text(f"{job['name']} {job['state']}", style="bold"),
        f"step {job['committed_steps']}/{job['planned_steps']}",
        ProgressBar(total=job["planned_steps"], completed=job["committed_steps"], width=30),
        f"{elapsed_s:.0f} s",
    )
    newest = f"{smooth[-1][1]:.3f}" if smooth else "none yet"
    reward = Text.assemble(("reward ", "bold"), f"{newest:>8} ", (sparkline(smooth), "cyan"))
    staleness = job["staleness"]
    share = utilisation(series.get("time/step", ()), series.get("time/wait_for_batch", ()))
    busy = "not measured" if share is None else f"{share:.0%}"
    version = "none yet" if job["newest_version"] is None else job["newest_version"]
    lines = Text(
        f"staleness (bound {staleness['bound']}): {ages(staleness['histogram'])}\nlearner busy: {busy}   newest version: {version}"
    )
    return Group(Panel(Group(header, reward, lines), title="ECHO-2"), _workers(workers, killed))


def progress(job: Mapping[str, Any], rewards: Points, elapsed_s: float) -> str:
    """One frame as one line, for output that is no terminal."""
    smooth = moving_average(rewards, ENDS)
    newest = f"{smooth[-1][1]:.3f}" if smooth else "none yet"
    return f"{elapsed_s:4.0f} s  {job['state']}, step {job['committed_steps']}/{job['planned_steps']}, reward {newest}"


def ages(histogram: Mapping[str, int]) -> str:
    """How many groups of each age, youngest first."""
    return "  ".join(f"{age}: {histogram[age]}" for age in sorted(histogram, key=int)) or "none yet"


def _workers(workers: Sequence[Mapping[str, Any]], killed: Collection[str]) -> Table:
    """One line a worker, whatever it says: the frame must fit a small terminal."""
    table = Table(header_style="bold", expand=True)
    for column in ("worker", "state", "version", "tok/s", "price", "accepted"):
        table.add_column(column, no_wrap=True)
    table.add_column("doing", ratio=1, no_wrap=True, overflow="ellipsis")  # what is left of the line
    for worker in sorted(workers, key=lambda w: str(w["name"])):
        is_killed = worker["name"] in killed
        table.add_row(
            worker["name"],
            "killed" if is_killed else worker["state"],
            "" if worker["version"] is None else str(worker["version"]),
            f"{worker['tokens_per_s']:.0f}" if worker["tokens_per_s"] > 0 else "",
            f"${uusd_to_usd(worker['price_uusd_per_hour']):.2f}/h",
            str(worker["accepted_rollouts"]),
            Text("SIGKILL, as asked" if is_killed else worker["activity"] or worker["reason"]),
        )
    return table
