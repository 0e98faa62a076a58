"""One kind of call: at most one in flight, its own retry budget, and a limit on silence."""

from __future__ import annotations

from math import inf
from random import Random

from worker_node.domain.backoff import Backoff


class Lane:
    """When the next call of a kind may start. Every call's own deadline is shorter than `silence_s`, a safety net."""

    def __init__(self, *, silence_s: float, first_s: float, most_s: float, rng: Random) -> None:
        self._silence_s = silence_s
        self._backoff = Backoff(first_s=first_s, most_s=most_s, rng=rng)
        self._not_before = -inf
        self._silent_at: float | None = None

    @property
    def in_flight(self) -> bool:
        """Whether an answer is awaited."""
        return self._silent_at is not None

    def is_ready(self, now: float) -> bool:
        """Whether a call may start now."""
        return self._silent_at is None and now >= self._not_before

    def started(self, now: float) -> None:
        """A call went out."""
        self._silent_at = now + self._silence_s

    def answered(self, now: float, *, next_in_s: float = 0.0) -> None:
        """The call was answered; the next may start in `next_in_s`."""
        self._silent_at = None
        self._backoff.succeeded()
        self._not_before = now + max(next_in_s, 0.0)

    def failed(self, now: float, *, retry_after_s: float = 0.0) -> None:
        """The call failed; the next may start after the back-off."""
        self._silent_at = None
        self._not_before = now + self._backoff.failed(retry_after_s)

    def hurry(self, now: float) -> None:
        """Allow the next call now instead of at its usual time (not while backing off)."""
        if self._backoff.failures == 0:
            self._not_before = now

    def is_silent(self, now: float) -> bool:
        """Whether an answer is overdue beyond every deadline."""
        return self._silent_at is not None and now >= self._silent_at

    def next_deadline(self, now: float) -> float:
        """When this lane changes by itself; infinity when it does not."""
        if self._silent_at is not None:
            return self._silent_at
        return self._not_before if self._not_before > now else inf
