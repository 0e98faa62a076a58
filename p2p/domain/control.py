"""When the control plane sends, dials, and changes between libp2p and the coordinator's HTTPS. The clock is a parameter everywhere.

gossipsub drops what comes faster than it likes and says nothing, so what is published here is *state*: the latest value of each
(topic, slot), sent at most five times a second for a topic and repeated every few seconds for those who missed it or came late.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from random import Random

from p2p.domain.control_frames import check_size
from p2p.errors import ControlRefused

MIN_GAP_S = 0.2  # five messages a second for a topic
REPEAT_S = 5.0
MAX_SLOTS = 64  # values repeated for one topic; the oldest is forgotten first
MAX_TOPICS = 64


@dataclass(slots=True)
class _Value:
    payload: bytes
    due: float


class Outbox:
    """What is to be published, and when: the latest value of each slot of each topic."""

    def __init__(self, *, min_gap_s: float = MIN_GAP_S, repeat_s: float = REPEAT_S) -> None:
        self._min_gap_s = min_gap_s
        self._repeat_s = repeat_s
        self._topics: dict[str, OrderedDict[str, _Value]] = {}
        self._free_at: dict[str, float] = {}

    def put(self, topic: str, slot: str, payload: bytes, now: float) -> None:
        """Make `payload` the value of the slot, to be sent as soon as the topic's rate allows. Raises ControlRefused."""
        check_size(f"the value for {topic}", payload)
        if topic not in self._topics and len(self._topics) >= MAX_TOPICS:
            raise ControlRefused(f"{MAX_TOPICS} topics are published already: retract one before {topic}")
        slots = self._topics.setdefault(topic, OrderedDict())
        slots.pop(slot, None)
        slots[slot] = _Value(payload, now)
        if len(slots) > MAX_SLOTS:
            slots.popitem(last=False)

    def retract(self, topic: str) -> None:
        """Stop repeating the topic's values."""
        self._topics.pop(topic, None)

    def take_due(self, now: float) -> list[tuple[str, bytes]]:
        """What to publish now: at most one value a topic, and its next turn is booked."""
        return [(topic, value.payload) for topic in self._topics if (value := self._next(topic, now)) is not None]

    def next_deadline(self) -> float | None:
        """When `take_due` gives something next; None when nothing is published."""
        dues = [
            max(min(value.due for value in slots.values()), self._free_at.get(topic, 0.0)) for topic, slots in self._topics.items()
        ]
        return min(dues, default=None)

    def _next(self, topic: str, now: float) -> _Value | None:
        value = min(self._topics[topic].values(), key=lambda one: one.due)
        if now < max(value.due, self._free_at.get(topic, 0.0)):
            return None
        value.due = now + self._repeat_s
        self._free_at[topic] = now + self._min_gap_s
        return value


class RateLimit:
    """How many messages a second each author may have: what is above is dropped, not queued. Bounded in memory."""

    def __init__(self, *, rate: float, burst: float, most_authors: int = 4096) -> None:
        self._rate = rate
        self._burst = burst
        self._most = most_authors
        self._levels: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def allows(self, author: str, now: float) -> bool:
        """Whether one more message of `author` is within the rate; books it if so."""
        level, at = self._levels.pop(author, (self._burst, now))
        level = min(self._burst, level + max(now - at, 0.0) * self._rate)
        allowed = level >= 1.0
        self._levels[author] = (level - 1.0 if allowed else level, now)
        if len(self._levels) > self._most:
            self._levels.popitem(last=False)
        return allowed


class Seen:
    """What was taken in already, by digest: the newest `most` are remembered."""

    def __init__(self, most: int = 4096) -> None:
        self._most = most
        self._digests: OrderedDict[str, None] = OrderedDict()

    def holds(self, digest: str) -> bool:
        """Whether the digest came before."""
        return digest in self._digests

    def is_new(self, digest: str) -> bool:
        """Whether the digest comes for the first time; remembers it."""
        if digest in self._digests:
            self._digests.move_to_end(digest)
            return False
        self._digests[digest] = None
        if len(self._digests) > self._most:
            self._digests.popitem(last=False)
        return True


class Retry:
    """When to try again what failed: first_s doubled with each failure, up to most_s, each wait drawn from its upper half."""

    def __init__(self, *, first_s: float, most_s: float, rng: Random) -> None:
        self._first_s = first_s
        self._most_s = most_s
        self._rng = rng
        self._failures = 0
        self._at = 0.0

    def failed(self, now: float) -> float:
        """Record a failure; the seconds to wait."""
        wait = min(self._most_s, self._first_s * 2.0 ** min(self._failures, 60)) * self._rng.uniform(0.5, 1.0)
        self._failures += 1
        self._at = now + wait
        return wait

    def succeeded(self) -> None:
        """Start over."""
        self._failures, self._at = 0, 0.0

    def is_due(self, now: float) -> bool:
        """Whether the wait is over."""
        return now >= self._at


class Route:
    """Which of two ways to take: the first until it fails, then the second, and the first again after a wait that grows."""

    def __init__(self, *, first_s: float = 15.0, most_s: float = 300.0, rng: Random) -> None:
        self._retry = Retry(first_s=first_s, most_s=most_s, rng=rng)

    def takes_first(self, now: float) -> bool:
        """Whether to try the first way now."""
        return self._retry.is_due(now)

    def failed(self, now: float) -> None:
        """The first way failed. Failures of tries begun before the wait count once."""
        if self._retry.is_due(now):
            self._retry.failed(now)

    def succeeded(self) -> None:
        """The first way works."""
        self._retry.succeeded()


class Silence:
    """Notices that the first way has fallen silent: the second brought what the first did not within the grace.

    Quiet alone is no sign: there may be nothing to say.
    """

    def __init__(self, *, grace_s: float = 15.0, most: int = 256) -> None:
        self._grace_s = grace_s
        self._most = most
        self._missed: OrderedDict[str, float] = OrderedDict()
        self._first = Seen()

    def first_brought(self, digest: str) -> None:
        """The first way delivered this value: it is not silent, whatever else was missed."""
        self._first.is_new(digest)
        self._missed.clear()

    def second_brought(self, digest: str, now: float) -> None:
        """The second way delivered this value."""
        if not self._first.holds(digest):
            self._missed.setdefault(digest, now)
        if len(self._missed) > self._most:
            self._missed.popitem(last=False)

    def is_silent(self, now: float) -> bool:
        """Whether some value of the second way has been missing on the first for longer than the grace."""
        return any(now - since > self._grace_s for since in self._missed.values())
