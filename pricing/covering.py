"""The least money for a rate: whole units of priced lots, bounded, with a cap per owner.

    min Σ cost·n   subject to   Σ rate·n >= need,   0 <= n <= most,   Σ n of a capped owner <= cap

A price λ on the rate splits the problem owner by owner (Lagrange), and the best λ gives the bound of its linear relaxation. Measured from
the solution at λ any other one costs

    bound + Σ penalties of what differs + λ·(rate − need)

so only lots whose penalty is below what the best known solution loses can differ at all: the core (Balas and Zemel 1980, Pisinger 1997).
The core is searched by dynamic programming over (rate, money) states, nearest lots first, dominated and hopeless states dropped. Work is
bounded by `WIDTH` states and the last of `STAGES` lots; where neither limit is met the answer is optimal to `EXACT`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

WIDTH = 2_000
STAGES = (40, 400)  # a first look at the nearest lots makes the second one short
EXACT = 1e-7  # relative to the bound: nobody can tell such solutions apart
SLACK = 1e-9  # relative: what sums of floats may miss of the rate
BISECTIONS = 60


@dataclass(frozen=True)
class Lots:
    """Equal units at one price, lot by lot.

    Attributes:
        rates: of one unit, above 0, any unit of work per second.
        costs: of one unit, any money per time; what costs less than nothing is taken in any case.
        most: units there are.
        owners: number of the owner, -1 for a lot that no cap concerns.
        caps: units allowed by owner number.
    """

    rates: Floats
    costs: Floats
    most: Ints
    owners: Ints
    caps: Ints

    @cached_property
    def capped(self) -> tuple[Ints, ...]:
        """The lots of each owner whose cap can bind."""
        held = np.flatnonzero((self.owners >= 0) & (self.most > 0))
        order = held[np.argsort(self.owners[held], kind="stable")]
        parts = np.split(order, np.flatnonzero(np.diff(self.owners[order])) + 1)
        return tuple(part for part in parts if len(part) and self.most[part].sum() > self.cap(part))

    @cached_property
    def free(self) -> Ints:
        """The other lots."""
        is_free = self.most > 0
        is_free[self._capped_lots] = False
        return np.flatnonzero(is_free)

    @cached_property
    def _capped_lots(self) -> Ints:
        return np.concatenate([*self.capped, np.zeros(0, dtype=np.int64)])

    def cap(self, part: Ints) -> int:
        """Units that the owner of these lots may have."""
        return int(self.caps[self.owners[part[0]]])

    def best(self, reduced: Floats) -> Ints:
        """Units that lower Σ reduced·n most."""
        units = np.where(reduced < 0, self.most, 0)
        if not len(self._capped_lots):
            return units
        order = self._capped_lots[np.lexsort((reduced[self._capped_lots], self.owners[self._capped_lots]))]
        owners, wanted = self.owners[order], units[order]
        before = np.cumsum(wanted) - wanted
        first = np.flatnonzero(np.diff(owners, prepend=-1))
        before -= np.repeat(before[first], np.diff(first, append=len(order)))
        units[order] = np.minimum(wanted, np.clip(self.caps[owners] - before, 0, None))
        return units

    def total_rate(self) -> float:
        """What all that may be used bring together."""
        return float(self.rates @ self.best(-self.rates))


class Relaxed(NamedTuple):
    """The best price of the rate: what it proves and where it leads."""

    price: float
    bound: float  # no solution costs less
    units: Ints  # cheapest at this price; brings the rate


class Cover(NamedTuple):
    """A solution and what no solution can undercut."""

    units: Ints
    cost: float
    bound: float


class Choice(NamedTuple):
    """Other units of some lots: by how much the rate moves, at what penalty; a row of units each."""

    lots: Ints
    units: Ints
    rates: Floats
    penalties: Floats

    def nearness(self) -> float:
        """The least penalty for one of rate, up or down."""
        return min(self.distance(1), self.distance(-1))

    def distance(self, sign: int) -> float:
        """The least penalty for one of rate in this direction."""
        moves = self.rates * sign
        return float(np.min(self.penalties[moves > 0] / moves[moves > 0], initial=np.inf))


def relax(lots: Lots, need: float, bisections: int = BISECTIONS) -> Relaxed | None:
    """The linear relaxation by its dual; None when all lots together do not bring `need`. The bound holds after any number of bisections."""
    if lots.total_rate() < need * (1 - SLACK):
        return None
    low, high = 0.0, _enough(lots, need)
    for _ in range(bisections):
        price = (low + high) / 2
        if not low < price < high or high - low <= high * 1e-13:
            break
        if _brings(lots, lots.best(lots.costs - price * lots.rates), need):
            high = price
        else:
            low = price
    reduced = lots.costs - high * lots.rates
    units = lots.best(reduced)
    return Relaxed(high, high * need + float(reduced @ units), units)


def _enough(lots: Lots, need: float) -> float:
    """A price at which the rate comes."""
    price = max(float(np.max(lots.costs / lots.rates, initial=0.0)), 1e-12)
    while not _brings(lots, lots.best(lots.costs - price * lots.rates), need):
        price *= 2
    return price


def _brings(lots: Lots, units: Ints, need: float) -> bool:
    return float(lots.rates @ units) >= need * (1 - SLACK)


def cover(lots: Lots, need: float) -> Cover | None:
    """The cheapest whole units that bring `need`; None when there are not enough."""
    relaxed = relax(lots, need)
    if relaxed is None:
        return None
    units = trimmed(lots, relaxed.units, need)
    tolls = _tolls(lots, relaxed)
    for stages in STAGES:
        units = trimmed(lots, _Search(lots, need, relaxed, tolls, units).run(stages), need)
    return Cover(units, float(lots.costs @ units), relaxed.bound)


def _tolls(lots: Lots, relaxed: Relaxed) -> list[float]:
    """What one more unit under each owner's cap would be worth, in the order of `Lots.capped`."""
    reduced = lots.costs - relaxed.price * lots.rates
    worth = []
    for part in lots.capped:
        cap = lots.cap(part)
        units = np.sort(np.repeat(reduced[part], np.minimum(lots.most[part], cap + 1)))
        worth.append(max(0.0, -float(units[max(cap - 1, 0)])))
    return worth


def trimmed(lots: Lots, units: Ints, need: float) -> Ints:
    """Without the units that are not missed and cost something, dearest rate first."""
    kept = units.copy()
    spare = float(lots.rates @ kept) - need * (1 - SLACK)
    used = np.flatnonzero((kept > 0) & (lots.costs > 0) & (lots.rates <= spare))
    for lot in used[np.argsort(-lots.costs[used] / lots.rates[used], kind="stable")]:
        gone = min(int(kept[lot]), int(spare // lots.rates[lot]))
        kept[lot] -= gone
        spare -= gone * lots.rates[lot]
    return kept


class _Search:
    """Dynamic programming over the core; `run` once."""

    def __init__(self, lots: Lots, need: float, relaxed: Relaxed, tolls: list[float], first: Ints) -> None:
        self._lots = lots
        self._need = need
        self._base = relaxed
        self._tolls = tolls
        self._best_units = first
        self._best = float(lots.costs @ first) - relaxed.bound  # what the best known solution loses
        self._near = abs(relaxed.bound) * EXACT
        self._penalties = lots.costs - relaxed.price * lots.rates
        for part, toll in zip(lots.capped, tolls, strict=True):
            self._penalties[part] += toll
        self._penalties = np.abs(self._penalties)
        self._trail: list[tuple[Choice, Ints, Ints]] = []
        self._winner: tuple[int, int] | None = None  # stage, state

    def run(self, stages: int) -> Ints:
        """The best units found among those that differ from the base in that many lots or capped owners at most."""
        choices = self._choices(stages)
        up = _suffix_minima([choice.distance(1) for choice in choices])
        down = _suffix_minima([choice.distance(-1) for choice in choices])
        excess = np.array([float(self._lots.rates @ self._base.units) - self._need])
        penalties = np.zeros(1)
        for stage, choice in enumerate(choices):
            if self._best <= self._near or not len(excess):
                break
            excess, penalties = self._stage(choice, excess, penalties, (up[stage + 1], down[stage + 1]))
        return self._recalled()

    def _stage(self, choice: Choice, excess: Floats, penalties: Floats, ahead: tuple[float, float]) -> tuple[Floats, Floats]:
        """All states after one more choice; remembers where each came from."""
        rows = len(choice.rates)
        moved = (excess[:, None] + choice.rates[None, :]).ravel()
        paid = (penalties[:, None] + choice.penalties[None, :]).ravel()
        money = paid + self._base.price * moved
        whole = np.flatnonzero(moved >= -SLACK * self._need)
        winner = whole[np.argmin(money[whole])] if len(whole) else -1
        if winner >= 0 and money[winner] < self._best - self._near:
            self._best = float(money[winner])
            self._winner = (len(self._trail), int(winner))
        ahead_up, ahead_down = ahead[0], min(ahead[1], self._base.price)
        with np.errstate(invalid="ignore"):  # 0 x inf: nothing is missing, so nothing need come
            hope = paid + np.nan_to_num(np.where(moved < 0, -moved * ahead_up, moved * ahead_down), nan=0.0, posinf=np.inf)
        kept = np.flatnonzero(hope < self._best - self._near)
        kept = kept[_undominated(money[kept], moved[kept])]
        if len(kept) > WIDTH:
            kept = kept[np.argpartition(hope[kept], WIDTH)[:WIDTH]]
        every = np.append(kept, winner) if winner >= 0 else kept  # the winner may be hopeless: it is done
        self._trail.append((choice, every // rows, every % rows))
        if self._winner is not None and self._winner[0] == len(self._trail) - 1:
            self._winner = (self._winner[0], len(every) - 1)
        return moved[kept], paid[kept]

    def _recalled(self) -> Ints:
        """The units of the winner, stage by stage back to the base."""
        if self._winner is None:
            return self._best_units
        units = self._base.units.copy()
        last, state = self._winner
        for choice, parents, rows in reversed(self._trail[: last + 1]):
            units[choice.lots] = choice.units[rows[state]]
            state = int(parents[state])
        return units

    def _choices(self, most: int) -> list[Choice]:
        """What can differ from the base and still beat the best known solution, nearest first."""
        lots, away = self._lots, self._penalties / self._lots.rates
        near = lots.free[self._penalties[lots.free] < self._best]
        near = near[np.argsort(away[near], kind="stable")[:most]]
        ranked = [(float(away[lot]), partial(self._one, int(lot))) for lot in near]
        ranked += [
            (float(away[part].min()), partial(self._owner, part, toll)) for part, toll in zip(lots.capped, self._tolls, strict=True)
        ]
        built = [build() for _, build in sorted(ranked, key=itemgetter(0))[:most]]
        return sorted((choice for choice in built if len(choice.rates) > 1), key=Choice.nearness)

    def _one(self, lot: int) -> Choice:
        """Another number of one lot's units."""
        units, penalty = int(self._base.units[lot]), float(self._penalties[lot])
        reach = int(min(WIDTH, self._best / penalty)) if penalty > 0 else WIDTH
        counts = np.arange(max(0, units - reach), min(int(self._lots.most[lot]), units + reach) + 1)
        away = counts - units
        return Choice(np.array([lot]), counts[:, None], away * self._lots.rates[lot], np.abs(away) * penalty)

    def _owner(self, part: Ints, toll: float) -> Choice:
        """Other units of a capped owner's lots: all mixes within the cap whose penalty may still pay, at most `WIDTH`."""
        lots, base, cap = self._lots, self._base.units, self._lots.cap(part)
        is_open = self._penalties[part] < self._best
        lots_open, penalties = part[is_open], np.zeros(1)
        units, counts = np.zeros((1, 0), dtype=np.int64), np.array([int(base[part[~is_open]].sum())])
        for lot in lots_open:
            options = np.arange(min(int(lots.most[lot]), cap) + 1)
            counts = (counts[:, None] + options).ravel()
            penalties = (penalties[:, None] + np.abs(options - base[lot]) * self._penalties[lot]).ravel()
            units = np.column_stack([np.repeat(units, len(options), axis=0), np.tile(options, len(units))])
            kept = np.flatnonzero((counts <= cap) & (penalties <= self._best))
            kept = kept[np.argsort(penalties[kept], kind="stable")][:WIDTH]
            counts, penalties, units = counts[kept], penalties[kept], units[kept]
        penalties = penalties + toll * (cap - counts)
        kept = np.flatnonzero(penalties <= self._best)
        return Choice(lots_open, units[kept], (units[kept] - base[lots_open]) @ lots.rates[lots_open], penalties[kept])


def _suffix_minima(values: list[float]) -> list[float]:
    """The least of what comes at or after each place; inf after the last."""
    least = [float("inf")]
    for value in reversed(values):
        least.append(min(value, least[-1]))
    return least[::-1]


def _undominated(money: Floats, rates: Floats) -> Ints:
    """States that no other beats in both money and rate, cheapest first."""
    order = np.lexsort((-rates, money))
    reached = np.maximum.accumulate(rates[order])
    return order[np.diff(reached, prepend=-np.inf) > 0]
