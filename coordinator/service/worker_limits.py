"""Bounds on what one key, one address and all of them together may cost (law 5). Memory here is bounded too."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from coordinator.wire.signing import NONCE_KEPT_S


@dataclass(frozen=True, slots=True)
class ProtocolLimits:
    """Limits of the worker protocol's HTTP side."""

    per_key_rate_s: float = 200.0  # a fast engine on a tiny model submits in small steps
    per_key_burst: float = 800.0
    per_address_rate_s: float = 2000.0  # many workers may stand behind one address
    per_address_burst: float = 4000.0
    failures_rate_s: float = 20.0  # requests of one address that could not be authenticated
    failures_burst: float = 200.0
    body_timeout_s: float = 20.0  # silence inside a body
    body_total_s: float = 300.0  # a whole body
    bodies_in_flight_bytes: int = 256 << 20
    nonces: int = 500_000
    keys_tracked: int = 20_000


class TokenBuckets:
    """One token bucket a name; the least recently used names are forgotten beyond `most`."""

    def __init__(self, *, rate_s: float, burst: float, most: int) -> None:
        self._rate_s = rate_s
        self._burst = burst
        self._most = most
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, name: str, now: float) -> float:
        """Take one token; 0 when there was one, else the seconds until there will be."""
        left = self._left(name, now)
        taken = left >= 1.0
        self._buckets[name] = (left - 1.0 if taken else left, now)
        self._buckets.move_to_end(name)
        if len(self._buckets) > self._most:
            self._buckets.popitem(last=False)
        return 0.0 if taken else (1.0 - left) / self._rate_s

    def wait_s(self, name: str, now: float) -> float:
        """Seconds until a token can be taken, without taking one."""
        return max(0.0, (1.0 - self._left(name, now)) / self._rate_s)

    def _left(self, name: str, now: float) -> float:
        left, at = self._buckets.get(name, (self._burst, now))
        return min(self._burst, left + max(now - at, 0.0) * self._rate_s)


class NonceMemory:
    """Nonces seen, each kept at least NONCE_KEPT_S; two generations, so that forgetting costs nothing."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._older: set[bytes] = set()
        self._newer: set[bytes] = set()
        self._turned_at = 0.0

    def remember(self, worker_id: str, nonce: str, now: float) -> bool:
        """False when the worker used this nonce before."""
        self._turn(now)
        entry = bytes.fromhex(nonce) + worker_id.encode()
        if entry in self._newer or entry in self._older:
            return False
        self._newer.add(entry)
        return True

    def is_full(self, now: float) -> bool:
        """Whether no more can be remembered before the older generation is forgotten."""
        self._turn(now)
        return len(self._newer) + len(self._older) >= self._most

    def _turn(self, now: float) -> None:
        if now - self._turned_at >= 2 * NONCE_KEPT_S:
            self._older = set()
            self._newer = set()
            self._turned_at = now
        elif now - self._turned_at >= NONCE_KEPT_S:
            self._older = self._newer
            self._newer = set()
            self._turned_at = now


class ByteBudget:
    """Bytes of request bodies held at once."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    def reserve(self, amount: int) -> bool:
        """Whether `amount` more bytes may be held; they are if so, until `release`."""
        if self._held + amount > self._most:
            return False
        self._held += amount
        return True

    def release(self, amount: int) -> None:
        """Give back what was reserved."""
        self._held -= amount
