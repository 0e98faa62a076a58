"""When to try again: exponential back-off with full jitter; a time the server sent is never undercut."""

from __future__ import annotations

from random import Random


class Backoff:
    """One retry budget: one instance for each kind of call, so that a slow endpoint does not delay the others."""

    def __init__(self, *, first_s: float, most_s: float, rng: Random) -> None:
        if not 0 < first_s <= most_s:
            raise ValueError(f"back-off needs 0 < first_s <= most_s, got first_s={first_s} and most_s={most_s}")
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng
        self._failures = 0

    @property
    def failures(self) -> int:
        """Failures since the last success."""
        return self._failures

    def failed(self, retry_after_s: float = 0.0) -> float:
        """Record a failure; seconds to wait: uniform in [0, first * 2^n] capped, on top of what the server asked for."""
        ceiling = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 60))
        self._failures += 1
        return max(retry_after_s, 0.0) + self._rng.uniform(0.0, ceiling)

    def succeeded(self) -> None:
        """Start over with the shortest wait."""
        self._failures = 0
