"""The offers that one job may use now, lot by lot, and why it may not use the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Literal

import numpy as np

from pricing.cost import Cost, Terms, all_in, kept, usable_hours
from pricing.covering import SLACK, Ints, Lots
from pricing.offers import TRUST, Offer, Trust

Broadcast = Callable[[Sequence[float], Sequence[float]], float]
"""Seconds until all workers of a set hold a snapshot, from their uplinks and downlinks in bytes a second."""

Required = Callable[[float], float]
"""Admitted completions per second that keep the learner busy, from the seconds of a broadcast; inf where no rate does."""

Cause = Literal["rate", "broadcast", "offers", "trust", "owner", "usd", "usd_per_hour", "deadline"]
TIE_USD_PER_HOUR = 1e-9  # of two sets at one price the smaller is better


def instant(_ups: Sequence[float], _downs: Sequence[float]) -> float:
    """The broadcast that takes no time."""
    return 0.0


@dataclass(frozen=True, slots=True)
class Need:
    """What the learner needs. The rate is planned `headroom` times as high; it falls due for the broadcast of the very set that brings it."""

    required: Required
    headroom: float = 1.15
    broadcast: Broadcast = instant

    def rate(self, t_bcast: float) -> float:
        """Admitted completions per second to plan for; inf where no rate suffices."""
        return self.required(t_bcast) * self.headroom


def constant(rate: float) -> Required:
    """A rate that does not depend on the broadcast."""
    return lambda _t_bcast: rate


@dataclass(frozen=True, slots=True)
class Limits:
    """What the operator and the job allow.

    Attributes:
        uusd: micro-USD left to spend until the end.
        uusd_per_hour: at most, all in.
        deadline_hours: from now.
        trust: least trust in an owner.
        least_reliability: chance of lasting an hour, unknown ones counted as `UNKNOWN_RELIABILITY`.
        per_owner: workers of one owner at most.
        owner_limits: the same by owner, instead of `per_owner`.
    """

    uusd: int | None = None
    uusd_per_hour: int | None = None
    deadline_hours: float | None = None
    trust: Trust = "any"
    least_reliability: float = 0.0
    per_owner: int | None = None
    owner_limits: Mapping[str, int] = field(default_factory=dict)

    def of_owner(self, owner: str) -> int | None:
        """Workers that this owner may have active; None for any number."""
        return self.owner_limits.get(owner, self.per_owner) if owner else None

    def any_trust(self) -> Limits:
        """The same for any owner."""
        return replace(self, trust="any")

    def any_owner_share(self) -> Limits:
        """The same without limits for each owner."""
        return replace(self, per_owner=None, owner_limits={})


@dataclass(frozen=True, slots=True)
class Held:
    """Workers that are active now, of one offer.

    Attributes:
        offer_id: whose.
        count: workers.
        unpaid_hours: of the minimum, not worked off yet.
        uusd_per_hour: the asked price when they were activated; None if it does not matter.
    """

    offer_id: str
    count: int
    unpaid_hours: float = 0.0
    uusd_per_hour: int | None = None


@dataclass(frozen=True)
class Pool:
    """Lots of equal workers: an offer's warm ones and its others are two lots.

    Attributes:
        offers: usable, in the order of the market.
        places: each lot's offer.
        is_held: each lot's state.
        costs: each lot's, of one worker.
        lots: what is solved.
        refused: why the other offers cannot be used, by id.
    """

    offers: tuple[Offer, ...]
    places: Ints
    is_held: Ints
    costs: tuple[Cost, ...]
    lots: Lots
    refused: Mapping[str, str]

    def offer(self, lot: int) -> Offer:
        """Whose lot it is."""
        return self.offers[int(self.places[lot])]

    def broadcast(self, units: Ints, broadcast: Broadcast) -> float:
        """Seconds of a broadcast to these workers."""
        ups, downs = self.links(units)
        return broadcast(ups, downs) if ups else 0.0

    def links(self, units: Ints) -> tuple[list[float], list[float]]:
        """Uplinks and downlinks of these workers, bytes a second."""
        used = np.flatnonzero(units)
        offers = [self.offer(int(lot)) for lot in used]
        ups = np.repeat([offer.up for offer in offers], units[used]).tolist()
        return ups, np.repeat([offer.down for offer in offers], units[used]).tolist()

    def rate(self, units: Ints) -> float:
        """Admitted completions per second."""
        return float(self.lots.rates @ units)

    def usd_per_hour(self, units: Ints) -> float:
        """All in."""
        return float(sum(self.costs[lot].usd_per_hour * units[lot] for lot in np.flatnonzero(units)))

    def avoidable(self, units: Ints) -> float:
        """All in, without what is due in any case."""
        return float(sum(self.costs[lot].avoidable * units[lot] for lot in np.flatnonzero(units)))

    def current(self) -> Ints:
        """The workers that are active now and may go on, as far as their owners' limits allow."""
        return self.lots.best(np.where(self.is_held > 0, -self.lots.rates, 1.0))

    def suffices(self, units: Ints, need: Need) -> bool:
        """Whether these workers bring the rate that their own broadcast asks for."""
        return self.rate(units) >= need.rate(self.broadcast(units, need.broadcast)) * (1 - SLACK)


def pooled(
    offers: Sequence[Offer], terms: Terms, limits: Limits, held: Sequence[Held] = (), *, stickiness: float = 0.0, now: float = 0.0
) -> Pool:
    """The usable lots. A warm worker counts as cheaper by the share `stickiness` than it is."""
    refused = {offer.id: why for offer in offers if (why := _refusal(offer, terms, limits, now))}
    usable = tuple(offer for offer in offers if offer.id not in refused)
    warm = {one.offer_id: one for one in held}
    places, is_held, costs, most = [], [], [], []
    for place, offer in enumerate(usable):
        active = min(warm[offer.id].count, offer.count) if offer.id in warm else 0
        if active:
            places.append(place)
            is_held.append(1)
            costs.append(kept(offer, terms, warm[offer.id].unpaid_hours))
            most.append(active)
        if offer.count > active:
            places.append(place)
            is_held.append(0)
            costs.append(all_in(offer, terms))
            most.append(offer.count - active)
    money = np.array([cost.avoidable for cost in costs], dtype=np.float64)
    money *= 1 - stickiness * np.array(is_held, dtype=np.float64)
    owners, caps = _owners(usable, places, limits)
    rates = np.array([cost.rate for cost in costs], dtype=np.float64)
    lots = Lots(rates, money + TIE_USD_PER_HOUR, np.array(most, dtype=np.int64), owners, caps)
    return Pool(usable, np.array(places, dtype=np.int64), np.array(is_held, dtype=np.int64), tuple(costs), lots, refused)


def _owners(usable: Sequence[Offer], places: Sequence[int], limits: Limits) -> tuple[Ints, Ints]:
    """The number of each lot's owner, -1 without limit, and the limits by number."""
    numbers: dict[str, int] = {}
    caps: list[int] = []
    owners = []
    for place in places:
        owner = usable[place].owner
        if (cap := limits.of_owner(owner)) is None:
            owners.append(-1)
            continue
        if owner not in numbers:
            numbers[owner] = len(caps)
            caps.append(cap)
        owners.append(numbers[owner])
    return np.array(owners, dtype=np.int64), np.array(caps, dtype=np.int64)


def _refusal(offer: Offer, terms: Terms, limits: Limits, now: float) -> str:
    """Why this offer cannot be used, in words; "" when it can."""
    if offer.count == 0:
        return "no worker of it is left"
    if not offer.completions_per_second > 0:
        return "it brings no completions"
    if not offer.holds(now):
        return "its price has expired"
    if TRUST.index(offer.trust) < TRUST.index(limits.trust):
        return f"its owner's trust is {offer.trust}, the job asks for {limits.trust}"
    if offer.survival < limits.least_reliability:
        return f"its reliability is {offer.survival:.3f}, at least {limits.least_reliability:.3f} is asked for"
    if limits.of_owner(offer.owner) == 0:
        return f"its owner {offer.owner} may have no worker active"
    if usable_hours(offer, terms) <= 0:
        return "its owner's time or traffic is used up"
    if not isfinite(all_in(offer, terms).usd_per_hour):
        return "its reliability is 0: it would be started for ever"
    return ""
