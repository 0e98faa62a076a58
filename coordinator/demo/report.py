"""The demo's report: a pure function of what the REST API told. Figures are measured; what is not known is null."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from coordinator.demo import market
from pricing.money import uusd_to_usd

Points = Sequence[tuple[int, float]]
PUBLISH = (
    "encode_s",
    "first_piece_s",
    "transfer_s",
    "apply_s",
    "to_last_worker_s",
)  # of a version, the last three at its slowest worker
ENDS = 10  # steps that "first" and "last" average over; fewer in a short run, so that the two never overlap


@dataclass(frozen=True, slots=True)
class Churned:
    """What was done to the workers on the way."""

    away: frozenset[str] = frozenset()  # killed, and not back at the end
    kills: int = 0
    rejoins: int = 0
    longest_absence: int = 0  # steps


@dataclass(frozen=True, slots=True)
class Told:
    """Everything that was read at the end."""

    job: Mapping[str, Any]
    workers: Sequence[Mapping[str, Any]]
    series: Mapping[str, Points]  # metric name -> (step, value)
    audit: Mapping[str, Any]
    wall_s: float
    churned: Churned
    played: market.Played | None = None


def mean(values: Sequence[float]) -> float | None:
    """The mean, or None of nothing."""
    return sum(values) / len(values) if values else None


def _median(points: Points) -> float | None:
    """The median value, or None of nothing."""
    return median(value for _, value in points) if points else None


def ends_of(steps: int) -> int:
    """How many steps "first" and "last" average over in a run of `steps`."""
    return max(1, min(ENDS, steps // 2))


def utilisation(train: Points, wait: Points) -> float | None:
    """Training time over training plus waiting, from step 1 on: step 0 waits for workers to join."""
    waits = dict(wait)
    trained = sum(value for step, value in train if step > 0)
    waited = sum(waits.get(step, 0.0) for step, _ in train if step > 0)
    return trained / (trained + waited) if trained + waited > 0 else None


def build(told: Told) -> dict[str, Any]:
    """The content of report.json."""
    config = told.job["config"]
    rewards = [value for _, value in told.series.get("reward/all/mean", ())]
    ends = ends_of(len(rewards))
    held_out = dict(told.series.get("eval/all/mean", ()))
    group_size = config["algorithm"]["group_size"]
    work = told.job["work"]
    return {
        "state": told.job["state"],
        "reason": told.job["reason"],
        "steps": told.job["committed_steps"],
        "S": config["staleness"]["max"],
        "max_staleness": told.job["staleness"]["highest"],
        "staleness_histogram": told.job["staleness"]["histogram"],
        "reward_first10": mean(rewards[:ends]),
        "reward_last10": mean(rewards[-ends:]),
        "reward_ends_steps": ends,
        "greedy_before": held_out.get(0),
        "greedy_after": held_out.get(told.job["committed_steps"]),
        "workers_contributing": sum(worker["accepted_rollouts"] > 0 for worker in told.workers),
        "learner_utilisation": utilisation(told.series.get("time/step", ()), told.series.get("time/wait_for_batch", ())),
        "admitted": work["groups"].get("trained", 0) * group_size,
        "rejected": rejected(work),
        "refused": work["refused"],
        "workers": [_worker(worker) for worker in told.workers],
        "killed_worker": min(told.churned.away, default=None),
        "kills": told.churned.kills,
        "rejoins": told.churned.rejoins,
        "longest_absence": told.churned.longest_absence,
        "versions_behind": _behind(told),
        "bytes_to_workers": sum(h["fetched_bytes"] for w in told.workers for h in w["holdings"]),
        "bytes_from_peers": sum(h["fetched_from_peers_bytes"] for w in told.workers for h in w["holdings"]),
        "bytes_saved": _saved(told),
        "publish_median": {name: _median(told.series.get(f"publish/{name}", ())) for name in PUBLISH},
        "simulated_cost_usd": uusd_to_usd(told.job["spent_uusd"]),
        "audit_ok": told.audit["ok"],
        "audit_counts": told.audit["counts"],
        "wall_s": told.wall_s,
        "market": None if told.played is None else market.report(told.played, told.job, told.job["spent_uusd"]),
    }


def rejected(work: Mapping[str, Any]) -> dict[str, int]:
    """Rollouts that were not trained, by reason: whole groups by the group's reason, single rollouts by the refusal's code."""
    reasons: dict[str, int] = dict(work["rejected"])
    for code, count in work["refused"].items():
        reasons[code] = reasons.get(code, 0) + count
    return reasons


def _behind(told: Told) -> int | None:
    """How many versions behind the newest the slowest worker alive ended; None if one holds none."""
    newest = told.job["newest_version"]
    held = [worker["version"] for worker in told.workers if worker["name"] not in told.churned.away]
    return None if newest is None or None in held or not held else newest - min(held)


def _saved(told: Told) -> int | None:
    """Bytes that full snapshots would have taken for the versions that workers fetched, less those that they fetched."""
    full = dict(told.series.get("publish/bytes_full", ()))
    holdings = [holding for worker in told.workers for holding in worker["holdings"]]
    if not full:
        return None
    return int(sum(full.get(holding["version"], 0.0) - holding["fetched_bytes"] for holding in holdings))


def _worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": worker["name"],
        "price_usd_per_hour": uusd_to_usd(worker["price_uusd_per_hour"]),
        "accepted_rollouts": worker["accepted_rollouts"],
        "accepted_tokens": worker["accepted_tokens"],
        "tokens_per_s": worker["tokens_per_s"],
        "active_s": worker["active_s"],
        "cost_usd": uusd_to_usd(worker["earned_uusd"]),
    }


def moving_average(points: Points, width: int) -> list[tuple[int, float]]:
    """Each point's mean with up to `width - 1` points before it."""
    return [
        (step, sum(value for _, value in points[max(0, place - width + 1) : place + 1]) / min(width, place + 1))
        for place, (step, _) in enumerate(points)
    ]
