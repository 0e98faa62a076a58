"""Plans on random markets: budgets kept, the rate brought, HiGHS not undercut by more than 1 %, and a looser bound never worse."""

from __future__ import annotations

import itertools
from math import inf

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.plan import plan
from coordinator.domain.plan_answer import Plan, Question
from coordinator.domain.plan_fleet import P95, broadcast_of
from pricing.offers import Offer
from tests.properties.test_activation import highs
from tests.unit.domain.plans import job, question
from tests.unit.pricing.markets import lots, offer, random_lots

NOISE = 0.03  # what a forecast may be off

OFFERS = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.05, 0.2, 0.35, 1.1]),
        st.sampled_from([0.2, 0.5, 1.0, 3.0]),
        st.integers(0, 5),
        st.sampled_from([2.0, 20.0, 300.0]),
        st.sampled_from([0.5, 0.9, 1.0]),
        st.sampled_from([0.0, 1.0]),
    ),
    min_size=0,
    max_size=6,
)


def market(drawn: list[tuple[float, float, int, float, float, float]]) -> list[Offer]:
    """Offers from drawn figures."""
    return [
        offer(f"o{i}", usd, rate, count=count, up_mbps=mbps, down_mbps=2 * mbps, reliability=stays, min_hours=least)
        for i, (usd, rate, count, mbps, stays, least) in enumerate(drawn)
    ]


def check(asked: Question, answer: Plan) -> None:
    """What holds of every plan."""
    budget, offers = asked.job.budget, asked.by_id
    assert (answer.infeasible_because is None) == bool(answer.fleets)
    for named in answer.fleets:
        fleet = named.fleet
        assert all(0 < count <= offers[name].count for name, count in fleet.counts.items())
        assert fleet.rate == pytest.approx(sum(count * offers[name].completions_per_second for name, count in fleet.counts.items()))
        assert fleet.rate >= answer.required_rate * asked.headroom * (1 - 1e-9)
        assert fleet.usd_per_hour >= answer.fleets[0].fleet.usd_per_hour
        assert fleet.asked_usd_per_hour <= fleet.usd_per_hour * (1 + 1e-9)
        assert fleet.usd_per_hour <= (budget.usd_per_hour or inf) * (1 + 1e-9)
        assert fleet.usd <= (budget.usd or inf) * (1 + 1e-9)
        assert fleet.hours <= (budget.deadline_hours or inf)
        assert named.reason


@settings(max_examples=60, deadline=None)
@given(
    OFFERS,
    st.sampled_from([0.3, 1.6, 4.0]),
    st.sampled_from([None, 0.1, 0.5]),
    st.sampled_from([None, 0.15, 2.0]),
    st.sampled_from([None, 0.2, 0.5]),
)
def test_a_given_rate(drawn, rate, hourly, usd, deadline) -> None:
    """Nothing is over a budget or short of the rate, and none costs less than the cheapest."""
    asked = question(job(usd_per_hour=hourly, usd=usd, deadline_hours=deadline), market(drawn), required_rate=rate)
    check(asked, plan(asked))


@settings(max_examples=12, deadline=None)
@given(OFFERS, st.integers(0, 5), st.sampled_from([None, 0.5]), st.sampled_from([None, 0.15]), st.sampled_from([None, 0.4]))
def test_a_whole_plan(drawn, bound, hourly, usd, deadline) -> None:
    """The same, with the capacity model; each fleet's broadcast is that of its own links."""
    asked = question(job(bound=bound, steps=60, usd_per_hour=hourly, usd=usd, deadline_hours=deadline), market(drawn))
    answer = plan(asked)
    check(asked, answer)
    for named in answer.fleets:
        counts = named.fleet.counts
        ups = [asked.by_id[name].up for name, count in counts.items() for _ in range(count)]
        downs = [asked.by_id[name].down for name in counts]
        assert named.fleet.kappa is not None
        assert named.fleet.t_bcast_s == pytest.approx(broadcast_of(asked.facts, named.fleet.kappa)(ups, downs))
        said = named.fleet.forecast
        assert said is not None
        assert 0 <= said.utilisation <= 1
        assert all(0 <= age <= bound for age in said.staleness)
        # no learner is faster than its training
        assert named.fleet.hours >= 60 * 10 / 3600


@settings(max_examples=5, deadline=None)
@given(OFFERS.filter(lambda drawn: any(count for _, _, count, *_ in drawn)), st.sampled_from([0.5, 4.0]), st.sampled_from([1, 2]))
def test_a_looser_bound_is_never_worse(drawn, tokens_per_s, kappa) -> None:
    """At one kappa the learner is busy for no less of the time with a larger S, up to what a forecast may be off."""
    asked = question(job(publish_every=kappa), market(drawn), tokens_per_s=tokens_per_s * 10)
    lines = [line for line in plan(asked).bounds if line.kappa == kappa]
    for tighter, looser in itertools.pairwise(lines):
        assert looser.utilisation >= tighter.utilisation - NOISE


@pytest.mark.parametrize("markets", [15, pytest.param(600, marks=pytest.mark.long)])
def test_a_given_rate_against_highs(markets: int) -> None:
    """The asked prices of the cheapest fleet against the optimum of the integer problem: within 1 %, feasible where it is."""
    random = np.random.default_rng(markets)
    ratios = []
    for _ in range(markets):
        drawn = random_lots(random, int(random.integers(2, 60)), has_owners=False)
        offers = [
            offer(f"o{i}", round(float(cost), 6), float(rate), count=int(most))
            for i, (rate, cost, most) in enumerate(zip(drawn.rates, drawn.costs, drawn.most, strict=True))
        ]
        need = drawn.total_rate() * float(random.uniform(0.01, 1.02)) / 1.15
        asked = question(job(), offers, required_rate=need, headroom=1.15)
        answer = plan(asked)
        plain = lots(drawn.rates.tolist(), [one.usd_per_hour for one in offers], drawn.most.tolist())
        least = highs(plain, need * 1.15)
        assert (answer.infeasible_because is not None) == (least == inf)
        if least < inf:
            cost = answer.fleets[0].fleet.asked_usd_per_hour
            assert cost >= least - 1e-6
            ratios.append(cost / least if least > 1e-9 else 1.0 + cost)
    print(f"{len(ratios)} feasible: median {np.median(ratios):.6f}, p99 {np.quantile(ratios, 0.99):.6f}, most {max(ratios):.6f}")
    assert np.median(ratios) < 1.0005
    assert np.quantile(ratios, 0.99) <= 1.01


def test_p95() -> None:
    """A delivery takes 0.5 to 1.5 of its mean, evenly: 95 in 100 within 1.45."""
    assert pytest.approx(1.45) == P95
