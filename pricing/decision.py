"""What activation decides, with reasons in words."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from pricing.cost import HOUR_S, reserved_uusd
from pricing.pool import Cause


@dataclass(frozen=True, slots=True)
class Picked:
    """Workers of one offer that are to be active.

    Attributes:
        offer_id, count: whose, how many.
        usd_per_hour: of one, all in.
        rate: of one, admitted completions per second.
        reason: why these.
    """

    offer_id: str
    count: int
    usd_per_hour: float
    rate: float
    reason: str


@dataclass(frozen=True, slots=True)
class Change:
    """Workers of one offer to start or to drain, and why."""

    offer_id: str
    count: int
    reason: str


@dataclass(frozen=True, slots=True)
class Activation:
    """The set to have active.

    Attributes:
        picked: by offer, in the market's order.
        spares: workers to keep warm beside them; `usd_per_hour` is what they cost if they are paid while they wait.
        start, drain: what differs from the workers that were active.
        rate: admitted completions per second of `picked`.
        required: without headroom, for the broadcast to `picked`.
        headroom: asked for.
        t_bcast_s: seconds of a broadcast to `picked`.
        asked_usd_per_hour: Σ of the asked prices.
        usd_per_hour: all in.
        bound_usd_per_hour: no set can cost less all in; meaningful for a fresh choice.
        binding: what would save most, or bring the rate, if it were relaxed.
        reason: the decision in words.
        infeasible_because: why no allowed set brings the rate; None when `picked` does. `picked` is then the most that is allowed.
        refused: why offers cannot be used, by id.
    """

    picked: tuple[Picked, ...]
    spares: tuple[Picked, ...]
    start: tuple[Change, ...]
    drain: tuple[Change, ...]
    rate: float
    required: float
    headroom: float
    t_bcast_s: float
    asked_usd_per_hour: float
    usd_per_hour: float
    bound_usd_per_hour: float
    binding: Cause
    reason: str
    infeasible_because: str | None
    refused: dict[str, str]

    @property
    def uusd_per_hour(self) -> int:
        """All in, to reserve: whole micro-USD, rounded up."""
        return reserved_uusd(self.usd_per_hour)

    @property
    def uusd_per_hour_with_spares(self) -> int:
        """The same where spares are paid while they wait."""
        return reserved_uusd(self.usd_per_hour + sum(one.count * one.usd_per_hour for one in self.spares))

    @property
    def usd_per_thousand(self) -> float:
        """USD per 1,000 admitted completions; inf when none comes."""
        return self.usd_per_hour / (HOUR_S * self.rate) * 1000 if self.rate > 0 else inf
