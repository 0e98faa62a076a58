"""The activation rule against other programs, on random markets: HiGHS for the linear integer problem, all sets for the fixed point."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from math import exp, inf, log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from pricing.activation import Habits, activate
from pricing.cost import Terms
from pricing.covering import Lots, cover
from pricing.fixpoint import settled
from pricing.offers import Offer
from pricing.pool import Held, Limits, Need, constant, pooled
from pricing.sharing import Claim, shared
from tests.unit.pricing.markets import fluid, offer, random_lots, random_offers


def highs(lots: Lots, need: float) -> float:
    """The optimum by scipy's HiGHS; inf where it finds none."""
    rows, most = [lots.rates], [inf]
    for owner, cap in enumerate(lots.caps):
        rows.append((lots.owners == owner).astype(float))
        most.append(float(cap))
    found = milp(
        lots.costs,
        constraints=LinearConstraint(np.array(rows), [need] + [0.0] * len(lots.caps), most),
        integrality=np.ones(len(lots.costs)),
        bounds=Bounds(0, lots.most),
        options={"mip_rel_gap": 1e-7},
    )
    return inf if found.x is None else float(found.fun)


def ratios(seed: int, markets: int) -> Iterator[float]:
    """Our cost over HiGHS' on markets of 2 to 200 offers, four in ten with owners' limits; wherever it is feasible the rate is brought."""
    random = np.random.default_rng(seed)
    for _ in range(markets):
        lots = random_lots(random, round(exp(random.uniform(log(2), log(200)))), has_owners=random.random() < 0.4)
        need = lots.total_rate() * random.uniform(0.01, 1.02)
        ours, theirs = cover(lots, need), highs(lots, need)
        assert (ours is None) == (theirs == inf)
        if ours is None:
            continue
        assert lots.rates @ ours.units >= need * (1 - 1e-9)
        assert ((ours.units >= 0) & (ours.units <= lots.most)).all()
        assert all(ours.units[lots.owners == owner].sum() <= cap for owner, cap in enumerate(lots.caps))
        assert ours.bound <= theirs + 1e-6
        yield 1.0 if ours.cost == theirs else ours.cost / theirs if theirs > 1e-9 else 1.0 + ours.cost


@pytest.mark.parametrize("markets", [60, pytest.param(2_000, marks=pytest.mark.long)])
def test_against_highs(markets: int) -> None:
    """Median 1.000, 99 of 100 within 1 %."""
    found = np.array(list(ratios(markets, markets)))
    print(f"{len(found)} feasible: median {np.median(found):.6f}, p99 {np.quantile(found, 0.99):.6f}, most {found.max():.6f}")
    assert len(found) > 0.9 * markets
    assert np.median(found) < 1.0005
    assert np.quantile(found, 0.99) <= 1.01
    assert found.min() >= 1 - 1e-6  # HiGHS is optimal: nothing undercuts it


def least_of_all(offers: list[Offer], need: Need, size: float, seeder_up: float) -> float:
    """The cheapest of all sets that bring the rate which their own broadcast asks for; the fluid bound once more, over arrays."""
    sets = np.array(list(product(*(range(one.count + 1) for one in offers)))[1:])
    ups, downs = (np.array([getattr(one, link) for one in offers]) for link in ("up", "down"))
    slowest = np.where(sets > 0, downs, inf).min(axis=1)
    shared_s = sets.sum(axis=1) * size / (seeder_up + sets @ ups)
    seconds = np.maximum(np.maximum(size / seeder_up, size / slowest), shared_s)
    rates = sets @ np.array([one.completions_per_second for one in offers])
    enough = rates >= np.array([need.rate(float(one)) for one in seconds]) * (1 - 1e-9)
    return float(np.min((sets @ np.array([one.usd_per_hour for one in offers]))[enough], initial=inf))


@pytest.mark.parametrize("markets", [60, pytest.param(1_000, marks=pytest.mark.long)])
def test_fixed_point_against_all_sets(markets: int) -> None:
    """Within 2 % on markets of up to 12 offers, fast and slow links, scarce uplinks or not; found wherever there is one."""
    random = np.random.default_rng(markets)
    found = []
    for _ in range(markets):
        size = int(random.integers(2, 13))
        offers = random_offers(random, size, 3 if size < 9 else 1)
        period, seeder_up = float(random.uniform(20, 400)), float(1.25e6 * random.choice([20, 100, 400]))
        spread = seeder_up + sum(one.count * one.up for one in offers)
        most = min(seeder_up, float(np.median([one.down for one in offers]))) * period * 0.9
        sent = min(most, period * random.uniform(0.05, 1.2) * spread / sum(one.count for one in offers))
        rate = random.uniform(0.02, 0.6) * sum(one.count * one.completions_per_second for one in offers)
        required = partial(waiting, rate, period)
        need = Need(required, float(random.choice([1.0, 1.15])), partial(fluid, sent, seeder_up))
        pool = pooled(offers, Terms(), Limits())
        ours, least = settled(pool, need), least_of_all(offers, need, sent, seeder_up)
        assert (ours is None) == (least == inf)
        if ours is not None:
            assert pool.suffices(ours.units, need)
            found.append(pool.usd_per_hour(ours.units) / least)
    print(f"{len(found)} of {markets} feasible: median {np.median(found):.6f}, most {max(found):.6f}")
    assert len(found) > markets / 4
    assert 1 - 1e-6 <= min(found) <= max(found) <= 1.02


def waiting(rate: float, period_s: float, t_bcast: float) -> float:
    """What is due of workers that wait while they load."""
    return rate * period_s / (period_s - t_bcast) if t_bcast < period_s else inf


OFFERS = st.lists(
    st.builds(
        partial(offer, "x"),
        usd=st.sampled_from([0.0, 0.1, 0.2, 0.35, 0.9]),
        rate=st.sampled_from([0.5, 1.0, 2.0, 3.5]),
        count=st.integers(0, 4),
        owner=st.sampled_from(["", "ann", "bob"]),
        trust=st.sampled_from(["any", "audited", "named"]),
        reliability=st.sampled_from([None, 0.0, 0.5, 0.99, 1.0]),
        min_hours=st.sampled_from([0.0, 4.0]),
        expires_at=st.sampled_from([None, 50.0, 500.0]),
    ),
    max_size=8,
).map(lambda offers: [named(one, f"o{place}") for place, one in enumerate(offers)])
LIMITS = st.builds(
    Limits,
    uusd=st.sampled_from([None, 0, 1_000_000, 20_000_000]),
    uusd_per_hour=st.sampled_from([None, 0, 500_000, 2_000_000]),
    trust=st.sampled_from(["any", "audited", "named"]),
    per_owner=st.sampled_from([None, 0, 1, 3]),
)
HELD = st.lists(
    st.builds(Held, st.sampled_from([f"o{i}" for i in range(10)]), st.integers(1, 5)),
    max_size=4,
    unique_by=lambda one: one.offer_id,
)


def named(one: Offer, name: str) -> Offer:
    """The offer under another id."""
    return replace(one, id=name)


@settings(max_examples=150, deadline=None)
@given(OFFERS, LIMITS, HELD, st.sampled_from([0.0, 1.0, 4.0, 12.0]), st.sampled_from([0.0, 0.3]))
def test_no_limit_is_passed(offers: list[Offer], limits: Limits, held: list[Held], rate: float, replace_hours: float) -> None:
    """Whatever is active: budgets, counts, owners' limits, trust and expiry hold, changes lead from what is active to what shall be."""
    terms, habits = Terms(horizon_hours=8, load_s=60), Habits(replace_hours=replace_hours)
    decision = activate(offers, Need(constant(rate)), terms, limits=limits, held=held, habits=habits, now=100.0)
    active: dict[str, int] = {}
    for one in (*decision.picked, *decision.spares):
        active[one.offer_id] = active.get(one.offer_id, 0) + one.count
    known = {one.id: one for one in offers}
    assert all(0 < count <= known[name].count and known[name].holds(100.0) for name, count in active.items())
    assert not active.keys() & decision.refused.keys()
    for owner in ("ann", "bob"):
        mine = sum(count for name, count in active.items() if known[name].owner == owner)
        assert limits.per_owner is None or mine <= limits.per_owner
    assert limits.uusd_per_hour is None or decision.uusd_per_hour_with_spares <= limits.uusd_per_hour + 1  # rounded up twice
    if decision.infeasible_because is None:
        assert decision.rate >= decision.required * (1 - 1e-9)
        assert limits.uusd is None or decision.usd_per_hour * 8 <= limits.uusd / 1e6 + 1e-6
    after = {one.offer_id: one.count for one in held}
    for change in decision.start:
        after[change.offer_id] = after.get(change.offer_id, 0) + change.count
    for change in decision.drain:
        after[change.offer_id] -= change.count
    assert {name: count for name, count in after.items() if count} == active
    assert decision.reason


@settings(max_examples=60, deadline=None)
@given(OFFERS, LIMITS, st.sampled_from([1.0, 4.0, 12.0]))
def test_a_decision_is_steady(offers: list[Offer], limits: Limits, rate: float) -> None:
    """Carried out and asked again with nothing changed, it changes nothing."""
    need, terms = Need(constant(rate)), Terms(horizon_hours=8, load_s=60)
    first = activate(offers, need, terms, limits=limits)
    held = [Held(one.offer_id, one.count) for one in first.picked]
    again = activate(offers, need, terms, limits=limits, held=held)
    if first.infeasible_because is None:
        assert (again.start, again.drain) == ((), ())


@settings(max_examples=60, deadline=None)
@given(OFFERS, st.lists(st.tuples(st.sampled_from([0.0, 2.0, 9.0]), st.sampled_from([1.0, 2.0, 5.0])), max_size=3))
def test_no_worker_serves_two_jobs(offers: list[Offer], wishes: list[tuple[float, float]]) -> None:
    """Together they use no more of an offer than there is."""
    claims = [
        Claim(f"j{place}", Need(constant(rate)), Terms(horizon_hours=8), weight) for place, (rate, weight) in enumerate(wishes)
    ]
    used: dict[str, int] = {}
    for decision in shared(offers, claims, now=0.0).values():
        for one in (*decision.picked, *decision.spares):
            used[one.offer_id] = used.get(one.offer_id, 0) + one.count
    assert all(used.get(one.id, 0) <= one.count for one in offers)
