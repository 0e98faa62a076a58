"""Money is integer micro-dollars (uUSD); only display turns it into dollars (law 7)."""

from __future__ import annotations

from decimal import ROUND_FLOOR, Decimal

UUSD_PER_USD = 1_000_000


def usd_to_uusd(usd: float | str | Decimal) -> int:
    """Dollars, as a person wrote them, in micro-dollars; digits beyond the sixth are cut. Raises ValueError if negative or not finite."""
    amount = Decimal(str(usd))
    if not amount.is_finite() or amount < 0:
        raise ValueError(f"{usd!r} is not an amount of money: give a number of USD that is 0 or more")
    return int((amount * UUSD_PER_USD).to_integral_value(rounding=ROUND_FLOOR))


def uusd_to_usd(uusd: int) -> float:
    """For display only."""
    return uusd / UUSD_PER_USD


def accrued_uusd(price_uusd_per_hour: int, *, seconds: float) -> int:
    """floor(price x time): posting floor(cumulative) minus what was posted keeps rounding under 1 uUSD a worker."""
    if seconds <= 0:
        return 0
    milliseconds = int(seconds * 1000)
    return price_uusd_per_hour * milliseconds // 3_600_000
