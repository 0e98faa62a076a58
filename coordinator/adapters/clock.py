"""The real clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class SystemClock:
    """Unix seconds that never step back and never stand still: a clock set back by hand must not revive a deadline that passed.

    A jump of the wall clock forward is followed. After a jump back, time goes on from where it was at the rate of the monotonic
    clock, so that what waits for a deadline does not wait for the wall clock to catch up as well.
    """

    def __init__(self, *, wall: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._latest = wall()
        self._looked_at = monotonic()

    def now(self) -> float:
        """Wall time, or later if the wall clock was set back."""
        wall = self._wall()  # first: a pause between the two readings must not add up
        looked_at = self._monotonic()
        passed = max(looked_at - self._looked_at, 0.0)
        self._looked_at = looked_at
        self._latest = max(wall, self._latest + passed)
        return self._latest
