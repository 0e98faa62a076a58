"""Plans for a rate that is given: the asked prices alone."""

from __future__ import annotations

import pytest

from coordinator.domain.plan import plan
from coordinator.domain.plan_answer import LEAST_RATE, MOST_RATE
from coordinator.domain.plan_facts import PlanRefused
from tests.unit.domain.plans import MARKET, job, question
from tests.unit.pricing.markets import offer


def test_a_small_fleet_by_hand() -> None:
    """1.6/s with a headroom of 1.25: four of `a` for 0.40 USD/h; 1,600 rollouts take 1,000 s."""
    answer = plan(question(required_rate=1.6))
    cheapest = answer.fleets[0].fleet
    assert (answer.required_rate, answer.planned_rate, answer.kappa) == (1.6, 2.0, 1)
    assert cheapest.counts == {"a": 4}
    assert cheapest.usd_per_hour == pytest.approx(0.4)
    assert cheapest.rate == pytest.approx(2.0)
    assert cheapest.hours == pytest.approx(1000 / 3600)
    assert cheapest.usd == pytest.approx(0.4 * 1000 / 3600)
    assert cheapest.usd_per_step == pytest.approx(0.4 * 10 / 3600)
    assert cheapest.usd_per_thousand == pytest.approx(0.4 * 10 / 3600 / 16 * 1000)
    assert (cheapest.forecast, cheapest.t_bcast_s) == (None, None)


def test_the_fastest_has_the_most_reserve() -> None:
    """Up to half as much again: 3.0/s are four of `a` and one of `b`; the cheapest is the best price of a completion."""
    cheapest, balanced, fastest = plan(question(required_rate=1.6)).fleets
    assert fastest.fleet.counts == {"a": 4, "b": 1}
    assert fastest.fleet.usd_per_hour == pytest.approx(0.7)
    assert balanced.fleet is cheapest.fleet
    assert "the cheapest one as well" in balanced.reason
    assert "0.3000 USD/h more than the cheapest" in fastest.reason


@pytest.mark.parametrize(
    ("budget", "counts"),
    [({"usd_per_hour": 0.59}, {"a": 4}), ({"usd": 0.65 / 3.6}, {"a": 3, "b": 1}), ({"usd": 0.71 / 3.6}, {"a": 4, "b": 1})],
)
def test_the_reserve_keeps_the_budgets(budget: dict[str, float], counts: dict[str, int]) -> None:
    """By the hour, or over the 1,000 s that the job takes: 2.5/s cost 0.60 USD/h, 3.0/s 0.70."""
    answer = plan(question(job(**budget), required_rate=1.6))
    assert answer.fleets[2].fleet.counts == counts


@pytest.mark.parametrize(
    ("budget", "term", "words"),
    [
        ({"usd_per_hour": 0.39}, "usd_per_hour", "allows 0.3900 USD/h"),
        ({"usd": 0.11}, "usd", "0.1100 USD are left"),
        ({"deadline_hours": 0.25}, "deadline", "plan for 1.778"),
    ],
)
def test_budgets(budget: dict[str, float], term: str, words: str) -> None:
    """0.40 USD/h, 0.1111 USD and 0.278 h are needed."""
    answer = plan(question(job(**budget), required_rate=1.6))
    assert answer.fleets == ()
    assert answer.binding_term == term
    assert words in (answer.infeasible_because or "")


def test_too_few_workers() -> None:
    """All bring 4.0 of 5.0; what they bring takes longer."""
    answer = plan(question(required_rate=4.0))
    assert "find more workers" in (answer.infeasible_because or "")
    assert answer.most_allowed is not None
    assert answer.most_allowed.counts == {"a": 4, "b": 2}
    assert answer.most_allowed.hours == pytest.approx(1600 / 4.0 / 3600)


def test_nobody() -> None:
    """An empty market is infeasible, and nothing is allowed."""
    answer = plan(question(market=(), required_rate=1.0))
    assert answer.most_allowed is None
    assert answer.fleets == ()


def test_what_is_paid_at_least_counts_to_the_end() -> None:
    """`a` for two hours at least costs 0.80 USD; within 0.2 USD only `b` does: two for 0.28 h."""
    market = [offer("a", 0.10, 0.5, count=4, min_hours=2.0), *MARKET[1:]]
    free = plan(question(market=market, required_rate=1.6))
    assert free.fleets[0].fleet.counts == {"a": 4}
    assert free.fleets[0].fleet.usd == pytest.approx(0.8)
    tight = plan(question(job(usd=0.2), market, required_rate=1.6))
    assert tight.fleets[0].fleet.counts == {"b": 2}
    assert tight.fleets[0].fleet.usd == pytest.approx(0.6 * 1000 / 3600)


def test_a_kappa_that_is_set() -> None:
    """The job's own, up to S + 1."""
    assert plan(question(job(bound=4, publish_every=3), required_rate=1.0)).kappa == 3


def test_the_least_rate_is_found_beside_the_most() -> None:
    """Fifteen digits apart: the free worker does, whatever else is on the market. Less than that is refused."""
    market = [offer("tiny", 0.3, 1e-9), offer("free", 0.0, 1.0), offer("huge", 0.3, MOST_RATE, count=2)]
    assert plan(question(market=market, required_rate=LEAST_RATE)).fleets[0].fleet.counts == {"free": 1}
    with pytest.raises(PlanRefused, match=r"required_rate is 9e-07: give completions per second from 1e-06 to 1e\+09"):
        plan(question(market=market, required_rate=0.9 * LEAST_RATE))
