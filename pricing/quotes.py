"""Quotes: what an offer's price by the hour is worth by the token, and until when."""

from __future__ import annotations

from dataclasses import dataclass

from pricing.money import accrued_uusd
from pricing.offers import Offer

TOKENS = 1_000_000


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
