"""A quote by the token is worth the asked hour; price history is a step function."""

from __future__ import annotations

import pytest

from pricing.quotes import MOST_PRICES, PriceHistory, quoted
from tests.unit.pricing.markets import offer


def test_an_hour_of_tokens_is_worth_the_hour() -> None:
    """0.36 USD/h at 100 tokens/s: 360,000 tokens, so one micro-USD each."""
    quote = quoted(offer(usd=0.36), tokens_per_s=100, now=0, valid_s=3600)
    assert quote.uusd_per_million_tokens == 1_000_000
    assert quote.owed_uusd(tokens=360_000, idle_s=0) == 360_000
    assert quote.owed_uusd(tokens=0, idle_s=1800) == 180_000


def test_rounded_up_for_the_worker() -> None:
    """1 micro-USD an hour at 3,000 tokens/s is less than one per million tokens: it is not nothing."""
    assert quoted(offer(usd=0.000001), tokens_per_s=3000, now=0, valid_s=1).uusd_per_million_tokens == 1
    assert quoted(offer(usd=0), tokens_per_s=3000, now=0, valid_s=1).uusd_per_million_tokens == 0


def test_it_expires_with_the_offer() -> None:
    """Neither longer than valid nor longer than offered."""
    quote = quoted(offer(expires_at=50.0), tokens_per_s=1, now=10, valid_s=100)
    assert quote.expires_at == 50
    assert [quote.holds(when) for when in (9, 10, 49.9, 50)] == [False, True, True, False]


def test_nothing_measured() -> None:
    """No rate, no quote."""
    with pytest.raises(ValueError, match="tokens_per_s is 0: measure"):
        quoted(offer(), tokens_per_s=0, now=0, valid_s=1)


def test_prices_over_time() -> None:
    """Changes only."""
    history = PriceHistory().seen(0, 100).seen(10, 100).seen(20, 300).seen(30, 200)
    assert history.points == ((0, 100), (20, 300), (30, 200))
    assert [history.at(when) for when in (-1, 0, 19, 20, 99)] == [None, 100, 100, 300, 200]
    with pytest.raises(ValueError, match="now is 29: the last price was seen at 30"):
        history.seen(29, 1)


def test_median_over_time() -> None:
    """By time, not by number of changes."""
    history = PriceHistory(((0, 100), (20, 300), (30, 200)))
    assert history.median(0, 100) == 200  # 70 of 100 s
    assert history.median(0, 30) == 100  # 20 of 30 s
    assert history.median(25, 31) == 300  # 5 of 6 s
    assert history.median(-5, 10) == 100
    assert history.median(0, 0) == 100
    assert PriceHistory().median(0, 10) is None
    assert history.median(-20, -10) is None


def test_history_is_bounded() -> None:
    """The oldest changes go."""
    history = PriceHistory()
    for when in range(MOST_PRICES + 5):
        history = history.seen(when, when)
    assert (len(history.points), history.points[0]) == (MOST_PRICES, (5, 5))
