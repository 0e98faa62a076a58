"""All-in cost, by hand."""

from __future__ import annotations

from math import exp, inf

import pytest

from pricing.cost import Terms, all_in, kept, reserved_uusd, usable_hours, warm_up_hours
from tests.unit.pricing.markets import offer


def test_the_price_alone() -> None:
    """Where nothing else costs."""
    cost = all_in(offer(usd=0.36, rate=0.1), Terms())
    assert (cost.usd_per_hour, cost.rate) == (0.36, 0.1)
    assert cost.per_thousand() == pytest.approx(1.0)  # 360 an hour


def test_rejection_costs_rate() -> None:
    """Half admitted: twice the money for each."""
    cost = all_in(offer(usd=0.36, rate=0.1), Terms(admitted=0.5))
    assert cost.per_thousand() == pytest.approx(2.0)
    assert all_in(offer(rate=0.0), Terms()).per_thousand() == inf


def test_warm_up_is_paid_once_and_after_each_loss() -> None:
    """8 GB at 1 Gbit/s are 64 s, 56 s to load: 2 min; in 10 h once, and once an hour where a loss an hour is expected."""
    terms = Terms(horizon_hours=10, start_bytes=8e9, load_s=56)
    assert warm_up_hours(offer(), terms) == pytest.approx(1 / 30)
    assert all_in(offer(usd=3.0), terms).warm_up == pytest.approx(3.0 / 30 * 0.1)
    assert all_in(offer(usd=3.0, reliability=exp(-1)), terms).warm_up == pytest.approx(3.0 / 30 * 1.1)
    assert kept(offer(usd=3.0), terms).warm_up == 0


def test_traffic_both_ways() -> None:
    """60 refreshes an hour of 0.1 GB down, twice that up; 3,600 completions of 10 kB up and 1 kB down; the keyframe in 10 h."""
    terms = Terms(
        horizon_hours=10,
        refresh_s=60,
        refresh_bytes=1e8,
        relayed=2.0,
        start_bytes=8e9,
        completion_bytes_up=10_000,
        completion_bytes_down=1_000,
    )
    cost = all_in(offer(usd=0, rate=1.0, uusd_per_gb_up=10_000, uusd_per_gb_down=20_000), terms)
    assert cost.transfer == pytest.approx((12 + 0.036) * 0.01 + (6 + 0.0036 + 0.8) * 0.02)


def test_the_minimum_is_paid() -> None:
    """4 h at least and 1 h needed: the price four times over; warm-up counts towards it."""
    assert all_in(offer(usd=1.0, min_hours=4), Terms(horizon_hours=1)).usd_per_hour == 4.0
    cost = all_in(offer(usd=1.0, min_hours=4), Terms(horizon_hours=1, load_s=1800))
    assert (cost.warm_up, cost.minimum) == (0.5, 2.5)
    assert all_in(offer(usd=1.0, min_hours=4), Terms(horizon_hours=8)).minimum == 0


def test_what_is_due_anyway_cannot_be_saved() -> None:
    """3 h still to pay, 6 h to go: half of it is due; 3 h to pay and 1 h to go: all of it."""
    half = kept(offer(usd=1.0), Terms(horizon_hours=6), unpaid_hours=3)
    assert (half.usd_per_hour, half.due, half.avoidable) == (1.0, 0.5, 0.5)
    whole = kept(offer(usd=1.0), Terms(horizon_hours=1), unpaid_hours=3)
    assert (whole.usd_per_hour, whole.avoidable) == (3.0, 0.0)


def test_the_owner_limits_the_hours() -> None:
    """By time and by traffic: 100 GB less 8 for the keyframe at 12 GB/h."""
    terms = Terms(horizon_hours=10, refresh_s=60, refresh_bytes=1e8, start_bytes=8e9)
    assert usable_hours(offer(), terms) == 10
    assert usable_hours(offer(available_hours=4), terms) == 4
    assert usable_hours(offer(gb_limit=100), terms) == pytest.approx(92 / 12)
    assert usable_hours(offer(gb_limit=1), terms) == 0
    assert usable_hours(offer(gb_limit=1), Terms(horizon_hours=10)) == 10


def test_unusable() -> None:
    """No hours, or started for ever."""
    assert all_in(offer(available_hours=0), Terms()).usd_per_hour == inf
    assert kept(offer(available_hours=0), Terms()).usd_per_hour == inf
    assert all_in(offer(reliability=0.0), Terms()).usd_per_hour == inf


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ({"horizon_hours": 0}, "horizon_hours is 0: give a time above 0"),
        ({"refresh_s": -1}, "refresh_s is -1"),
        ({"admitted": 0}, "admitted is 0: give a share"),
        ({"admitted": 1.1}, r"admitted is 1\.1"),
    ],
)
def test_no_terms(terms: dict[str, float], words: str) -> None:
    """Values that mean nothing."""
    with pytest.raises(ValueError, match=words):
        Terms(**terms)


def test_reserve_rounds_up() -> None:
    """Never short, and exact where it is exact."""
    assert [reserved_uusd(usd) for usd in (0, 0.35, 0.1 + 0.2, 0.0000011)] == [0, 350_000, 300_000, 2]
    with pytest.raises(ValueError, match="inf USD cannot be reserved"):
        reserved_uusd(inf)
