"""How long, and how often, a worker is paid for time alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.market_orders import timed
from coordinator.domain.market_trials import TRIAL_S, hourly, room, too_dear, tried_until
from coordinator.domain.model import QuoteRow
from pricing.pool import Limits

NOW = 1_000.0


def paid(start: float, end: float | None, **changes: object) -> QuoteRow:
    """Paid by the hour in that time, for some job, in some session."""
    return replace(timed(f"j{start}", "w", int(start), 200_000, "", start), ended_at=end, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("quotes", "until"),
    [
        ([], 0.0),
        ([paid(0, 119)], 0.0),
        ([paid(0, 60), paid(500, 559)], 0.0),  # all sessions count
        ([paid(500, 560), paid(0, 60)], 680.0),  # in any order: used up at 560
        ([paid(0, 120)], 240.0),
        ([paid(900, None)], 0.0),
        ([paid(870, None)], 1120.0),  # an open one lasts until now
        ([paid(0, 120), paid(240, 300)], 0.0),  # the second trial lasts
        ([paid(0, 120), paid(240, 360)], 600.0),  # then twice the pause
        ([paid(0, 120), paid(200, 230)], 350.0),  # within the pause nothing new begins
        ([paid(0, 120, uusd_per_million_tokens=5)], 0.0),
        ([paid(0, 120, uusd_per_idle_hour=0)], 0.0),
        ([paid(0, 120), paid(100, 50)], 240.0),  # the clock stepped back
    ],
)
def test_when_it_is_tried_again(quotes: list[QuoteRow], until: float) -> None:
    assert tried_until(quotes, NOW) == until


@given(st.lists(st.floats(1, 5000), max_size=200))
def test_whoever_comes_back_whenever_is_paid_ever_less_often(waits: list[float]) -> None:
    """Half-minute quotes, taken whenever they are offered: trials number at most the doublings of the time."""
    now, quotes = 0.0, []
    for wait in waits:
        now += wait
        if tried_until(quotes, now) <= now:
            quotes.append(paid(now, now + 30))
            now += 30
    trials = sum(one.ended_at - one.made_at for one in quotes if one.ended_at is not None) / TRIAL_S
    assert trials <= 1 or TRIAL_S * (2 ** (int(trials - 1e-9)) - 1) <= now


def test_a_price_may_not_use_more_than_a_tenth_of_the_budget_in_a_trial() -> None:
    """0.3 USD/h for 120 s are 0.01 USD."""
    assert too_dear(300_000, 0.1) == ""
    assert too_dear(300_001, 0.1).endswith("at most 0.3000 USD/h fit")
    assert too_dear(10**12, None) == ""


def test_what_is_left_lasts_for_one_trial() -> None:
    assert room(Limits()) is None
    assert room(Limits(uusd=10_000)) == 300_000
    assert room(Limits(uusd=10_000, uusd_per_hour=100_000)) == 100_000
    assert room(Limits(uusd_per_hour=100_000)) == 100_000


def test_what_workers_may_ask_for_in_an_hour() -> None:
    """1 USD/h: without what machines cost, and ten times less what was spent beyond it."""
    assert hourly(1_000_000, spent_uusd=1_000_000, rented_uusd=0) == 1_000_000
    assert hourly(1_000_000, spent_uusd=900_000, rented_uusd=400_000) == 600_000
    assert hourly(1_000_000, spent_uusd=1_050_000, rented_uusd=0) == 500_000
    assert hourly(1_000_000, spent_uusd=1_100_000, rented_uusd=0) == 0
    assert hourly(1_000_000, spent_uusd=5_000_000, rented_uusd=2_000_000) == 0


def test_pay_beyond_the_asked_price_stays_within_a_tenth_of_the_budget() -> None:
    """All are paid a fifth more than they ask, and as much is asked as is allowed, minute by minute: no hour costs a tenth too much."""
    minutes = [0.0] * 60
    for _ in range(600):
        allowed = hourly(1_000_000, spent_uusd=round(sum(minutes[-60:])), rented_uusd=0)
        minutes.append(1.2 * allowed / 60)
        assert sum(minutes[-60:]) <= 1_100_000
    assert sum(minutes[-120:]) / 2 == pytest.approx(1_015_000, rel=0.02)
