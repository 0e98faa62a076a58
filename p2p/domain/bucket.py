"""Token buckets: how long to hold bytes back so that a rate is kept; and how many bytes a month may still bring."""

from __future__ import annotations

from datetime import UTC, datetime


class TokenBucket:
    """Lets `rate` bytes a second through on average, `burst` bytes at once. A rate of None holds nothing back."""

    def __init__(self, rate: float | None, burst: float, *, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    @property
    def rate(self) -> float | None:
        """Bytes a second; None is unbounded."""
        return self._rate

    def take(self, amount: int, now: float) -> float:
        """Book `amount` bytes; the seconds to wait before sending them. What is booked is owed, so callers queue in order."""
        self._refill(now)
        if self._rate is not None:
            self._level -= amount
        return self.wait(now)

    def wait(self, now: float) -> float:
        """Seconds until what was booked is paid for: 0 when more may be sent."""
        self._refill(now)
        if self._rate is None or self._level >= 0:
            return 0.0
        return -self._level / self._rate

    def set_rate(self, rate: float | None, burst: float, now: float) -> None:
        """From now on another rate. What was booked stays owed, at the new rate; unbounded forgives it."""
        self._refill(now)
        self._rate = rate
        self._burst = burst
        self._level = burst if rate is None else min(self._level, burst)

    def _refill(self, now: float) -> None:
        if self._rate is not None:
            self._level = min(self._burst, self._level + max(now - self._at, 0.0) * self._rate)
        self._at = max(now, self._at)


class MonthlyCap:
    """Counts bytes by calendar month (UTC); `cap` bytes a month are allowed, None is unbounded.

    `month` and `used` are what a counter file kept; a month that is over counts for nothing.
    """

    def __init__(self, cap: int | None, *, month: str = "", used: int = 0) -> None:
        self._cap = cap
        self.month = month
        self.used = used
        self._hour = -1.0  # of the last look at the calendar

    def spend(self, amount: int, unix_s: float) -> None:
        """Count bytes that went out."""
        self._turn(unix_s)
        self.used += amount

    def is_spent(self, unix_s: float) -> bool:
        """Whether nothing more may go out this month."""
        self._turn(unix_s)
        return self._cap is not None and self.used >= self._cap

    def set_cap(self, cap: int | None) -> None:
        """Allow another number of bytes; what was used this month stays counted."""
        self._cap = cap

    def _turn(self, unix_s: float) -> None:
        hour = unix_s // 3600
        if hour == self._hour:
            return
        self._hour = hour
        month = month_of(unix_s)
        if month > self.month:  # a clock that jumps back opens no new month
            self.month, self.used = month, 0


def month_of(unix_s: float) -> str:
    """The calendar month, as 2026-11."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m}"
