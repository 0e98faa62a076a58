"""Cost-aware activation: which workers are to be active, at the least money, and why.

The set with the least all-in USD per hour whose rate is the required one times the headroom, within budgets, trust and owners' limits
(`pricing.fixpoint`). What is active is left alone while it still does and another set would not save enough: a switch must save
`Habits.margin` of the cost and repay its own warm-up in `Habits.payback_hours`. Where nothing allowed brings the rate, the decision says
because of what, and picks the most that is allowed: a slow learner is better than none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from pricing.cost import Terms, reserved_uusd, warm_up_hours
from pricing.covering import SLACK, Ints, relax
from pricing.decision import Activation
from pricing.fixpoint import settled
from pricing.money import uusd_to_usd
from pricing.offers import Offer
from pricing.pool import TIE_USD_PER_HOUR, Cause, Held, Limits, Need, Pool, pooled
from pricing.spares import spared, spares_needed
from pricing.words import changes, counted, picks

FRACTION_STEPS = 8  # halvings in the search for the most that is allowed
RELIEF = 0.01  # a constraint binds when without it the bound is lower by so much


@dataclass(frozen=True, slots=True)
class Habits:
    """How steady activation is.

    Attributes:
        margin: share of the cost that a switch must save.
        keep_share: the active set is left alone down to this share of the planned rate, but never below the required one.
        payback_hours: in which a switch must repay the warm-up of the workers it starts.
        surplus: an active set that brings so much more than another one is cut down whatever it costs.
        replace_hours: from a loss to the first completion of another worker; 0 for no spares.
        risk: accepted for losing more than headroom and spares in that time.
    """

    margin: float = 0.05
    keep_share: float = 0.95
    payback_hours: float = 1.0
    surplus: float = 0.25
    replace_hours: float = 0.0
    risk: float = 0.01


@dataclass(frozen=True)
class _Answer:
    """Units of a pool, and how they came to be chosen."""

    units: Ints
    bound: float
    binding: Cause
    because: str
    infeasible_because: str | None = None


@dataclass(frozen=True)
class _Case:
    """The question, as it was put."""

    offers: Sequence[Offer]
    need: Need
    terms: Terms
    limits: Limits
    held: Sequence[Held]
    habits: Habits
    now: float

    def pool(self, limits: Limits) -> Pool:
        """What may be used under these limits."""
        return pooled(self.offers, self.terms, limits, self.held, stickiness=self.habits.margin, now=self.now)

    @property
    def is_late(self) -> bool:
        """Whether the learner, never waiting, is not done by the deadline."""
        return self.limits.deadline_hours is not None and self.terms.horizon_hours > self.limits.deadline_hours


def activate(
    offers: Sequence[Offer],
    need: Need,
    terms: Terms,
    *,
    limits: Limits | None = None,
    held: Sequence[Held] = (),
    habits: Habits | None = None,
    now: float = 0.0,
) -> Activation:
    """Decide which workers are to be active.

    Args:
        offers: the market, ids unique; the active workers are among them.
        need: the rate, and how long a broadcast to a set takes.
        terms: what the job costs a worker.
        limits: budgets, trust, owners' limits; none by default.
        held: workers that are active now.
        habits: how steady.
        now: Unix seconds, for prices that expire.
    """
    case = _Case(offers, need, terms, limits or Limits(), held, habits or Habits(), now)
    pool = case.pool(case.limits)
    answer = _kept(case, pool) or _chosen(case, pool)
    return _told(case, pool, answer)


def _kept(case: _Case, pool: Pool) -> _Answer | None:
    """The active set, if it still does and no other one is worth the switch."""
    current = pool.current()
    if not current.any() or case.is_late or _over_budget(case, pool, current) is not None:
        return None
    headroom = min(case.need.headroom, max(1.0, case.need.headroom * case.habits.keep_share))
    asked = case.need.required(pool.broadcast(current, case.need.broadcast)) * headroom
    if pool.rate(current) < asked * (1 - SLACK):
        return None
    best = settled(pool, case.need)
    if best is None or pool.rate(current) > pool.rate(best.units) * (1 + case.habits.surplus):
        return None
    spent, saving = pool.avoidable(current), pool.avoidable(current) - pool.avoidable(best.units)
    fresh = np.where(pool.is_held > 0, 0, best.units)
    if saving > case.habits.margin * spent and saving * case.habits.payback_hours > _warming(case, pool, fresh):
        return None
    because = f"the active set still does, and no other saves enough to switch (at best {max(saving, 0.0):.4f} USD/h)"
    return _Answer(current, best.bound, _binding(case, pool, current), because)


def _warming(case: _Case, pool: Pool, units: Ints) -> float:
    """USD that are paid until these workers bring something."""
    used = [(pool.offer(int(lot)), int(units[lot])) for lot in np.flatnonzero(units)]
    return sum(count * offer.usd_per_hour * warm_up_hours(offer, case.terms) for offer, count in used)


def _chosen(case: _Case, pool: Pool) -> _Answer:
    """The cheapest set, or the most that is allowed."""
    if case.is_late:
        return _most(case, pool, "deadline", _lateness(case))
    best = settled(pool, case.need)
    if best is None:
        return _most(case, pool, *_scarcity(case, pool))
    if _over_budget(case, pool, best.units) is not None and case.held:
        best = settled(_priced_whole(pool), case.need) or best  # sums that are due anyway count against a budget
    if (over := _over_budget(case, pool, best.units)) is not None:
        return _most(case, pool, *over)
    return _Answer(best.units, best.bound, _binding(case, pool, best.units), "the cheapest set that suffices")


def _priced_whole(pool: Pool) -> Pool:
    """With all that is paid for a worker as its price, whether or not it could be saved."""
    return replace(pool, lots=replace(pool.lots, costs=np.array([cost.usd_per_hour for cost in pool.costs])))


def _over_budget(case: _Case, pool: Pool, units: Ints, slower: float = 1.0) -> tuple[Cause, str] | None:
    """Which budget does not allow these workers; the job takes `slower` times its hours with them."""
    limits, cost, hours = case.limits, pool.usd_per_hour(units), case.terms.horizon_hours * slower
    if limits.uusd_per_hour is not None and reserved_uusd(cost) > limits.uusd_per_hour:
        allowed = uusd_to_usd(limits.uusd_per_hour)
        return (
            "usd_per_hour",
            f"the cheapest set costs {cost:.4f} USD/h all in and the budget allows {allowed:.4f} USD/h: allow more",
        )
    if limits.uusd is not None and hours < inf and reserved_uusd(cost * hours) > limits.uusd:
        left = uusd_to_usd(limits.uusd)
        return (
            "usd",
            f"the cheapest set costs {cost * hours:.4f} USD over {hours:.2f} h and {left:.4f} USD are left: allow more or less work",
        )
    return None


def _lateness(case: _Case) -> str:
    hours, until = case.terms.horizon_hours, case.limits.deadline_hours
    return (
        f"the learner itself needs {hours:.2f} h at full rate and the deadline is in {until:.2f} h: allow more time or fewer steps"
    )


def _scarcity(case: _Case, pool: Pool) -> tuple[Cause, str]:
    """Why no set brings the rate: what alone would have to give, else the market."""
    least, total = case.need.rate(0.0), pool.lots.total_rate()
    if total >= least * (1 - SLACK):
        return "broadcast", (
            f"{total:.4g} completions/s may be used, but a broadcast to any set that could bring enough takes too long:"
            " publish less often, or find faster links"
        )
    short = f"all that may be used bring {total:.4g} completions/s of {least:.4g} needed"
    trusted = case.pool(case.limits.any_trust()).lots.total_rate()
    if trusted >= least * (1 - SLACK):
        return "trust", f"{short}; with owners below the trust {case.limits.trust} it would be {trusted:.4g}: ask for less trust"
    uncapped = case.pool(case.limits.any_owner_share()).lots.total_rate()
    if uncapped >= least * (1 - SLACK):
        return "owner", f"{short}; without limits for each owner it would be {uncapped:.4g}: raise them"
    refused = f"; {len(pool.refused)} of {len(case.offers)} offers cannot be used" if pool.refused else ""
    return "offers", f"{short}{refused}: find more workers, or lower the rate"


def _most(case: _Case, pool: Pool, cause: Cause, why: str) -> _Answer:
    """The largest share of the rate that is allowed, by halves."""
    answer = _Answer(np.zeros_like(pool.lots.most), 0.0, cause, "nothing is allowed", why)
    low, share = 0.0, min(1.0, pool.lots.total_rate() / max(case.need.rate(0.0), TIE_USD_PER_HOUR))
    high = share
    for _ in range(FRACTION_STEPS if share > 0 else 0):
        found = settled(pool, replace(case.need, headroom=case.need.headroom * share))
        if found is not None and _over_budget(case, pool, found.units, slower=1 / share) is None:
            answer, low = _Answer(found.units, found.bound, cause, "the most that is allowed", why), share
        else:
            high = share
        if low == high:
            break
        share = (low + high) / 2
    return answer


def _binding(case: _Case, pool: Pool, units: Ints) -> Cause:
    """What would save most if it were relaxed, by the linear bound; the rate when nothing else does."""
    rate = case.need.rate(pool.broadcast(units, case.need.broadcast))
    bounds: dict[Cause, float] = {
        "rate": _bound(pool, rate) * (1 - RELIEF),
        "broadcast": _bound(pool, case.need.rate(0.0)),
        "trust": _bound(case.pool(case.limits.any_trust()), rate),
        "owner": _bound(case.pool(case.limits.any_owner_share()), rate),
    }
    return min(bounds, key=lambda cause: bounds[cause])


def _bound(pool: Pool, rate: float) -> float:
    relaxed = relax(pool.lots, rate)
    return inf if relaxed is None else relaxed.bound


def _told(case: _Case, pool: Pool, answer: _Answer) -> Activation:
    """The decision with its figures and words."""
    units = answer.units
    t_bcast = pool.broadcast(units, case.need.broadcast)
    rate, required = pool.rate(units), case.need.required(t_bcast)
    spares = _spares(case, pool, units, rate - required)
    start, drain = changes(pool, units + spares, case.held)
    usd_per_hour, asked = pool.usd_per_hour(units), case.need.rate(t_bcast)
    return Activation(
        picked=picks(pool, units),
        spares=picks(pool, spares),
        start=start,
        drain=drain,
        rate=rate,
        required=required,
        headroom=case.need.headroom,
        t_bcast_s=t_bcast,
        asked_usd_per_hour=float(sum(pool.offer(int(lot)).usd_per_hour * units[lot] for lot in np.flatnonzero(units))),
        usd_per_hour=usd_per_hour,
        bound_usd_per_hour=min(usd_per_hour, max(0.0, answer.bound)),  # the bound also counts heads
        binding=answer.binding,
        reason=f"{counted(int(units.sum()), 'worker', 'bring')} {rate:.4g} completions/s of {asked:.4g} planned for"
        f" {usd_per_hour:.4f} USD/h all in: {answer.because}",
        infeasible_because=answer.infeasible_because,
        refused=dict(pool.refused),
    )


def _spares(case: _Case, pool: Pool, units: Ints, missed: float) -> Ints:
    """Workers to keep warm beside these, as far as the budgets allow."""
    needed = spares_needed(pool, units, missed=missed, replace_hours=case.habits.replace_hours, risk=case.habits.risk)
    spares = spared(pool, units, needed)
    while spares.any() and _over_budget(case, pool, units + spares) is not None:
        used = np.flatnonzero(spares)
        spares[used[np.argmax(pool.lots.costs[used])]] -= 1
    return spares
