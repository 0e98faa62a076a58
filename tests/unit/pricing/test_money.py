"""Money is exact."""

from __future__ import annotations

from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pricing.money import accrued_uusd, usd_to_uusd, uusd_to_usd


@pytest.mark.parametrize(
    ("usd", "uusd"), [(0.35, 350_000), ("0.1", 100_000), (0, 0), (Decimal("1.2345678"), 1_234_567), (150.0, 150_000_000)]
)
def test_dollars(usd: object, uusd: int) -> None:
    """What a person wrote, to the micro-dollar; further digits are cut."""
    assert usd_to_uusd(usd) == uusd


@pytest.mark.parametrize("usd", [-0.01, float("nan"), float("inf")])
def test_no_amount(usd: float) -> None:
    """Not money."""
    with pytest.raises(ValueError, match="is not an amount of money"):
        usd_to_uusd(usd)


def test_display() -> None:
    """For people."""
    assert uusd_to_usd(350_000) == 0.35


@given(st.integers(0, 10**10), st.lists(st.integers(0, 10**7), max_size=20))
def test_rounding_stays_under_one_microdollar(price: int, pieces_ms: list[int]) -> None:
    """floor(cumulative): the whole is exact to under 1 uUSD however it is cut (law 7)."""
    total_ms = sum(pieces_ms)
    exact = Decimal(price) * total_ms / 3_600_000
    posted = accrued_uusd(price, seconds=total_ms / 1000)
    assert 0 <= exact - posted < 1 + Decimal(price) / 3_600_000  # int(seconds * 1000) may lose the last millisecond to binary


def test_no_time_no_money() -> None:
    """A clock that stepped back earns nothing."""
    assert accrued_uusd(350_000, seconds=-5) == 0
    assert accrued_uusd(3_600_000, seconds=1) == 1000
