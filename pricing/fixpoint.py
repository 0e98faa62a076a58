"""The cheapest set that brings the rate which its own broadcast asks for.

A longer broadcast asks for a higher rate, and a set's broadcast is at least as long as that of its slowest member alone. So the market is cut
at each such level: members no slower than it, and the rate for a broadcast of that length, is a plain cover (`pricing.covering`). Where
sharing the uplinks makes the broadcast of the answer longer than the level, the length is raised until answer and question agree, then
lowered by halves; or the seconds that a worker adds to the broadcast get a price. Levels whose linear bound is above the best answer are
left out. In a small market all sets are tried, in a larger one the answer is polished by exchanges of a few workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations_with_replacement
from math import inf
from operator import itemgetter
from typing import NamedTuple, cast

import numpy as np

from pricing.covering import SLACK, Floats, Ints, Lots, cover, relax, trimmed
from pricing.pool import TIE_USD_PER_HOUR, Need, Pool

LEVELS = 32
HALVINGS = 5
EVERY = 1 << 15  # sets; so many are all tried
SMALL = 64  # lots; above it whole units are fine enough to do without exchanges
FEW = 24
STARTS = 6
POINTS = 33


class Effort(NamedTuple):
    """How much is tried.

    Attributes:
        lots: up to so many.
        raises: of the length in question, until the answer agrees.
        growths: lengths for which a broadcast gets a price, in the level's own.
        tolls: prices tried for each.
        patience: levels without a better answer, one after the other.
        cover: how a question is answered.
    """

    lots: float
    raises: int
    growths: tuple[float, ...]
    tolls: int
    patience: int
    cover: Callable[[Lots, float], Ints | None]


def _whole(lots: Lots, rate: float) -> Ints | None:
    found = cover(lots, rate)
    return None if found is None else found.units


def _rounded(lots: Lots, rate: float) -> Ints | None:
    found = relax(lots, rate, ROUGH)
    return None if found is None else trimmed(lots, found.units, rate)


ROUGH = 24  # bisections: to 1e-7
EFFORTS = (
    Effort(1_000, 12, (1.0, 1.1, 1.25, 1.5, 2.0, 3.0), 8, LEVELS, _whole),
    Effort(inf, 6, (1.0, 1.3), 7, 2, _rounded),
)


@dataclass(frozen=True)
class Settled:
    """Units, and what they cost in the money of `Pool.lots`; no cover of any level costs less than `bound`."""

    units: Ints
    cost: float
    bound: float


class _Found(NamedTuple):
    """A set that suffices, its cost, and the question that it answers."""

    cost: float
    units: Ints
    lots: Lots
    rate: float


def settled(pool: Pool, need: Need) -> Settled | None:
    """The cheapest set found that suffices; None when none was found."""
    levels = _levels(pool, need)
    bound = levels[0][0] if levels else 0.0
    found = sorted(_searched(pool, need, levels), key=itemgetter(0))[:STARTS]
    if len(pool.places) > SMALL or _is_flat(pool, need):
        return _refined(pool, need, found[0], bound) if found else None
    if np.prod(pool.lots.most + 1.0) <= EVERY:
        return _first_of_all(pool, need, Settled(found[0].units, found[0].cost, bound) if found else None, bound)
    polished = [_polished(pool, need, one.units) for one in found]
    costs = [float(pool.lots.costs @ units) for units in polished]
    return Settled(polished[int(np.argmin(costs))], min(costs), bound) if found else None


def _searched(pool: Pool, need: Need, levels: list[tuple[float, float, Lots]]) -> list[_Found]:
    """Sets that suffice, level by level while one can still be cheaper."""
    effort = next(effort for effort in EFFORTS if len(pool.places) <= effort.lots)
    found: list[_Found] = []
    best, idle = inf, 0
    for bound, level, lots in levels:
        if bound >= best or idle >= effort.patience:
            break
        new = [
            _Found(float(pool.lots.costs @ units), units, asked, rate)
            for units, asked, rate in _at_level(pool, lots, need, level, effort)
        ]
        least = min((one.cost for one in new), default=inf)
        idle = 0 if least < best or best == inf else idle + 1
        best = min(best, least)
        found += new
    return found


def _refined(pool: Pool, need: Need, found: _Found, bound: float) -> Settled:
    """The exact answer to the question that led here, if it suffices and costs less."""
    units = _whole(found.lots, found.rate)
    if units is not None and float(pool.lots.costs @ units) < found.cost and pool.suffices(units, need):
        return Settled(units, float(pool.lots.costs @ units), bound)
    return Settled(found.units, found.cost, bound)


def _is_flat(pool: Pool, need: Need) -> bool:
    """Whether the broadcast makes no difference."""
    return need.rate(pool.broadcast(pool.lots.most, need.broadcast)) == need.rate(0.0)


def _levels(pool: Pool, need: Need) -> list[tuple[float, float, Lots]]:
    """Bound, seconds and lots of each level that can suffice, by bound. Levels that ask for one rate are one."""
    alone = np.array([need.broadcast([offer.up], [offer.down]) for offer in map(pool.offer, range(len(pool.places)))])
    times = np.unique(alone)
    if len(times) > LEVELS:
        times = times[np.linspace(0, len(times) - 1, LEVELS).round().astype(int)]
    rates = {need.rate(float(time)): float(time) for time in times}  # the longest of those that ask for one rate
    found = []
    for rate, time in rates.items():
        lots = replace(pool.lots, most=np.where(alone <= time, pool.lots.most, 0))
        if rate < inf and (relaxed := relax(lots, rate, ROUGH)) is not None:
            found.append((relaxed.bound, time, lots))
    return sorted(found, key=itemgetter(0))


def _at_level(pool: Pool, lots: Lots, need: Need, level: float, effort: Effort) -> Iterator[tuple[Ints, Lots, float]]:
    """Sets of this level that suffice, with the lots and the rate they cover."""
    units = effort.cover(lots, need.rate(level))
    if units is not None and pool.suffices(units, need):
        yield units, lots, need.rate(level)
        return
    yield from _raised(pool, lots, need, level, effort)
    yield from _shared(pool, lots, need, level, effort)


def _raised(pool: Pool, lots: Lots, need: Need, level: float, effort: Effort) -> Iterator[tuple[Ints, Lots, float]]:
    """Covers for a broadcast as long as that of the last one, until it is; then for shorter ones, by halves."""
    low = high = level
    for _ in range(effort.raises):
        units = _covered(lots, need, high, effort)
        if units is None:
            return
        if pool.suffices(units, need):
            yield units, lots, need.rate(high)
            break
        low, high = high, max(pool.broadcast(units, need.broadcast), high * 1.001)
    else:
        return
    for _ in range(HALVINGS):
        time = (low + high) / 2
        units = _covered(lots, need, time, effort)
        if units is not None and pool.suffices(units, need):
            yield units, lots, need.rate(time)
            high = time
        else:
            low = time


def _shared(pool: Pool, lots: Lots, need: Need, level: float, effort: Effort) -> Iterator[tuple[Ints, Lots, float]]:
    """Covers that stay within a length because the broadcast has a price there: USD per hour for a second."""
    for growth in effort.growths:
        time = level * growth
        units = _covered(lots, need, time, effort)
        if units is None:
            return
        if (took := pool.broadcast(units, need.broadcast)) <= 0:
            return  # no links make it shorter
        low, high = 0.0, inf
        toll = float(np.abs(lots.costs) @ units) / took
        for _ in range(effort.tolls):
            priced = replace(lots, costs=lots.costs + toll * _delays(pool, units, need))
            units = cast(Ints, _covered(priced, need, time, effort))  # prices do not make rate scarce
            if pool.suffices(units, need):
                yield units, priced, need.rate(time)
                high = toll
            else:
                low = toll
            toll = (low + high) / 2 if high < inf else toll * 3


def _delays(pool: Pool, units: Ints, need: Need) -> Floats:
    """By how many seconds one more worker of each lot lengthens the broadcast to these units; interpolated over uplinks."""
    ups, downs = pool.links(units)
    before = need.broadcast(ups, downs)
    every = np.array([pool.offer(lot).up for lot in range(len(pool.places))])
    points = np.unique(np.quantile(every, np.linspace(0, 1, POINTS)))
    wide = max(downs)
    delays = [need.broadcast([*ups, float(up)], [*downs, wide]) - before for up in points]
    longer: Floats = np.interp(every, points, delays)
    return longer


def _covered(lots: Lots, need: Need, time: float, effort: Effort) -> Ints | None:
    """Units for the rate that a broadcast of this length asks for."""
    rate = need.rate(time)
    return effort.cover(lots, rate) if rate < inf else None


def _first_of_all(pool: Pool, need: Need, best: Settled | None, bound: float) -> Settled | None:
    """The cheapest of all sets that suffice, in a market of few workers."""
    sets = np.indices((pool.lots.most + 1).tolist()).reshape(len(pool.places), -1).T
    costs = sets @ pool.lots.costs
    hopeful = np.flatnonzero(
        (sets @ pool.lots.rates >= need.rate(0.0) * (1 - SLACK)) & (costs < (inf if best is None else best.cost))
    )
    for place in hopeful[np.argsort(costs[hopeful], kind="stable")]:
        units = sets[place]
        if _keeps_caps(pool.lots, units) and pool.suffices(units, need):
            return Settled(units, float(costs[place]), bound)
    return best


def _polished(pool: Pool, need: Need, units: Ints) -> Ints:
    """After all exchanges that save money."""
    while (better := next((other for other in _exchanges(pool, units) if pool.suffices(other, need)), None)) is not None:
        units = better
    return units


def _exchanges(pool: Pool, units: Ints) -> Iterator[Ints]:
    """Neighbours that cost less, cheapest first: one or two workers out, none or one in; two in where the lots are few."""
    costs = pool.lots.costs
    out = _few(units, 2)[1:]
    into = _few(pool.lots.most - units, 2 if len(units) <= FEW else 1)
    moves = ((float(costs[list(gone)].sum() - costs[list(come)].sum()), gone, come) for gone in out for come in into)
    saving = [move for move in moves if move[0] > TIE_USD_PER_HOUR / 2]
    for _, gone, come in sorted(saving, key=lambda move: -move[0]):
        other = units.copy()
        np.subtract.at(other, list(gone), 1)
        np.add.at(other, list(come), 1)
        if _keeps_caps(pool.lots, other):
            yield other


def _few(units: Ints, most: int) -> list[tuple[int, ...]]:
    """All ways to take none up to `most` of these units."""
    lots = [int(lot) for lot in np.flatnonzero(units)]
    ways: list[tuple[int, ...]] = [()]
    for size in range(1, most + 1):
        ways += [way for way in combinations_with_replacement(lots, size) if all(way.count(lot) <= units[lot] for lot in way)]
    return ways


def _keeps_caps(lots: Lots, units: Ints) -> bool:
    return all(int(units[part].sum()) <= lots.cap(part) for part in lots.capped)
