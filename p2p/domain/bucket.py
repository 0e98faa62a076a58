"""A token bucket: how long to hold bytes back so that a rate is kept."""

from __future__ import annotations


class TokenBucket:
    """Lets `rate` bytes a second through on average, `burst` bytes at once."""

    def __init__(self, rate: float, burst: float, *, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._at = now

    def take(self, amount: int, now: float) -> float:
        """Book `amount` bytes; the seconds to wait before sending them. What is booked is owed, so callers queue in order."""
        self._level = min(self._burst, self._level + max(now - self._at, 0.0) * self._rate)
        self._at = max(now, self._at)
        self._level -= amount
        return max(0.0, -self._level / self._rate)
