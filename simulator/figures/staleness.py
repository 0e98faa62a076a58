"""Figure (a): the learner's utilisation and the cost of a step against S, with the fleet that activation buys."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.figures import assumptions as given
from simulator.figures.jobs import WAYS, Ran, Way, job, run

BOUNDS = (1, 2, 3, 6, 11)
MODEL = given.SMALL
LINKS = {"up_mbps": 1000.0, "down_mbps": 1000.0}  # a full snapshot takes about one T_train: where S has most to do
HOURS = 4.0
OFFERED = 60


@dataclass(frozen=True, slots=True)
class Point:
    """One job."""

    way: Way
    bound: int
    ran: Ran

    @property
    def usd_per_step(self) -> float:
        """At the first of the dated prices."""
        prices = given.PRICES[0]
        return self.ran.usd_per_step(MODEL.learner_cards, prices.h100, prices.rtx4090)


def points() -> list[Point]:
    """All of the figure."""
    return [
        Point(way, bound, run(job(MODEL, way, bound, hours=HOURS, links=LINKS, offered=OFFERED)))
        for way in WAYS
        for bound in BOUNDS
    ]


def assumptions() -> list[str]:
    """Beside the figure."""
    prices = given.PRICES[0]
    return [
        f"4B on {MODEL.learner_cards} H100 (T_train {MODEL.train_s():.0f} s) and RTX 4090s out of {OFFERED} offered; links of a worker"
        f" {LINKS['up_mbps']:g} Mbit/s, the coordinator's {given.SEEDER_MBPS:g}, so that 8 GB need about 68 s and 30 MB about 1.4 s to the last of 17",
        f"prices: H100 {prices.h100}, RTX 4090 {prices.rtx4090} USD/h ({prices.source})",
        f"{HOURS:g} simulated hours each, seed {given.SEED}, from the first batch on; hollow: no fleet out of those offered meets the rule",
    ]


def table(found: list[Point]) -> list[str]:
    """Markdown."""
    lines = [
        "| weights | S | κ | workers paid | utilisation | discards | T_bcast s | s a step | USD a step |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in found:
        ran = one.ran
        mark = " *" if ran.too_few else ""
        lines.append(
            f"| {one.way.name} | {one.bound} | {ran.kappa} | {ran.workers:.1f}{mark} | {ran.utilisation:.3f} | {ran.discards:.3f}"
            f" | {ran.t_bcast_s:.1f} | {ran.step_s:.1f} | {one.usd_per_step:.3f} |"
        )
    return lines
