"""What a worker costs in all: USD per hour of output, with transfer, warm-up, restarts and the minimum that is paid.

H hours of output are wanted of it, w hours of warm-up precede them, it is lost λ times an hour and then warmed up (or replaced) again:

    starts per hour   1/H + λ             a worker that is warm already: λ
    time paid         max(1 + w·starts, minimum/H)
    USD per hour      price · time paid + traffic

Rejected completions cost through the rate: `rate` counts what is admitted, `per_thousand` divides by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from pricing.money import uusd_to_usd
from pricing.offers import Offer
from pricing.throughput import losses_per_hour

GB = 1e9
HOUR_S = 3600.0


@dataclass(frozen=True, slots=True)
class Terms:
    """What a job asks of whichever worker.

    Attributes:
        horizon_hours: how long it will be used; inf where the end is far.
        refresh_s: between two publications (κ·T_train); inf without any.
        refresh_bytes: fetched at each.
        relayed: copies of it that a worker sends on, on average.
        start_bytes: fetched at start (the keyframe).
        load_s: from there to the first completion.
        completion_bytes_up, completion_bytes_down: traffic of one completion with the coordinator.
        admitted: share of its completions that end in a step, where nothing was measured.
    """

    horizon_hours: float = inf
    refresh_s: float = inf
    refresh_bytes: float = 0.0
    relayed: float = 1.0
    start_bytes: float = 0.0
    load_s: float = 0.0
    completion_bytes_up: float = 0.0
    completion_bytes_down: float = 0.0
    admitted: float = 1.0

    def __post_init__(self) -> None:
        for name in ("horizon_hours", "refresh_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give a time above 0")
        if not 0 < self.admitted <= 1:
            raise ValueError(f"admitted is {self.admitted}: give a share above 0 and at most 1")


@dataclass(frozen=True, slots=True)
class Cost:
    """USD per hour of output of one worker, by cause, and the rate that it buys.

    Attributes:
        price: the asked price for the hour itself.
        warm_up: the asked price for the time before output, at start and after losses.
        minimum: paid beyond use.
        transfer: traffic.
        rate: admitted completions per second.
        due: what is owed for it by the hour even if it is let go now.
    """

    price: float
    warm_up: float
    minimum: float
    transfer: float
    rate: float
    due: float = 0.0

    @property
    def usd_per_hour(self) -> float:
        """All in."""
        return self.price + self.warm_up + self.minimum + self.transfer

    @property
    def avoidable(self) -> float:
        """What letting it go saves by the hour."""
        return max(0.0, self.usd_per_hour - self.due)

    def per_thousand(self) -> float:
        """USD per 1,000 admitted completions; inf when none comes."""
        return self.usd_per_hour / (HOUR_S * self.rate) * 1000 if self.rate > 0 else inf


def usable_hours(offer: Offer, terms: Terms) -> float:
    """How long the owner lets it work for this job: its time, its traffic, the horizon."""
    hours = terms.horizon_hours if offer.available_hours is None else min(terms.horizon_hours, offer.available_hours)
    traffic = sum(_gb_per_hour(offer, terms))
    if offer.gb_limit is None or traffic == 0:
        return hours
    return max(0.0, min(hours, (offer.gb_limit - terms.start_bytes / GB) / traffic))


def warm_up_hours(offer: Offer, terms: Terms) -> float:
    """From the start of pay to the first completion."""
    return (terms.start_bytes / offer.down + terms.load_s) / HOUR_S


def all_in(offer: Offer, terms: Terms) -> Cost:
    """One worker that would be started now. Infinite where it cannot be used at all."""
    hours = usable_hours(offer, terms)
    if hours <= 0:
        return Cost(inf, 0.0, 0.0, 0.0, _rate(offer, terms))
    return _cost(offer, terms, starts=1 / hours + losses_per_hour(offer.survival), least=offer.min_hours / hours)


def kept(offer: Offer, terms: Terms, unpaid_hours: float = 0.0) -> Cost:
    """One worker that is warm; `unpaid_hours` of its minimum are not worked off and will be paid in any case."""
    hours = usable_hours(offer, terms)
    if hours <= 0:
        return Cost(inf, 0.0, 0.0, 0.0, _rate(offer, terms))
    least = unpaid_hours / hours
    return _cost(offer, terms, starts=losses_per_hour(offer.survival), least=least, due=offer.usd_per_hour * least)


def _cost(offer: Offer, terms: Terms, *, starts: float, least: float, due: float = 0.0) -> Cost:
    price = offer.usd_per_hour
    if starts == inf:
        return Cost(inf, 0.0, 0.0, 0.0, _rate(offer, terms), due)
    warm = warm_up_hours(offer, terms) * starts
    up, down = _gb_per_hour(offer, terms)
    down += terms.start_bytes / GB * starts
    transfer = up * uusd_to_usd(offer.uusd_per_gb_up) + down * uusd_to_usd(offer.uusd_per_gb_down)
    return Cost(price, price * warm, price * max(0.0, least - 1 - warm), transfer, _rate(offer, terms), due)


def _rate(offer: Offer, terms: Terms) -> float:
    return offer.completions_per_second * terms.admitted


def _gb_per_hour(offer: Offer, terms: Terms) -> tuple[float, float]:
    """Sent and received while it works."""
    refreshes = HOUR_S / terms.refresh_s
    completions = HOUR_S * offer.completions_per_second
    up = terms.relayed * terms.refresh_bytes * refreshes + terms.completion_bytes_up * completions
    down = terms.refresh_bytes * refreshes + terms.completion_bytes_down * completions
    return up / GB, down / GB


def reserved_uusd(usd: float) -> int:
    """USD to reserve, in micro-USD, rounded up: what is spent is never more. Raises ValueError if it is not finite."""
    if not 0 <= usd < inf:
        raise ValueError(f"{usd} USD cannot be reserved: give a finite amount of 0 or more")
    return ceil(usd * 1_000_000 - 1e-6)  # binary noise of a whole number does not cost a micro-dollar
