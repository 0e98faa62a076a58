"""How many machines to rent for a job, from what its workers bring. Machines are sold without a rate: one is tried, measured, then more follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from pricing.feeds.contract import RentalOffer
from pricing.words import counted

MOST_AT_ONCE = 8  # machines that one decision adds


@dataclass(frozen=True, slots=True)
class Standing:
    """What a job has rented.

    Attributes:
        rented: machines that are there or on their way.
        unproven: of them, those whose worker's rate is not measured yet.
        idle: of them, those whose worker was measured and has had no work for long.
        rates: completions per second of measured rented workers, by card.
    """

    rented: int
    unproven: int
    idle: int
    rates: Mapping[str, Sequence[float]]


def wish(standing: Standing, *, short: float) -> tuple[int, str]:
    """Machines to have, and why. `short`: completions per second that are missing; 0 or less: none are."""
    have = standing.rented
    if short <= 0:
        if standing.idle:
            return have - standing.idle, f"{counted(standing.idle, 'rented machine', 'have')} had no work for long"
        return have, "the rate is reached"
    if standing.unproven:
        return have, f"{short:.3g} completions/s are missing; {counted(standing.unproven, 'rented machine', 'are')} being measured"
    known = [rate for rates in standing.rates.values() for rate in rates if rate > 0]
    more = min(ceil(short / fmean(known)), MOST_AT_ONCE) if known else 1
    return have + more, f"{short:.3g} completions/s are missing: {more} more"


def within_hour(count: int, prices: Sequence[int], candidate: int | None, *, allowed: int, others: int) -> tuple[int, str]:
    """As many of `count` machines as an hour's budget pays, and why not all; the words are empty when it pays all.

    Machines that are there are kept while they alone fit; new ones must fit beside the workers that are paid. Micro-USD an hour.

    Args:
        count: machines to have.
        prices: of those that are rented.
        candidate: of the next one; None: none is to be had.
        allowed: in all.
        others: asked by workers that are active for money.
    """
    kept = sorted(prices)
    while sum(kept) > allowed:
        kept.pop()
    most = len(kept)
    if most == len(prices):
        most += max((allowed - others - sum(kept)) // candidate, 0) if candidate else count
    if most >= count:
        return count, ""
    return (
        most,
        f"{most} of {counted(count, 'machine')}: budget.usd_per_hour allows {allowed} uUSD/h, workers ask for {others} of it",
    )


def ranked(offers: Iterable[RentalOffer], rates: Mapping[str, Sequence[float]]) -> tuple[RentalOffer, ...]:
    """The least money per completion first; a card that was never measured counts as the slowest that was."""
    means = {card: fmean(some) for card, some in rates.items() if some and fmean(some) > 0}
    unknown = min(means.values(), default=1.0)
    return tuple(sorted(offers, key=lambda one: (one.uusd_per_hour / means.get(one.card, unknown), one.provider, one.id)))
