"""Which fault hits which request. Seeded; each that fired is counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random

# Before the request is carried out: it has no effect.
BEFORE = ("429 with Retry-After", "429 without", "500 as text", "502 as HTML", "timeout, not carried out")
# After it: it had its effect and the answer is spoilt.
AFTER = ("timeout, carried out", "truncated body", "500, carried out", "empty body", "not JSON, 200")
ONLY: Mapping[str, tuple[str, ...]] = {
    "search": ("unit confusion", "offers as a lone object", "bad field in an offer"),
    "create": ("offer vanished", "created, then an error", "no capacity", "no balance"),
    "list": ("duplicate pages", "a machine left out once", "bad field in a machine", "a machine without an id"),
}

WRONG_SHAPES = frozenset({"unit confusion", "bad field in an offer", "bad field in a machine", "a machine without an id"})


@dataclass
class Faults:
    """Draws faults.

    `share`: of requests that are hit; of creates, which are rare and where most can go wrong, `create_times` as many.
    `storm_share`: of requests that begin a storm, in which all fail.
    """

    rng: Random
    share: float = 0.0
    create_times: float = 3.0
    storm_share: float = 0.0
    storm_s: float = 240.0
    only: tuple[str, ...] | None = None  # tests of one fault
    happened: Counter[str] = field(default_factory=Counter)
    storm_until: float = 0.0

    def draw(self, operation: str, now: float) -> str | None:
        """The fault of this request, or None."""
        if now < self.storm_until:
            return self._count("storm of 5xx and 429", self.rng.choice(BEFORE[:4]))
        if self.rng.random() < self.storm_share:
            self.storm_until = now + self.rng.uniform(0.2, 1.0) * self.storm_s
        share = min(self.share * self.create_times, 0.6) if operation == "create" else self.share
        if self.rng.random() >= share:
            return None
        able = [name for name in (*BEFORE, *AFTER, *ONLY.get(operation, ()) * 2) if self.only is None or name in self.only]
        return self._count(name := self.rng.choice(able), name) if able else None

    def _count(self, name: str, fault: str) -> str:
        self.happened[name] += 1
        return fault
