"""A quote by the token is worth the asked hour."""

from __future__ import annotations

import pytest

from pricing.quotes import quoted
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
