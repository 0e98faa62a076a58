"""The real clock."""

from __future__ import annotations

import time


class SystemClock:
    """Unix seconds that never step back: a clock set back by hand must not revive a deadline that passed."""

    def __init__(self) -> None:
        self._latest = 0.0

    def now(self) -> float:
        """Wall time, forced to be non-decreasing; a jump forward is followed, a jump back is ignored."""
        self._latest = max(self._latest, time.time())
        return self._latest
