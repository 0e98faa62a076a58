"""Several jobs share one pool by weight."""

from __future__ import annotations

import pytest

from pricing.cost import Terms
from pricing.decision import Activation
from pricing.pool import Held, Need, constant
from pricing.sharing import Claim, shared, water_filled
from tests.unit.pricing.markets import offer

MARKET = (offer("a", 0.1, 1.0, count=6), offer("b", 0.2, 1.0, count=6))


def claim(job: str, rate: float, weight: float = 1.0, held: tuple[Held, ...] = ()) -> Claim:
    """A job without headroom."""
    return Claim(job, Need(constant(rate), 1.0), Terms(horizon_hours=10), weight, held=held)


def workers(decision: Activation) -> int:
    """Active ones."""
    return sum(one.count for one in decision.picked)


def test_water() -> None:
    """Small needs are met, the rest is shared by weight."""
    assert water_filled({"a": 1, "b": 10, "c": 10}, {"a": 1, "b": 1, "c": 2}, 10) == {"a": 1, "b": 3, "c": 6}
    assert water_filled({"a": 1, "b": 2}, {"a": 1, "b": 5}, 10) == {"a": 1, "b": 2}
    assert water_filled({}, {}, 10) == {}


def test_enough_for_all() -> None:
    """The heavier one has the cheaper workers; none is given twice."""
    decided = shared(MARKET, [claim("light", 4, 1), claim("heavy", 6, 2)])
    assert {job: workers(one) for job, one in decided.items()} == {"heavy": 6, "light": 4}
    assert (decided["heavy"].usd_per_hour, decided["light"].usd_per_hour) == (pytest.approx(0.6), pytest.approx(0.8))
    assert all(one.infeasible_because is None for one in decided.values())


def test_too_little() -> None:
    """12 for 24: one third and two thirds, and each is told."""
    decided = shared(MARKET, [claim("light", 12, 1), claim("heavy", 12, 2)])
    assert {job: workers(one) for job, one in decided.items()} == {"heavy": 8, "light": 4}
    assert decided["light"].infeasible_because == (
        "2 jobs share the pool and it brings less than they need: with weight 1 this one may plan for 33% of its rate: "
        "find more workers, or raise its weight"
    )
    assert (decided["light"].headroom, decided["light"].binding) == (1.0, "offers")


def test_a_worker_changes_hands_when_it_is_let_go() -> None:
    """First the light job drains what is beyond its share, then the heavy one gets it."""
    held = (Held("a", 6), Held("b", 6))
    first = shared(MARKET, [claim("light", 12, 1, held), claim("heavy", 12, 2)])
    assert (workers(first["light"]), workers(first["heavy"])) == (4, 0)
    left = tuple(Held(one.offer_id, one.count) for one in first["light"].picked)
    second = shared(MARKET, [claim("light", 12, 1, left), claim("heavy", 12, 2)])
    assert (workers(second["light"]), workers(second["heavy"])) == (4, 8)
    assert second["light"].drain == ()


def test_nothing_needed_nothing_shared() -> None:
    """A job that waits takes no part."""
    decided = shared(MARKET, [claim("idle", 0), claim("busy", 12)])
    assert (workers(decided["idle"]), workers(decided["busy"])) == (0, 12)
    assert shared(MARKET, []) == {}


def test_no_weight() -> None:
    """It would never get anything."""
    with pytest.raises(ValueError, match="weight of a is 0: give a number above 0"):
        shared(MARKET, [claim("a", 1, 0)])
