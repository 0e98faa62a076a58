"""Warm spares: workers kept ready because some of the active ones will be lost before another could be warmed up."""

from __future__ import annotations

from math import exp

import numpy as np

from pricing.covering import Ints
from pricing.pool import Pool
from pricing.throughput import losses_per_hour


def spares_needed(pool: Pool, units: Ints, *, missed: float, replace_hours: float, risk: float) -> int:
    """How many workers more than the rate allows to lose are lost, with probability above `risk`, while one is replaced.

    Args:
        pool: the offers.
        units: active, by lot.
        missed: rate that may be lost without harm, admitted completions per second.
        replace_hours: from a loss to the first completion of another.
        risk: accepted.
    """
    used = np.flatnonzero(units)
    losses = sum(units[lot] * losses_per_hour(pool.offer(int(lot)).survival) for lot in used) * replace_hours
    allowed = int(max(0.0, missed) // float(np.max(pool.lots.rates[used], initial=1e-12)))
    return max(0, poisson_quantile(float(losses), 1 - risk) - allowed)


def poisson_quantile(mean: float, probability: float) -> int:
    """The least k with P(X <= k) >= `probability`; for large means by the normal distribution's bound."""
    if mean > 500:
        return int(mean + 4 * mean**0.5)
    count, term = 0, exp(-mean)
    total = term
    while total < probability and term > 0:
        count += 1
        term *= mean / count
        total += term
    return count


def spared(pool: Pool, units: Ints, count: int) -> Ints:
    """The cheapest `count` workers, or as many as there are, beside the active ones; within the owners' limits."""
    chosen = np.zeros_like(units)
    for lot in np.argsort(pool.lots.costs, kind="stable"):
        if chosen.sum() == count:
            break
        while chosen.sum() < count and chosen[lot] + units[lot] < pool.lots.most[lot] and _has_room(pool, units + chosen, int(lot)):
            chosen[lot] += 1
    return chosen


def _has_room(pool: Pool, units: Ints, lot: int) -> bool:
    owner = pool.lots.owners[lot]
    return owner < 0 or int(units[pool.lots.owners == owner].sum()) < int(pool.lots.caps[owner])
