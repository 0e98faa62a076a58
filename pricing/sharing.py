"""Several jobs on one pool, by weight.

Where the pool brings what all jobs need, each gets its need. Where it does not, the rate is shared like water between connected vessels:
no job gets more than it needs or may use, and none of the others could have more per weight without another one having less. Jobs then
choose one after the other, the heaviest first, among the workers that are left; a worker that a job has is offered to the others only
when that job lets it go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from pricing.activation import Habits, activate
from pricing.cost import Terms
from pricing.covering import SLACK
from pricing.decision import Activation
from pricing.offers import Offer
from pricing.pool import Held, Limits, Need, Pool, pooled


@dataclass(frozen=True, slots=True)
class Claim:
    """One job's wish for workers; the fields are those of `activate`.

    Attributes:
        weight: its share of a pool that is too small, above 0.
        usable: ids of the offers that may serve it; None for all.
        habits: how steady its set is; None for those of all jobs.
    """

    job_id: str
    need: Need
    terms: Terms
    weight: float = 1.0
    limits: Limits = field(default_factory=Limits)
    held: tuple[Held, ...] = ()
    usable: frozenset[str] | None = None
    habits: Habits | None = None

    def may_use(self, offer: Offer) -> bool:
        """Whether the offer may serve this job."""
        return self.usable is None or offer.id in self.usable


@dataclass(frozen=True, slots=True)
class Unmeasured:
    """A job whose need is not known yet: its share of the offers that it may use is left free, else it would never be measured."""

    weight: float
    usable: frozenset[str]


def shared(
    offers: Sequence[Offer],
    claims: Sequence[Claim],
    habits: Habits | None = None,
    now: float = 0.0,
    *,
    unmeasured: Sequence[Unmeasured] = (),
) -> dict[str, Activation]:
    """Each job's activation; together no more workers of an offer than there are. Raises ValueError for a weight that is none."""
    for claim in claims:
        if not claim.weight > 0:
            raise ValueError(f"weight of {claim.job_id} is {claim.weight}: give a number above 0")
    shares = _shares(offers, claims, now, unmeasured)
    left = {offer.id: offer.count for offer in offers}
    reserved = _by_offer([one for claim in claims for one in claim.held])
    decided: dict[str, Activation] = {}
    for claim in sorted(claims, key=lambda claim: (-claim.weight, claim.job_id)):
        own = _by_offer(claim.held)
        for offer_id, count in own.items():
            reserved[offer_id] -= count
        usable = [offer for offer in offers if claim.may_use(offer)]
        mine = [replace(offer, count=max(0, left[offer.id] - reserved.get(offer.id, 0))) for offer in usable]
        share = shares[claim.job_id]
        need = replace(claim.need, headroom=claim.need.headroom * share)
        answer = activate(mine, need, claim.terms, limits=claim.limits, held=claim.held, habits=claim.habits or habits, now=now)
        decided[claim.job_id] = answer if share == 1 else _reduced(answer, claim, share, len(claims) + len(unmeasured))
        for pick in (*answer.picked, *answer.spares):
            left[pick.offer_id] -= pick.count
    return decided


def water_filled(needs: Mapping[str, float], weights: Mapping[str, float], supply: float) -> dict[str, float]:
    """What each gets: all of its need, or its weight's part of what those that are satisfied leave."""
    got: dict[str, float] = {}
    left = supply
    open_weight = sum(weights[name] for name in needs)
    for name in sorted(needs, key=lambda name: needs[name] / weights[name]):
        got[name] = min(needs[name], left * weights[name] / open_weight)
        left -= got[name]
        open_weight -= weights[name]
    return got


def _shares(offers: Sequence[Offer], claims: Sequence[Claim], now: float, unmeasured: Sequence[Unmeasured]) -> dict[str, float]:
    """The part of its need that each job may plan for.

    Only what a job may use counts as its need here: what it cannot have, `activate` explains, and nobody else goes short for it.
    """
    pools = {claim.job_id: _pool(offers, claim, now) for claim in claims}
    every: dict[str, float] = {}
    for pool in pools.values():
        every.update((offer.id, max(rate, every.get(offer.id, 0.0))) for offer, rate in _rates(pool))
    most = {job_id: pool.lots.total_rate() for job_id, pool in pools.items()}
    needs = {claim.job_id: claim.need.rate(0.0) for claim in claims}
    wanted = {job_id: min(need, most[job_id]) for job_id, need in needs.items()}
    supply = min(sum(every.values()), sum(most.values()))
    weights = {claim.job_id: claim.weight for claim in claims}
    for place, one in enumerate(unmeasured):
        name = f"unmeasured {place}"
        wanted[name] = min(sum(rate for offer_id, rate in every.items() if offer_id in one.usable), supply)
        weights[name] = one.weight
    got = water_filled(wanted, weights, supply)
    short = {job_id for job_id, need in needs.items() if need < inf and got[job_id] < wanted[job_id] * (1 - SLACK)}
    return {job_id: got[job_id] / need if job_id in short else 1.0 for job_id, need in needs.items()}


def _pool(offers: Sequence[Offer], claim: Claim, now: float) -> Pool:
    """What the job may use."""
    return pooled([offer for offer in offers if claim.may_use(offer)], claim.terms, claim.limits, now=now)


def _rates(pool: Pool) -> list[tuple[Offer, float]]:
    """What each offer brings, all of its workers together."""
    lots = zip(pool.lots.rates, pool.lots.most, strict=True)
    return [(pool.offer(lot), float(rate * most)) for lot, (rate, most) in enumerate(lots)]


def _by_offer(held: Sequence[Held]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for one in held:
        counts[one.offer_id] = counts.get(one.offer_id, 0) + one.count
    return counts


def _reduced(answer: Activation, claim: Claim, share: float, jobs: int) -> Activation:
    """Its full need again, and that the pool is too small for it."""
    because = (
        f"{jobs} jobs share the pool and it brings less than they need: with weight {claim.weight:g} this one may plan for {share:.0%}"
        " of its rate: find more workers, or raise its weight"
    )
    return replace(answer, headroom=claim.need.headroom, binding="offers", infeasible_because=because)
