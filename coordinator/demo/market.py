"""The market demo's cast and script, and what its report says: pure functions of what the REST API told.

Six throttled workers of different prices and speeds, and a learner that is paced as one of a larger model would be, so that about
half of them are needed. One that is active is killed; later another one asks for more than it is worth.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from pricing.cost import HOUR_S

Points = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class Throttled:
    """One worker of the cast."""

    usd_per_hour: float
    tokens_per_s: float


CAST = (
    Throttled(0.12, 130.0),
    Throttled(0.20, 130.0),
    Throttled(0.35, 160.0),
    Throttled(0.48, 200.0),
    Throttled(0.60, 200.0),
    Throttled(0.90, 300.0),
)
SLOTS = 8
STEP_S = 2.0  # of the learner, at least
LAST_KILL, LAST_RAISE = (
    0.55,
    0.8,
)  # shares of the steps from which an act waits for nothing any more: on a busy machine all are needed
RAISED = 12.5  # times its price: the raise of the last act
KILL_AT, RAISE_AT = 0.4, 0.65  # shares of the steps
SETTLE_STEPS = 6  # after the last change, before idle times are compared
USD_PER_HOUR = 3.0  # the job's budget
USD = 1.0
ALL_ON = (
    "the asked prices of all six workers, as they were when they joined, over the rollouts that the learner trained in the same time: with"
    " all of them on it takes no more"
)
RATES = ("offered_rate", "required_rate")
COMPARED = ("time/step", "time/wait_for_batch", "market/predicted_idle")
SERIES = tuple(
    f"market/{name}"
    for name in ("required_rate", "offered_rate", "usd_per_hour", "active", "predicted_idle", "measured_idle", "kappa")
)


@dataclass(frozen=True, slots=True)
class Act:
    """What the demo did to a worker, at which step, and who was active before it and when the market had answered."""

    kind: Literal["kill", "raise"]
    step: int
    worker: str
    before: tuple[str, ...]
    after: tuple[str, ...] = ()

    @property
    def is_answered(self) -> bool:
        """Whether the worker is not active any more, and somebody came in its place."""
        return bool(self.after) and bool(set(self.after) - set(self.before))


@dataclass(frozen=True, slots=True)
class Played:
    """A whole run, as it was told. `active` maps a step to who was active then."""

    acts: tuple[Act, ...]
    market: Mapping[str, Any]
    history: Mapping[str, Any]
    series: Mapping[str, Points]
    active: Mapping[int, tuple[str, ...]] = field(default_factory=dict)


def active_now(market: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the active workers of the only job."""
    jobs = market["jobs"]
    return tuple(sorted(one["name"] for one in jobs[0]["offers"] if one["is_active"])) if jobs else ()


def _rates(market: Mapping[str, Any]) -> dict[str, float]:
    """Admitted completions a second, by name."""
    jobs = market["jobs"]
    return {one["name"]: one["completions_per_s"] * one["admitted"] for one in jobs[0]["offers"]} if jobs else {}


def is_settled(market: Mapping[str, Any]) -> bool:
    """Whether a choice was made: the learner and every active worker are measured, and somebody waits."""
    jobs = market["jobs"]
    if not jobs or jobs[0]["required_rate"] is None or all(one["is_active"] for one in jobs[0]["offers"]):
        return False
    return all(one["is_measured"] for one in jobs[0]["offers"] if one["is_active"])


def cheapest(market: Mapping[str, Any]) -> str:
    """The active worker that asks least."""
    active = [one for one in market["jobs"][0]["offers"] if one["is_active"]]
    return str(min(active, key=lambda one: (one["uusd_per_hour"], one["name"]))["name"])


def may_kill(market: Mapping[str, Any], share: float) -> bool:
    """Whether it is time for the first act: a choice was made."""
    return share >= LAST_KILL or (share >= KILL_AT and is_settled(market))


def may_raise(kill: Act, market: Mapping[str, Any], share: float) -> bool:
    """Whether it is time for the last act: the market answered the one before."""
    return bool(kill.after) and (share >= LAST_RAISE or (share >= RAISE_AT and kill.is_answered and is_settled(market)))


def fastest(market: Mapping[str, Any]) -> str:
    """The active worker that brings most: without it the set falls short."""
    active = [one for one in market["jobs"][0]["offers"] if one["is_active"]]
    return str(max(active, key=lambda one: (one["completions_per_s"], one["name"]))["name"])


def report(played: Played, told: Mapping[str, Any], spent_uusd: int) -> dict[str, Any]:
    """The market's part of report.json. Figures are means over the steps from SETTLE_STEPS after the last act on, half of them in a short run."""
    series = played.series
    begun = played.acts[-1].step if played.acts else 0
    since = begun + min(SETTLE_STEPS, (told["committed_steps"] - begun) // 2)
    last = told["committed_steps"] - 1  # nothing is issued ahead of the last step
    compared = {name: [point for point in series.get(name, ()) if since <= point[0] < last] for name in COMPARED}
    step_s, waited_s, predicted = (_mean(compared[name]) for name in COMPARED)
    rollouts = told["config"]["algorithm"]["group_size"] * told["config"]["algorithm"]["groups_per_step"]
    per_s = rollouts / (step_s + waited_s) if step_s is not None and waited_s is not None else None
    paid = _late(series.get("market/usd_per_hour", ()), since)
    everyone = sum(worker.usd_per_hour for worker in CAST)
    trained = told["work"]["groups"].get("trained", 0) * told["config"]["algorithm"]["group_size"]
    acts = {act.kind: act for act in played.acts}
    return {
        "acts": [
            {"kind": act.kind, "step": act.step, "worker": act.worker, "before": list(act.before), "after": list(act.after)}
            for act in played.acts
        ],
        "killed_was_replaced": "kill" in acts and acts["kill"].is_answered,
        "headroom_after_kill": _headroom(series, played.acts),
        "raised_was_dropped": "raise" in acts and bool(acts["raise"].after),  # the set when it was not active any more
        "active_at_end": list(active_now(played.market)),
        "rates_at_end": _rates(played.market),
        "workers": len(CAST),
        "required_rate": _late(series.get("market/required_rate", ()), since),
        "offered_rate": _late(series.get("market/offered_rate", ()), since),
        "predicted_idle": predicted,
        "measured_idle": waited_s / (step_s + waited_s) if step_s is not None and waited_s is not None else None,
        "steps_compared": len(compared["time/step"]),
        "usd_per_hour": paid,
        "usd_per_hour_highest": max((value for _, value in series.get("market/usd_per_hour", ())), default=None),
        "budget_usd_per_hour": USD_PER_HOUR,
        "budget_usd": USD,
        "spent_usd": spent_uusd / 1e6,
        "usd_per_thousand": _per_thousand(paid, per_s),
        "usd_per_thousand_all_on": _per_thousand(everyone, per_s),
        "all_on_is": ALL_ON,
        "spent_usd_per_thousand_trained": spent_uusd / 1e6 / trained * 1000 if trained else None,
        "quotes": len(played.history["quotes"]),
        "prices": [[one["name"], one["at"], one["uusd_per_hour"] / 1e6] for one in played.history["prices"]],
        "active_by_step": {str(step): list(names) for step, names in sorted(played.active.items())},
    }


def _headroom(series: Mapping[str, Points], acts: Sequence[Act]) -> float | None:
    """Offered over required rate when the market had answered the first act: the last look before the second."""
    if len(acts) < 2:
        return None
    before = [
        {step: value for step, value in series.get(f"market/{name}", ()) if acts[0].step < step <= acts[1].step} for name in RATES
    ]
    steps = before[0].keys() & before[1].keys()
    return before[0][max(steps)] / before[1][max(steps)] if steps else None


def _late(points: Points, since: int) -> float | None:
    """The mean from a step on; None of nothing."""
    return _mean([point for point in points if point[0] >= since])


def _mean(points: Points) -> float | None:
    return fmean(value for _, value in points) if points else None


def _per_thousand(usd_per_hour: float | None, per_s: float | None) -> float | None:
    return None if usd_per_hour is None or not per_s else usd_per_hour / (HOUR_S * per_s) * 1000
