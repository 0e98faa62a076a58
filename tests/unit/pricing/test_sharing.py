"""Several jobs share one pool by weight."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pricing.cost import Terms
from pricing.decision import Activation
from pricing.pool import Held, Need, constant
from pricing.sharing import Claim, Unmeasured, shared, water_filled
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


def test_jobs_that_share_no_worker_do_not_reduce_each_other() -> None:
    """6 each of two kinds, and each job may use one kind only: both have all they need."""
    first = replace(claim("first", 6), usable=frozenset({"a"}))
    second = replace(claim("second", 6), usable=frozenset({"b"}))
    decided = shared(MARKET, [first, second])
    assert [(workers(one), one.infeasible_because) for one in decided.values()] == [(6, None), (6, None)]


def test_what_a_job_may_not_use_is_left_to_the_others() -> None:
    """It needs 12 and may use the 6 of one kind, which it shares with one that may use all: 6 and 6, and only the first lacks any."""
    narrow = replace(claim("narrow", 12), usable=frozenset({"b"}))
    decided = shared(MARKET, [narrow, claim("wide", 6)])
    assert (workers(decided["narrow"]), workers(decided["wide"])) == (6, 6)
    assert (
        decided["narrow"].infeasible_because
        == "all that may be used bring 6 completions/s of 12 needed: find more workers, or lower the rate"
    )
    assert decided["wide"].infeasible_because is None


def test_a_job_whose_need_is_not_known_finds_its_share_free() -> None:
    """12 that one job holds and needs; another one of twice its weight was not measured yet: 4 are kept."""
    held = (Held("a", 6), Held("b", 6))
    new = Unmeasured(2.0, frozenset({"a", "b"}))
    decided = shared(MARKET, [claim("old", 12, 1, held)], unmeasured=[new])["old"]
    assert workers(decided) == 4
    assert decided.infeasible_because is not None
    assert decided.infeasible_because.startswith("2 jobs share the pool and it brings less than they need")
    assert workers(shared(MARKET, [claim("old", 4, 1)], unmeasured=[new])["old"]) == 4
    narrow = Unmeasured(2.0, frozenset({"b"}))
    assert workers(shared(MARKET, [claim("old", 12, 1, held)], unmeasured=[narrow])["old"]) == 6
    stranger = Unmeasured(2.0, frozenset({"c"}))
    assert workers(shared(MARKET, [claim("old", 12, 1, held)], unmeasured=[stranger])["old"]) == 12


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.1, 20), st.floats(0.1, 5), st.sets(st.sampled_from("ab"))), min_size=1, max_size=4),
    st.lists(st.tuples(st.floats(0.1, 5), st.sets(st.sampled_from("ab"))), max_size=2),
)
def test_no_worker_is_given_twice_and_nobody_has_more_than_it_may(
    jobs: list[tuple[float, float, set[str]]], others: list[tuple[float, set[str]]]
) -> None:
    """Whoever may use the pool, and whoever is waited for."""
    claims = [replace(claim(f"j{n}", rate, weight), usable=frozenset(use)) for n, (rate, weight, use) in enumerate(jobs)]
    decided = shared(MARKET, claims, unmeasured=[Unmeasured(weight, frozenset(use)) for weight, use in others])
    for one in MARKET:
        assert sum(pick.count for found in decided.values() for pick in found.picked if pick.offer_id == one.id) <= one.count
    for asked in claims:
        used = {pick.offer_id for pick in decided[asked.job_id].picked}
        assert used <= (asked.usable or set())
        assert workers(decided[asked.job_id]) <= asked.need.rate(0.0) + 1  # whole workers of one a second


def test_no_rate_suffices() -> None:
    """A share of what has no end is none: `activate` says why there is no set."""
    decided = shared(MARKET, [claim("endless", inf), claim("other", 3)])
    assert workers(decided["other"]) == 3
    assert decided["endless"].infeasible_because is not None


def test_no_weight() -> None:
    """It would never get anything."""
    with pytest.raises(ValueError, match="weight of a is 0: give a number above 0"):
        shared(MARKET, [claim("a", 1, 0)])
