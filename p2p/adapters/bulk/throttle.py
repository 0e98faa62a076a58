"""What the owner allows this node to move: rates up and down, changed live, and bytes a month, kept in a counter file."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from p2p.adapters.durable import write_durably
from p2p.domain.bucket import MonthlyCap, TokenBucket

LEAST_BURST = 64 << 10
BURST_S = 0.05


class Throttle:
    """Shared by all connections of a node; any thread may use it. `unix` gives Unix seconds: the month is a calendar's."""

    def __init__(
        self,
        *,
        up: float | None,
        down: float | None,
        cap_bytes: int | None,
        counter: Path | None,
        unix: Callable[[], float],
    ) -> None:
        self._lock = threading.Lock()
        self._unix = unix
        self._counter = counter
        now = time.monotonic()
        self._up = TokenBucket(up, _burst(up), now=now)
        self._down = TokenBucket(down, _burst(down), now=now)
        month, used = _read(counter)
        self._cap = MonthlyCap(cap_bytes, month=month, used=used)
        self._kept = (month, used)

    def set_limits(self, up: float | None, down: float | None, cap_bytes: int | None) -> None:
        """Bytes a second and bytes a month; None is unbounded."""
        now = time.monotonic()
        with self._lock:
            self._up.set_rate(up, _burst(up), now)
            self._down.set_rate(down, _burst(down), now)
            self._cap.set_cap(cap_bytes)

    @property
    def up_limit(self) -> float | None:
        """Bytes a second that may go up."""
        return self._up.rate

    @property
    def down_limit(self) -> float | None:
        """Bytes a second that may come down."""
        return self._down.rate

    @property
    def used_this_month(self) -> int:
        """Bytes of pieces sent since the month began."""
        return self._cap.used

    def is_spent(self) -> bool:
        """Whether this month's bytes are used up."""
        with self._lock:
            return self._cap.is_spent(self._unix())

    def up_wait(self, now: float) -> float:
        """Seconds until more may go up."""
        if self._up.rate is None:
            return 0.0
        with self._lock:
            return self._up.wait(now)

    def down_wait(self, now: float) -> float:
        """Seconds until more may come down."""
        if self._down.rate is None:
            return 0.0
        with self._lock:
            return self._down.wait(now)

    def sent(self, count: int, now: float) -> None:
        """Bytes went up."""
        with self._lock:
            self._up.take(count, now)
            self._cap.spend(count, self._unix())

    def received(self, count: int, now: float) -> None:
        """Bytes came down."""
        if self._down.rate is None:
            return
        with self._lock:
            self._down.take(count, now)

    def keep(self) -> None:
        """Write the counter file if the count changed. Raises OSError."""
        with self._lock:
            found = (self._cap.month, self._cap.used)
        if self._counter is not None and found != self._kept:
            write_durably(self._counter, json.dumps({"month": found[0], "used": found[1]}).encode())
            self._kept = found


def _burst(rate: float | None) -> float:
    return LEAST_BURST if rate is None else max(LEAST_BURST, rate * BURST_S)


def _read(counter: Path | None) -> tuple[str, int]:
    """Month and bytes; a file that cannot be read counts for nothing. Its owner is the one whom it protects."""
    try:
        kept = json.loads(counter.read_text()) if counter is not None else {}
        return str(kept["month"]), int(kept["used"])
    except (OSError, ValueError, KeyError, TypeError):
        return "", 0
