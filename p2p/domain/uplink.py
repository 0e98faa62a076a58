"""How fast this node can upload, judged by what left it while it had something to send."""

from __future__ import annotations

from collections import deque

WINDOW_S = 0.5
KEPT_S = 20.0


class UplinkMeter:
    """Feed it a growing count of delivered bytes; its rate is the best of the last 20 s, over windows of half a second of busy time.

    The best, because a receiver that is slow to take says nothing about this node; a window, because buffers swallow the first bytes.
    """

    def __init__(self, guess: float) -> None:
        """`guess` (bytes a second) holds until the first window is full."""
        self._guess = guess
        self._best: deque[tuple[float, float]] = deque()  # (when, rate), rates falling: the first is the best
        self._last: tuple[float, int] | None = None
        self._busy_s = 0.0
        self._bytes = 0

    def sample(self, delivered: int, is_busy: bool, now: float) -> None:
        """`delivered` bytes in all so far; `is_busy`: something was waiting to be sent since the last sample."""
        last, self._last = self._last, (now, delivered)
        if last is None or now <= last[0]:
            return
        if not is_busy:
            self._busy_s, self._bytes = 0.0, 0
            return
        self._busy_s += now - last[0]
        self._bytes += max(delivered - last[1], 0)
        if self._busy_s >= WINDOW_S:
            self._keep(self._bytes / self._busy_s, now)
            self._busy_s, self._bytes = 0.0, 0

    def rate(self, now: float) -> float:
        """Bytes a second. When nothing was measured lately, what was measured last."""
        while len(self._best) > 1 and self._best[0][0] < now - KEPT_S:
            self._best.popleft()
        return self._best[0][1] if self._best else self._guess

    def _keep(self, rate: float, now: float) -> None:
        while self._best and (self._best[-1][1] <= rate or self._best[0][0] < now - KEPT_S):
            if self._best[-1][1] <= rate:
                self._best.pop()
            else:
                self._best.popleft()
        self._best.append((now, rate))
