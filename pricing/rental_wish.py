"""How many machines to rent for a job, from what its workers bring. Machines are sold without a rate: one is tried, measured, then more follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean

from pricing.feeds.contract import RentalOffer

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
            return have - standing.idle, f"{standing.idle} rented machines have had no work for long"
        return have, "the rate is reached"
    if standing.unproven:
        return have, f"{short:.3g} completions/s are missing; the rates of {standing.unproven} rented machines are being measured"
    known = [rate for rates in standing.rates.values() for rate in rates if rate > 0]
    more = min(ceil(short / fmean(known)), MOST_AT_ONCE) if known else 1
    return have + more, f"{short:.3g} completions/s are missing: {more} more"


def ranked(offers: Iterable[RentalOffer], rates: Mapping[str, Sequence[float]]) -> tuple[RentalOffer, ...]:
    """The least money per completion first; a card that was never measured counts as the slowest that was."""
    means = {card: fmean(some) for card, some in rates.items() if some and fmean(some) > 0}
    unknown = min(means.values(), default=1.0)
    return tuple(sorted(offers, key=lambda one: (one.uusd_per_hour / means.get(one.card, unknown), one.provider, one.id)))
