"""A chosen set as picks, changes and sentences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pricing.covering import Ints
from pricing.decision import Change, Picked
from pricing.money import uusd_to_usd
from pricing.pool import Held, Pool


def counted(count: int, noun: str, verb: str = "") -> str:
    """A noun, and a verb that is given in the plural, as the number asks: 1 worker brings, 5 workers bring."""
    words = f"{count} {noun}{'' if count == 1 else 's'}"
    if not verb:
        return words
    irregular = {"are": "is", "have": "has"}
    return f"{words} {irregular.get(verb, f'{verb}s') if count == 1 else verb}"


def picks(pool: Pool, units: Ints) -> tuple[Picked, ...]:
    """The lots in use, in the market's order; an offer's warm workers and its others apart."""
    order = np.argsort(np.array([cost.per_thousand() for cost in pool.costs]), kind="stable")
    places = {int(lot): place + 1 for place, lot in enumerate(order)}
    return tuple(_pick(pool, int(lot), int(units[lot]), places[int(lot)]) for lot in np.flatnonzero(units))


def _pick(pool: Pool, lot: int, count: int, place: int) -> Picked:
    cost, offer = pool.costs[lot], pool.offer(lot)
    worth = f"{cost.per_thousand():.4f} USD per 1,000 completions, place {place} of {len(pool.places)}"
    if pool.is_held[lot]:
        reason = f"active and warm; {worth}"
    elif cost.usd_per_hour == 0:
        reason = "asks for no money"
    else:
        reason = worth
    return Picked(offer.id, count, cost.usd_per_hour, cost.rate, reason)


def changes(pool: Pool, units: Ints, held: Sequence[Held]) -> tuple[tuple[Change, ...], tuple[Change, ...]]:
    """What to start and what to drain."""
    wanted: dict[str, int] = {}
    for pick in picks(pool, units):
        wanted[pick.offer_id] = wanted.get(pick.offer_id, 0) + pick.count
    active = {one.offer_id: one.count for one in held}
    start = tuple(
        Change(offer_id, count - active.get(offer_id, 0), "adds the rate that is missing at the least cost")
        for offer_id, count in wanted.items()
        if count > active.get(offer_id, 0)
    )
    drain = tuple(
        Change(one.offer_id, one.count - wanted.get(one.offer_id, 0), _farewell(pool, one))
        for one in held
        if one.count > wanted.get(one.offer_id, 0)
    )
    return start, drain


def _farewell(pool: Pool, held: Held) -> str:
    """Why an active worker is let go."""
    if held.offer_id in pool.refused:
        return pool.refused[held.offer_id]
    offer = next((offer for offer in pool.offers if offer.id == held.offer_id), None)
    if offer is None:
        return "its offer is gone"
    if held.uusd_per_hour is not None and offer.uusd_per_hour > held.uusd_per_hour:
        before, after = uusd_to_usd(held.uusd_per_hour), offer.usd_per_hour
        return f"its price rose from {before:.4f} to {after:.4f} USD/h and others bring the rate for less"
    if offer.count < held.count:
        return f"its offer has {counted(offer.count, 'worker')} left"
    return "the rate comes for less without it"
