"""How long to wait before the next try."""

from __future__ import annotations

from random import Random

LEARNER_RESTARTS = 5  # without a committed step in between
_RESTART_FIRST_S = 1.0
_RESTART_MOST_S = 60.0
_DOUBLINGS = 40  # beyond any sensible limit; keeps the power finite


def delay_s(attempt: int, *, first_s: float, most_s: float, rng: Random) -> float:
    """Exponential back-off with full jitter, seconds: uniform in [0, min(most_s, first_s * 2**attempt)]; attempt from 0."""
    return rng.uniform(0.0, min(most_s, first_s * 2.0 ** min(max(attempt, 0), _DOUBLINGS)))


def learner_restart(restarts: int, *, limit: int = LEARNER_RESTARTS) -> float | None:
    """Seconds before the learner is started again after `restarts` restarts without a committed step; None: give up."""
    if restarts >= limit:
        return None
    return float(min(_RESTART_MOST_S, _RESTART_FIRST_S * 2.0 ** min(restarts, _DOUBLINGS)))
