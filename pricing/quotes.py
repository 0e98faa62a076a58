"""Quotes: what an offer's price by the hour is worth by the token, until when; and what its price was before."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from statistics import median

from pricing.money import accrued_uusd
from pricing.offers import Offer

TOKENS = 1_000_000
MOST_PRICES = 1_000


@dataclass(frozen=True, slots=True)
class Quote:
    """The pay agreed at activation.

    Attributes:
        offer_id: whose offer.
        uusd_per_million_tokens: for accepted tokens.
        uusd_per_idle_hour: for active time in which the coordinator gave no work.
        made_at, expires_at: Unix seconds.
    """

    offer_id: str
    uusd_per_million_tokens: int
    uusd_per_idle_hour: int
    made_at: float
    expires_at: float

    def holds(self, now: float) -> bool:
        """Whether work done now is paid by this quote."""
        return self.made_at <= now < self.expires_at

    def owed_uusd(self, *, tokens: int, idle_s: float) -> int:
        """Micro-USD for all accepted tokens and idle seconds under this quote, rounded down once (post what is new of it)."""
        return tokens * self.uusd_per_million_tokens // TOKENS + accrued_uusd(self.uusd_per_idle_hour, seconds=idle_s)


def quoted(offer: Offer, *, tokens_per_s: float, now: float, valid_s: float) -> Quote:
    """The offer's hourly price by the token, at a measured rate of accepted tokens while it has work.

    Rounded up, so that a worker at the measured rate earns its asked price. Raises ValueError when nothing was measured.
    """
    if not tokens_per_s > 0:
        raise ValueError(f"tokens_per_s is {tokens_per_s}: measure the worker's accepted tokens a second first")
    per_million = -(-offer.uusd_per_hour * TOKENS // max(1, round(tokens_per_s * 3600)))
    until = now + valid_s if offer.expires_at is None else min(now + valid_s, offer.expires_at)
    return Quote(offer.id, per_million, offer.uusd_per_hour, now, until)


@dataclass(frozen=True, slots=True)
class PriceHistory:
    """An offer's asked price over time: (Unix seconds, micro-USD per hour) at each change, oldest first, at most `MOST_PRICES`."""

    points: tuple[tuple[float, int], ...] = ()

    def seen(self, now: float, uusd_per_hour: int) -> PriceHistory:
        """With the price seen now. Raises ValueError when `now` is before the last change."""
        if self.points and now < self.points[-1][0]:
            raise ValueError(f"now is {now}: the last price was seen at {self.points[-1][0]}, give a later time")
        if self.points and self.points[-1][1] == uusd_per_hour:
            return self
        return replace(self, points=(*self.points, (now, uusd_per_hour))[-MOST_PRICES:])

    def at(self, when: float) -> int | None:
        """The price then; None before the first one."""
        place = bisect_right(self.points, when, key=lambda point: point[0])
        return self.points[place - 1][1] if place else None

    def median(self, since: float, now: float) -> float | None:
        """The price that half of the time since then undercut; None when none was known."""
        start = self.at(since)
        points = [*([(since, start)] if start is not None else []), *(point for point in self.points if since < point[0] <= now)]
        if not points:
            return None
        ends = [*(when for when, _ in points[1:]), now]
        spans = sorted((price, end - begin) for (begin, price), end in zip(points, ends, strict=True))
        half = sum(span for _, span in spans) / 2
        for price, span in spans:
            half -= span
            if half < 0:
                return float(price)
        return float(median(price for price, _ in spans))
