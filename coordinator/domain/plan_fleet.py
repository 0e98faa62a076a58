"""One fleet of a plan: what the capacity model is told of it, how long its broadcast takes, and what it costs to the end.

A large job is rehearsed on a smaller scale: fewer groups a step and as many fewer workers, a fair sample of the fleet, so that rates,
times and the warning line stay the same and the rehearsal stays short.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from coordinator.domain.capacity_forecast import Forecast
from coordinator.domain.capacity_inputs import CapacityInputs, Estimate, JobShape, Lengths, Loading, Transfer, WorkerCapacity
from coordinator.domain.plan_facts import Facts
from coordinator.domain.rehearsal import DELAY_SPREAD
from coordinator.wire.job import JobConfig
from p2p.domain.fluid import fluid_bound
from pricing.cost import HOUR_S, Terms
from pricing.decision import Activation
from pricing.offers import BYTES_PER_MBIT, Offer
from pricing.pool import Broadcast

P95 = 1 + 0.9 * DELAY_SPREAD  # of a delivery that takes within `DELAY_SPREAD` of its mean
TRANSFER = 1.1  # times the fluid bound: what a pipelined swarm needs
REHEARSED = 256  # rollouts a step, at most, but one group
PLAYERS = 64  # workers, at most
MOST_SLOTS = 65_536  # of one worker


@dataclass(frozen=True, slots=True)
class Fleet:
    """A set of workers and what is expected of it. None where nothing was rehearsed.

    Attributes:
        offers: (offer id, workers, why).
        rate: completions per second of all, as the offers say it.
        hours: to the end; inf when it is never reached.
        usd: to the end, workers only.
    """

    offers: tuple[tuple[str, int, str], ...]
    usd_per_hour: float
    asked_usd_per_hour: float
    rate: float
    kappa: int | None
    t_bcast_s: float | None
    hours: float
    usd: float
    usd_per_step: float
    usd_per_thousand: float
    forecast: Forecast | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Workers by offer."""
        return {offer: count for offer, count, _ in self.offers}

    @property
    def workers(self) -> int:
        """How many."""
        return sum(count for _, count, _ in self.offers)


def picked_offers(found: Activation) -> tuple[tuple[str, int, str], ...]:
    """By offer, with the reason."""
    return tuple((one.offer_id, one.count, one.reason) for one in found.picked)


def broadcast_of(facts: Facts, kappa: int) -> Broadcast:
    """T_bcast of a set, by its links: the mean time from publication until a worker serves the version."""
    size, seeder, fixed_s = facts.delta_bytes(kappa), facts["seeder_mbps"] * BYTES_PER_MBIT, facts["snapshot_s"] + facts["apply_s"]

    def broadcast(ups: Sequence[float], downs: Sequence[float]) -> float:
        return fixed_s + TRANSFER * fluid_bound(size, seeder, ups, downs)

    return broadcast


def terms_of(facts: Facts, kappa: int, *, hours: float) -> Terms:
    """What the job costs a worker."""
    return Terms(
        horizon_hours=hours,
        refresh_s=kappa * facts["train_s"],
        refresh_bytes=facts.delta_bytes(kappa),
        start_bytes=facts["keyframe_bytes"],
        load_s=facts["load_s"],
        completion_bytes_up=facts["completion_bytes_up"],
        completion_bytes_down=facts["completion_bytes_down"],
        admitted=facts["admitted"],
    )


def start_hours(offers: Mapping[str, Offer], counts: Mapping[str, int], facts: Facts) -> float:
    """Until the first completions: the keyframe to all of them, and the engine's start."""
    ups = [offers[name].up for name, count in counts.items() for _ in range(count)]
    downs = [offers[name].down for name in counts]
    seeder = facts["seeder_mbps"] * BYTES_PER_MBIT
    return (TRANSFER * fluid_bound(facts["keyframe_bytes"], seeder, ups, downs) + facts["load_s"]) / HOUR_S


def job_shape(job: JobConfig, facts: Facts, *, bound: int) -> JobShape:
    """The job as the capacity model sees it."""
    algorithm = job.algorithm
    return JobShape(algorithm.group_size, algorithm.groups_per_step, bound, job.staleness.publish_every, facts["no_signal"])


def loading_of(job: JobConfig) -> Loading:
    """What workers do when a version comes."""
    return Loading.ABORT if job.staleness.on_update == "abort" else Loading.KEEP


def lengths_of(job: JobConfig, facts: Facts) -> Lengths:
    """How long completions are, over their mean."""
    return Lengths.lognormal(facts["length_cv"], cap=job.sampling.max_new_tokens / facts["mean_tokens"])


def capacity_inputs(
    job: JobConfig, facts: Facts, offers: Mapping[str, Offer], counts: Mapping[str, int], *, bound: int, t_bcast_s: float
) -> CapacityInputs:
    """The fleet at work, on the scale of `REHEARSED` rollouts a step."""
    shape = job_shape(job, facts, bound=bound)
    smaller = min(shape.groups_per_step, max(1, REHEARSED // shape.group_size))
    players = _players(offers, counts, facts, smaller / shape.groups_per_step)
    return CapacityInputs(
        job=replace(shape, groups_per_step=smaller),
        train_s=facts["train_s"],
        bcast_p95_s=P95 * t_bcast_s,
        grade_s=facts.looks_s,
        lengths=lengths_of(job, facts),
        workers=tuple(
            WorkerCapacity(
                id=f"{offer.id}/{place + 1}",
                slots=slots,
                generating=Estimate(rate),
                admitted=Estimate(facts["admitted"]),
                bcast_s=t_bcast_s,
                apply_s=min(facts["apply_s"], t_bcast_s),
                loading=loading_of(job),
                up_mbps=offer.up_mbps,
                down_mbps=offer.down_mbps,
            )
            for place, (offer, slots, rate) in enumerate(players)
        ),
        transfer=Transfer(facts["delta_bytes"], facts["seeder_mbps"]),
    )


def _players(offers: Mapping[str, Offer], counts: Mapping[str, int], facts: Facts, scale: float) -> list[tuple[Offer, int, float]]:
    """Workers with slots and rate: all of them, or every n-th by T_gen, so that together they bring `scale` times the fleet's rate."""
    ranked = sorted(counts, key=lambda name: (slots_of(offers[name], facts) / offers[name].completions_per_second, name))
    ends = list(accumulate(counts[name] for name in ranked))
    kept = min(PLAYERS, max(1, round(ends[-1] * scale)))
    chosen = [offers[ranked[bisect_right(ends, int((place + 0.5) * ends[-1] / kept))]] for place in range(kept)]
    whole = sum(count * offers[name].completions_per_second for name, count in counts.items())
    share = 1.0 if kept == ends[-1] else scale * whole / sum(offer.completions_per_second for offer in chosen)
    return [(one, max(1, round(slots_of(one, facts) * share)), one.completions_per_second * share) for one in chosen]


def slots_of(offer: Offer, facts: Facts) -> int:
    """Completions that one worker makes at once: as given, or its rate times T_gen (Little's law)."""
    given = round(facts["slots"])
    return given or min(max(1, round(offer.completions_per_second * facts.generation_s)), MOST_SLOTS)


def priced(found: Activation, job: JobConfig, facts: Facts, *, kappa: int, start_h: float, forecast: Forecast) -> Fleet:
    """The fleet with its figures to the end."""
    step_s = forecast.step_s
    hours = start_h + job.budget.steps * step_s / HOUR_S
    per_step = found.usd_per_hour * step_s / HOUR_S
    return Fleet(
        offers=picked_offers(found),
        usd_per_hour=found.usd_per_hour,
        asked_usd_per_hour=found.asked_usd_per_hour,
        rate=found.rate / facts["admitted"],
        kappa=kappa,
        t_bcast_s=found.t_bcast_s,
        hours=hours,
        usd=found.usd_per_hour * hours,
        usd_per_step=per_step,
        usd_per_thousand=per_step / job.rollouts_per_step * 1000,
        forecast=forecast,
    )
