"""Rate and broadcast agree; the comparison with trying all sets on many markets is in tests/properties/test_activation.py."""

from __future__ import annotations

from functools import partial
from math import inf

import numpy as np
import pytest

from pricing import fixpoint
from pricing.cost import Terms
from pricing.fixpoint import settled
from pricing.pool import Limits, Need, Pool, constant, pooled
from tests.unit.pricing.markets import fluid, offer, random_offers


def waiting(pool: Pool, share: float, period_s: float, size: float, seeder_up: float) -> Need:
    """A share of what the pool brings, by workers that wait while they load."""
    rate = share * pool.lots.total_rate()
    required = lambda t_bcast: rate * period_s / (period_s - t_bcast) if t_bcast < period_s else inf  # noqa: E731
    return Need(required, 1.0, partial(fluid, size, seeder_up))


@pytest.mark.parametrize("seed", range(8))
def test_exchanges_reach_what_trying_all_finds(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within 2 %, on markets whose uplinks are scarce."""
    random = np.random.default_rng(seed)
    pool = pooled(random_offers(random, 8, 2), Terms(), Limits())
    need = waiting(pool, 0.4, 100, 5e8, 2e7)
    best = settled(pool, need)
    monkeypatch.setattr(fixpoint, "EVERY", 0)
    found = settled(pool, need)
    assert (found is None) == (best is None)
    if found is not None and best is not None:
        assert pool.suffices(found.units, need)
        assert best.cost <= found.cost <= 1.02 * best.cost


@pytest.mark.parametrize(("size", "seeder_up"), [(2e8, 1.25e9), (2e9, 1.25e8), (4e8, 1e7)])
@pytest.mark.parametrize("limits", [Limits(), Limits(per_owner=3)])
def test_a_large_market(size: float, seeder_up: float, limits: Limits) -> None:
    """Fast links, shared uplinks, a slow seeder: the rate is brought, near the bound of a market without broadcast where it is short."""
    random = np.random.default_rng(2)
    people = [f"p{i % 400}" for i in range(1_200)]
    market = [offer(o.id, o.usd_per_hour, o.completions_per_second, up_mbps=o.up_mbps, down_mbps=o.down_mbps, owner=people[i])
              for i, o in enumerate(random_offers(random, 1_200, 1))]  # fmt: skip
    pool = pooled(market, Terms(), limits)
    need = waiting(pool, 0.1, 120, size, seeder_up)
    found = settled(pool, need)
    assert found is not None
    assert pool.suffices(found.units, need)
    assert found.bound <= found.cost * (1 + 1e-9)
    assert found.cost <= found.bound * (1.01 if seeder_up != 1.25e8 else 1.3)


def test_no_length_of_broadcast_will_do() -> None:
    """Each worker alone is fast enough, together they never are: 100 MB each over a seeder of 2.5 MB/s that nobody helps."""
    pool = pooled([offer("a", up_mbps=1e-9, count=40)], Terms(), Limits())
    assert settled(pool, waiting(pool, 0.5, 60, 1e8, 2.5e6)) is None
    crowd = pooled([offer(f"o{i}", up_mbps=1e-9) for i in range(70)], Terms(), Limits())
    assert settled(crowd, waiting(crowd, 0.5, 60, 1e8, 2.5e6)) is None


@pytest.mark.parametrize("every", [fixpoint.EVERY, 0])
def test_owners_limits_hold(every: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cheap owner may bring one worker only, though two would do; when all sets are tried, and in exchanges."""
    monkeypatch.setattr(fixpoint, "EVERY", every)
    market = [offer("a", 0.1, 1.0, count=2, owner="ann", up_mbps=80.0), offer("b", 0.3, 1.0, count=2, up_mbps=80.0)]
    pool = pooled(market, Terms(), Limits(per_owner=1))
    found = settled(pool, waiting(pool, 0.5, 60, 1e7, 1e6))
    assert found is not None
    assert found.units.tolist() == [1, 1]


def test_few_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answer and question do not agree in time, the priced broadcast still finds a set."""
    monkeypatch.setattr(fixpoint, "EVERY", 0)
    monkeypatch.setattr(fixpoint, "EFFORTS", [fixpoint.EFFORTS[0]._replace(raises=1)])
    pool = pooled([offer("a", 0.10, 1.0, up_mbps=1e-9, count=10), offer("b", 0.12, 1.0, up_mbps=8.0, count=10)], Terms(), Limits())
    found = settled(pool, waiting(pool, 0.25, 60, 1e7, 1e6))
    assert found is not None
    assert found.units.tolist() == [1, 5]


def test_a_broadcast_that_takes_no_time_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of floats 18 digits apart can leave a cover short of its rate; no price on a second that is not there mends that."""
    monkeypatch.setattr(Pool, "suffices", lambda *_: False)
    pool = pooled([offer("a", 0.1, 1.0, count=3), offer("b", 0.3, 2.0)], Terms(), Limits())
    assert settled(pool, Need(constant(1.0), 1.15)) is None
