"""Covers small enough to solve by hand or by trying all; the comparison with HiGHS is in tests/properties/test_activation.py."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pricing import covering
from pricing.covering import Lots, cover, relax, trimmed
from tests.unit.pricing.markets import lots, random_lots


def best_of_all(market: Lots, need: float) -> float:
    """The least cost of all sets, inf when none suffices."""
    sets = np.array(list(itertools.product(*(range(most + 1) for most in market.most.tolist()))))
    allowed = sets @ market.rates >= need * (1 - 1e-9)
    for owner, cap in enumerate(market.caps):
        allowed &= sets[:, market.owners == owner].sum(axis=1) <= cap
    return float(np.min((sets @ market.costs)[allowed], initial=np.inf))


def test_greedy_is_not_enough() -> None:
    """Cheapest rate first takes 10 + 10 for 12; 6 + 6 at a higher price by the unit is cheaper."""
    found = cover(lots([10, 6], [10, 6.5], [2, 2]), 12)
    assert found is not None
    assert (found.units.tolist(), found.cost) == ([0, 2], 13.0)
    assert found.bound == pytest.approx(10 + 2.0)


def test_volunteers_first() -> None:
    """What is free is taken before what is not, as far as it helps."""
    found = cover(lots([1, 1, 5], [0, 0.2, 0.9], [3, 9, 1]), 4)
    assert found is not None
    assert (found.units.tolist(), found.cost) == ([3, 1, 0], 0.2)


def test_nothing_is_needed() -> None:
    """Then nothing is used."""
    found = cover(lots([1], [1], [5]), 0)
    assert found is not None
    assert found.units.tolist() == [0]


def test_not_enough() -> None:
    """All of it, or none."""
    market = lots([1, 2], [1, 1], [5, 5])
    exact = cover(market, 15)
    assert exact is not None
    assert exact.units.tolist() == [5, 5]
    assert cover(market, 15.001) is None
    assert cover(lots([], [], []), 1) is None
    assert relax(lots([], [], []), 1) is None


def test_an_owner_may_have_so_many() -> None:
    """The cheap owner brings two, not four; with none allowed, nobody of hers."""
    for cap, units, cost in ((4, [4, 0], 4.0), (2, [2, 2], 6.0), (0, [0, 4], 8.0)):
        found = cover(lots([1, 1], [1, 2], [4, 9], [0, -1], (cap,)), 4)
        assert found is not None
        assert (found.units.tolist(), found.cost) == (units, cost)


def test_the_best_mix_of_an_owner() -> None:
    """One worker of an owner: the large dear one, since the small cheap one does not bring enough."""
    found = cover(lots([3, 5, 2], [1, 3, 5], [1, 1, 1], [0, 0, -1], (1,)), 5)
    assert found is not None
    assert found.units.tolist() == [0, 1, 0]


def test_what_pays_is_taken_anyway() -> None:
    """A cost below 0 is a gain."""
    found = cover(lots([1, 1], [-1, 2], [3, 3]), 2)
    assert found is not None
    assert found.units.tolist() == [3, 0]


def test_trimmed() -> None:
    """The dearest rate goes first; what would be missed, or is free, stays."""
    market = lots([2, 3, 1], [2, 6, 0], [5, 5, 5])
    assert trimmed(market, np.array([2, 2, 2]), 7).tolist() == [1, 1, 2]
    assert trimmed(market, np.array([1, 0, 0]), 2).tolist() == [1, 0, 0]


@pytest.mark.parametrize("seed", range(60))
def test_against_all_sets(seed: int) -> None:
    """Optimal, with and without owners' limits; the bound is one."""
    random = np.random.default_rng(seed)
    market = random_lots(random, int(random.integers(1, 7)), has_owners=seed % 2 == 1)
    market = Lots(market.rates, market.costs, np.minimum(market.most, 4), market.owners, market.caps)
    need = market.total_rate() * random.uniform(0.05, 1.05)
    found, best = cover(market, need), best_of_all(market, need)
    if found is None:
        assert best == np.inf
        return
    assert market.rates @ found.units >= need * (1 - 1e-9)
    assert ((found.units >= 0) & (found.units <= market.most)).all()
    assert found.cost == pytest.approx(best, rel=1e-6)
    assert found.bound <= best + 1e-9


def test_bounded_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With next to no room for states the answer still suffices, and is near."""
    monkeypatch.setattr(covering, "WIDTH", 2)
    random = np.random.default_rng(1)
    for _ in range(20):
        market = random_lots(random, 12, has_owners=True)
        need = market.total_rate() * 0.6
        found = cover(market, need)
        assert found is not None
        assert market.rates @ found.units >= need * (1 - 1e-9)
        assert found.cost <= found.bound + market.costs.max() * 2
