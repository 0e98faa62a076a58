"""Which of the simulated workers are active: the offers as the coordinator sees them, and `pricing.activation` over them.

Workers of one group at one price are one offer. Rates and reliability are the true ones: how the product learns them is not simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log1p

from coordinator.domain.capacity import paper_rate
from coordinator.domain.capacity_inputs import JobShape
from pricing.activation import Habits, activate
from pricing.cost import HOUR_S, Terms
from pricing.decision import Activation
from pricing.money import usd_to_uusd
from pricing.offers import Offer
from pricing.pool import Held, Limits, Need
from simulator.fleet.scenario import Scenario
from simulator.fleet.spread import Class, Swarm, fluid, last_s
from simulator.fleet.weights import refresh_bytes
from simulator.fleet.worker import FleetWorker

Bucket = tuple[int, int]  # group, price


@dataclass(frozen=True, slots=True)
class Moment:
    """When the question is put."""

    now: float
    step: int
    kappa: int
    spent_uusd: int
    learner_uusd_per_hour: int


def survival(churn_per_hour: float) -> float:
    """The chance to last an hour."""
    return 1.0 - churn_per_hour


def losses_per_s(churn_per_hour: float) -> float:
    """The hazard that leaves that chance."""
    return -log1p(-churn_per_hour) / HOUR_S


def buckets(workers: Sequence[FleetWorker]) -> dict[Bucket, list[FleetWorker]]:
    """Who is present, by offer."""
    found: dict[Bucket, list[FleetWorker]] = {}
    for worker in workers:
        if worker.known:
            found.setdefault((worker.group, worker.price_uusd), []).append(worker)
    return found


def offer_id(bucket: Bucket) -> str:
    """An offer's name."""
    return f"{bucket[0]}@{bucket[1]}"


def decide(scenario: Scenario, present: dict[Bucket, list[FleetWorker]], moment: Moment) -> Activation:
    """Which workers are to be active now."""
    offers = [_offer(scenario, bucket, len(workers)) for bucket, workers in present.items()]
    held = [
        Held(offer_id(bucket), active)
        for bucket, workers in present.items()
        if (active := sum(worker.active for worker in workers))
    ]
    terms = _terms(scenario, moment)
    need = Need(partial(_required, scenario, moment.kappa), scenario.market.headroom, partial(_broadcast, scenario))
    return activate(offers, need, terms, limits=_limits(scenario, moment), held=held, habits=Habits(), now=moment.now)


def _offer(scenario: Scenario, bucket: Bucket, count: int) -> Offer:
    group = scenario.fleet[bucket[0]]
    return Offer(
        offer_id(bucket),
        bucket[1],
        group.completions_per_second * group.admitted,
        group.up_mbps,
        group.down_mbps,
        kind=group.name,
        count=count,
        uusd_per_gb_up=usd_to_uusd(group.usd_per_gb_up),
        uusd_per_gb_down=usd_to_uusd(group.usd_per_gb_down),
        reliability=survival(group.churn_per_hour),
    )


def _terms(scenario: Scenario, moment: Moment) -> Terms:
    job, snapshot = scenario.job, scenario.snapshot
    return Terms(
        horizon_hours=max(horizon_hours(scenario, moment), 1e-3),
        refresh_s=moment.kappa * job.train_s,
        refresh_bytes=refresh_bytes(scenario),
        relayed=0.0 if scenario.network.topology == "star" else 1.0,
        start_bytes=snapshot.keyframe_bytes,
        load_s=snapshot.load_s,
    )


def horizon_hours(scenario: Scenario, moment: Moment) -> float:
    """Until the end, if the learner never waits."""
    left = scenario.hours - moment.now / HOUR_S
    if scenario.job.steps is None:
        return left
    return min(left, (scenario.job.steps - moment.step) * scenario.job.train_s / HOUR_S)


def _limits(scenario: Scenario, moment: Moment) -> Limits:
    """What is left for workers: the learner is paid first."""
    budget, learner = scenario.budget, moment.learner_uusd_per_hour
    left = None
    if budget.usd is not None:
        reserved = learner * max(horizon_hours(scenario, moment), 0.0)
        left = max(usd_to_uusd(budget.usd) - moment.spent_uusd - int(reserved), 0)
    hourly = None if budget.usd_per_hour is None else max(usd_to_uusd(budget.usd_per_hour) - learner, 0)
    until = None if budget.deadline_hours is None else max(budget.deadline_hours - moment.now / HOUR_S, 0.0)
    return Limits(uusd=left, uusd_per_hour=hourly, deadline_hours=until if scenario.job.steps is not None else None)


def _required(scenario: Scenario, kappa: int, t_bcast_s: float) -> float:
    """The rule of DESIGN 5 for workers that all load alike."""
    job = scenario.job
    shape = JobShape(job.group_size, job.groups_per_step, job.staleness, no_signal=job.no_signal)
    pause_s = t_bcast_s if job.on_update == "idle" else min(scenario.snapshot.apply_s, 0.5 * kappa * job.train_s)
    return paper_rate(rollouts_per_step=shape.generated_per_step, train_s=job.train_s, bcast_s=pause_s, kappa=kappa)


def _broadcast(scenario: Scenario, ups: Sequence[float], downs: Sequence[float]) -> float:
    """Seconds until the last of these workers has a version; bytes a second, as offers give them."""
    links: dict[tuple[float, float], int] = {}
    for link in zip(ups, downs, strict=True):
        links[link] = links.get(link, 0) + 1
    classes = tuple(Class(count, up / 125_000.0, down / 125_000.0) for (up, down), count in links.items())
    network = scenario.network
    swarm = Swarm(classes, network.seeder_up_mbps, network.rtt_s, network.topology)
    return last_s(fluid(swarm, refresh_bytes(scenario)))  # by formula at any size: activation asks for hundreds of sets


def spread_price(usd_per_hour: float, spread: float, gauss: float) -> int:
    """One worker's price; the group's is the median."""
    return usd_to_uusd(round(usd_per_hour * exp(spread * gauss), 6))
