"""Says when the event loop stood still: all calls share it, so whatever computes on it keeps every worker waiting."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import structlog

log = structlog.get_logger()
LOOK_S = 0.5
LOOKS = 120  # remembered: a minute's
MOST_LAG_S = 1.0


@dataclass(frozen=True, slots=True)
class LoopLag:
    """How late the newest looks came, in seconds."""

    seen: deque[float] = field(default_factory=lambda: deque(maxlen=LOOKS))

    @property
    def longest_s(self) -> float:
        """The longest that anything waited for the loop lately; 0 before the first look."""
        return max(self.seen, default=0.0)


async def keep_looking(
    lag: LoopLag, *, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep, now: Callable[[], float] = time.monotonic
) -> None:
    """Look for ever. A look that comes more than `MOST_LAG_S` late is a warning in the log."""
    while True:
        asked = now()
        await sleep(LOOK_S)
        late_s = max(now() - asked - LOOK_S, 0.0)
        lag.seen.append(late_s)
        if late_s > MOST_LAG_S:
            log.warning("event_loop_stood_still", seconds=round(late_s, 2), most=MOST_LAG_S)
