"""The jobs behind the figures, as scenarios of the fleet simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from simulator.figures import assumptions as given
from simulator.figures.cards import fit
from simulator.fleet.outcome import Outcome
from simulator.fleet.run import simulate
from simulator.fleet.scenario import Scenario, parse_scenario


@dataclass(frozen=True, slots=True)
class Way:
    """How weights travel and what workers do meanwhile."""

    name: str
    on_update: Literal["keep", "idle"]
    publish_every: Literal["auto", "bound"]  # bound: the paper's kappa = max(1, S - 1)
    is_delta: bool


PAPER = Way("full snapshots, workers stand still (the paper's rule, κ = S − 1)", "idle", "bound", False)
BACKGROUND = Way("full snapshots, fetched in the background (κ auto)", "keep", "auto", False)
DELTAS = Way("deltas, fetched in the background (κ auto)", "keep", "auto", True)
WAYS = (PAPER, BACKGROUND, DELTAS)


def job(
    model: given.Model,
    way: Way,
    bound: int,
    *,
    hours: float,
    links: dict[str, float],
    offered: int = 120,
    mean_tokens: float = given.MEAN_TOKENS,
) -> Scenario:
    """A learner of H100s and as many RTX 4090s as activation wants, out of those offered."""
    tree = _job(model, bound, hours, mean_tokens)
    tree["job"]["on_update"] = way.on_update
    tree["job"]["publish_every"] = max(1, bound - 1) if way.publish_every == "bound" else "auto"
    tree["snapshot"] = {
        "keyframe_bytes": model.keyframe_bytes if way.is_delta else model.bf16_bytes,
        "apply_s": 1.0,
        "load_s": 60.0,
    }
    rented = fit(given.RTX4090, model, mean_tokens)
    if way.is_delta:
        tree["snapshot"]["delta_bytes"] = model.delta_bytes
    tree["fleet"] = [
        {
            "name": "rtx4090",
            "count": offered,
            "completions_per_second": rented.tokens_per_s / mean_tokens,
            "slots": rented.users,
            "usd_per_hour": given.PRICES[0].rtx4090,
            "churn_per_hour": given.CHURN_PER_HOUR,
            "return_hours": 0.25,
            **links,
        }
    ]
    return parse_scenario(tree)


def centralised(model: given.Model, bound: int, *, hours: float, mean_tokens: float = given.MEAN_TOKENS) -> Scenario:
    """The same learner with H100s beside it that generate, behind data-centre links."""
    tree = _job(model, bound, hours, mean_tokens)
    beside = fit(given.H100, model, mean_tokens)
    tree["network"]["seeder_up_mbps"] = given.DATA_CENTRE["up_mbps"]
    tree["network"]["rtt_s"] = 0.001
    tree["snapshot"] = {"keyframe_bytes": model.bf16_bytes, "apply_s": 1.0, "load_s": 60.0}
    tree["fleet"] = [
        {
            "name": "h100",
            "count": 16,
            "completions_per_second": beside.tokens_per_s / mean_tokens,
            "slots": beside.users,
            "usd_per_hour": given.PRICES[0].h100,
            **given.DATA_CENTRE,
        }
    ]
    return parse_scenario(tree)


def _job(model: given.Model, bound: int, hours: float, mean_tokens: float) -> dict[str, Any]:
    scale = mean_tokens / given.MEAN_TOKENS
    return {
        "name": f"{model.name}, S = {bound}",
        "seed": given.SEED,
        "hours": hours,
        "learner_usd_per_hour": model.learner_cards * given.PRICES[0].h100,
        "job": {
            "group_size": given.GROUP_SIZE,
            "groups_per_step": given.GROUPS,
            "staleness": bound,
            "train_s": model.train_s(mean_tokens),
            "lengths": {"mean_tokens": mean_tokens, "cv": given.CV, "max_tokens": int(given.MOST_TOKENS * scale)},
        },
        "network": {"seeder_up_mbps": given.SEEDER_MBPS, "rtt_s": given.RTT_S},
        "market": {"headroom": given.HEADROOM},
    }


@dataclass(frozen=True, slots=True)
class Ran:
    """A simulated job: what it used, so that it can be priced."""

    utilisation: float
    discards: float
    step_s: float  # from the first batch on
    workers: float  # paid, on average
    kappa: int
    t_bcast_s: float  # median of the last worker
    too_few: bool  # no set of the offers met the rule at some review

    def usd_per_step(self, learner_cards: int, learner_usd: float, worker_usd: float) -> float:
        """At these prices by the hour."""
        return (learner_cards * learner_usd + self.workers * worker_usd) * self.step_s / 3600


def run(scenario: Scenario) -> Ran:
    """Simulate; the start (keyframe to everybody, first batch) is left out of the step's time."""
    return _read(simulate(scenario), scenario)


def _read(outcome: Outcome, scenario: Scenario) -> Ran:
    figures = outcome.figures
    first = next((one.hours for one in outcome.samples if one.step > 0), 0.0)
    paid = [one.usd_per_hour / scenario.fleet[0].usd_per_hour for one in outcome.samples if one.hours >= first]
    busy = figures["utilisation"]
    return Ran(
        utilisation=busy,
        discards=figures["discards"],
        step_s=scenario.job.train_s / busy if busy else float("inf"),
        workers=sum(paid) / len(paid),
        kappa=figures["kappa"],
        t_bcast_s=figures["t_bcast_s"].get("last_worker", {}).get("p50", 0.0),
        too_few=figures["activation"]["found_too_few"] > 0,
    )
