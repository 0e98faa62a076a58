"""The owner's limit on what comes down, kept over both ways that weights come: from peers, and over the coordinator's HTTPS."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from p2p.domain.bucket import TokenBucket

HTTPS_SHARE = 0.9  # of the limit while anything comes over HTTPS; peers get the rest, and all of it otherwise
BURST_BYTES = 64 << 10
IN_FLIGHT = 8  # pieces that may share the rate: a request is given the time that all of them need


class Downlink:
    """`rate` in bytes a second, None: not limited. `limit_peers` sets what the bulk node may take."""

    def __init__(self, rate: float | None, limit_peers: Callable[[float], None]) -> None:
        self._rate = rate
        self._limit_peers = limit_peers
        self._bucket = TokenBucket(None if rate is None else rate * HTTPS_SHARE, BURST_BYTES, now=time.monotonic())
        self._users = 0

    @contextmanager
    def over_https(self) -> Iterator[None]:
        """While a piece comes over HTTPS."""
        self._use(1)
        try:
            yield
        finally:
            self._use(-1)

    async def pace(self, count: int) -> None:
        """Bytes came: wait as long as the rate wants."""
        wait_s = self._bucket.take(count, time.monotonic())
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def slack_s(self, size: int) -> float:
        """How much longer than otherwise a piece of that size may take."""
        return 0.0 if self._rate is None else IN_FLIGHT * size / (self._rate * HTTPS_SHARE)

    def _use(self, change: int) -> None:
        was_used, self._users = self._users > 0, self._users + change
        if self._rate is not None and was_used != (self._users > 0):
            self._limit_peers(self._rate * (1 - HTTPS_SHARE) if self._users else self._rate)
