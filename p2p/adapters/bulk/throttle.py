"""What the owner allows this node to move: rates up and down, changed live, and bytes a month, kept in a counter file."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

from p2p.adapters.durable import write_durably
from p2p.domain.bucket import MonthlyCap, TokenBucket
from p2p.errors import CounterUnreadable

log = logging.getLogger(__name__)
LEAST_BURST = 64 << 10
BURST_S = 0.05
_MONTH = re.compile(r"(?:\d{4}-\d{2})?")  # none before anything was sent


class Throttle:
    """Shared by all connections of a node; any thread may use it. `unix` gives Unix seconds: the month is a calendar's.

    Raises CounterUnreadable when there is a cap and the counter file is damaged: counting from zero could cost its owner money.
    """

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
        month, used = _counted(counter) if cap_bytes is not None else _counted_or_none(counter)
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


def _counted(counter: Path | None) -> tuple[str, int]:
    """Month and bytes; nothing where no file is. Raises CounterUnreadable."""
    if counter is None:
        return "", 0
    try:
        return _read(json.loads(counter.read_text()))
    except FileNotFoundError:
        return "", 0
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CounterUnreadable(
            f"{counter} keeps the bytes that were uploaded this month and cannot be read ({error!r}): repair it, or remove it to count from 0"
        ) from error


def _counted_or_none(counter: Path | None) -> tuple[str, int]:
    """The same where no cap depends on it: the count begins anew, and says so."""
    try:
        return _counted(counter)
    except CounterUnreadable as error:
        log.warning("%s; no cap depends on it, so this month is counted from 0", error)
        return "", 0


def _read(kept: dict[str, object]) -> tuple[str, int]:
    """What `keep` wrote. Raises ValueError, KeyError, TypeError: a count that is wrong would let more through than the owner allows."""
    month, used = kept["month"], kept["used"]
    if not isinstance(month, str) or not _MONTH.fullmatch(month) or type(used) is not int or used < 0:
        raise ValueError(f"month {month!r:.20}, used {used!r:.40}: a month like 2026-11 and a whole number of bytes are due")
    return month, used
