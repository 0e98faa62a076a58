"""The truth of the stand-in: machines, who rents which since when, and what that cost by the provider's own clock.

Time is virtual: whoever drives the stand-in calls `advance`. What a machine does later (when it runs, is outbid, gets dearer, or ends by
itself) is drawn when it is rented, so that a seed replays.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

UUSD = 1_000_000
PAUSED_SHARE = 10  # percent of the price that a stopped machine bills for its disk


@dataclass
class Machine:
    """What is offered."""

    offer_id: int
    machine_id: int
    card: str
    vram_mb: int
    uusd_per_hour: int
    count: int = 1  # how many of it can be rented at once
    is_withdrawn: bool = False


@dataclass
class Instance:
    """What is rented. Times by the provider's clock; `ended`: its bill is over."""

    id: str
    label: str
    machine: Machine
    env: dict[str, str]
    started: float
    runs_at: float
    listed_from: float
    prices: list[tuple[float, int]]  # (since when, micro-USD per hour), oldest first
    paused_at: float | None = None
    dies_at: float | None = None
    dearer_at: float | None = None
    stuck_until: float = 0.0  # a destroy takes effect no earlier
    deaf: int = 0  # destroys that are said to work and do nothing
    destroy_at: float | None = None
    ended: float | None = None

    def is_rented(self, now: float) -> bool:
        return self.ended is None or now < self.ended

    def status(self, now: float) -> str:
        """starting | running | paused."""
        if self.paused_at is not None and now >= self.paused_at:
            return "paused"
        return "running" if now >= self.runs_at else "starting"

    def price(self, now: float) -> int:
        base = [price for since, price in self.prices if since <= now][-1]
        return base * PAUSED_SHARE // 100 if self.status(now) == "paused" else base

    def cost(self, now: float) -> float:
        """Micro-USD billed up to `now`."""
        until = now if self.ended is None else min(now, self.ended)
        marks = [mark for mark in (*(since for since, _ in self.prices[1:]), self.paused_at) if mark is not None]
        edges = sorted({self.started, until, *(mark for mark in marks if self.started < mark < until)})
        return sum((late - early) * self.price(early) / 3600 for early, late in pairwise(edges))


@dataclass
class Fates:
    """How often things happen to a machine, and how long they take at most (seconds)."""

    slow_start: float = 0.0
    outbid: float = 0.0
    dies: float = 0.0
    dearer: float = 0.0
    stuck: float = 0.0
    deaf: float = 0.0
    late: float = 0.0  # it is listed only after a while
    usual_start_s: float = 60.0
    lasts_s: float = 2400.0
    stuck_s: float = 420.0
    late_s: float = 90.0
    dearer_percent: int = 20


@dataclass
class World:
    """Everything that is true."""

    rng: Random
    machines: list[Machine]
    now: float = 1_790_000_000.0
    fates: Fates = field(default_factory=Fates)
    instances: list[Instance] = field(default_factory=list)
    happened: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)  # requests that the published documents do not allow

    def advance(self, seconds: float) -> None:
        """Time passes; what falls due in it happens at its own time."""
        self.now += seconds
        for one in self.instances:
            self._live(one)

    def _live(self, one: Instance) -> None:
        if one.dearer_at is not None and one.dearer_at <= self.now:
            one.prices.append((one.dearer_at, one.prices[-1][1] * (100 + self.fates.dearer_percent) // 100))
            one.dearer_at = None
            self.happened["price rise"] += 1
        for name in ("destroy_at", "dies_at"):
            due = getattr(one, name)
            if one.ended is None and due is not None and due <= self.now:
                one.ended = due
                self.happened["machine died"] += name == "dies_at"

    def rented(self) -> list[Instance]:
        """Machines that bill now, whether a list shows them or not."""
        return [one for one in self.instances if one.is_rented(self.now)]

    def listed(self) -> list[Instance]:
        return [one for one in self.rented() if one.listed_from <= self.now]

    def find(self, instance_id: str) -> Instance | None:
        return next((one for one in self.rented() if one.id == instance_id), None)

    def free(self) -> list[Machine]:
        return [machine for machine in self.machines if not machine.is_withdrawn and self.left(machine) > 0]

    def left(self, machine: Machine) -> int:
        return machine.count - sum(one.machine is machine for one in self.rented())

    def spent(self) -> float:
        """Micro-USD that all machines have cost up to now."""
        return sum(one.cost(self.now) for one in self.instances)

    def rent(self, machine: Machine, label: str, env: dict[str, str], uusd_per_hour: int) -> Instance:
        """A machine starts to bill, and its fate is drawn."""
        rng, fates, now = self.rng, self.fates, self.now
        one = Instance(str(1000 + len(self.instances)), label, machine, env, now, now, now, [(now, uusd_per_hour)])
        one.runs_at = now + rng.uniform(0.2, 1.0) * fates.usual_start_s
        if self._befalls("slow start", fates.slow_start):
            one.runs_at = now + 1e9
        if self._befalls("outbid", fates.outbid):
            one.paused_at = now + rng.uniform(0.1, 1.0) * fates.lasts_s
        if rng.random() < fates.dies:
            one.dies_at = now + rng.uniform(0.0, 1.0) * fates.lasts_s
        if rng.random() < fates.dearer:
            one.dearer_at = now + rng.uniform(0.0, 1.0) * fates.lasts_s
        if self._befalls("listed late", fates.late):
            one.listed_from = now + rng.uniform(0.2, 1.0) * fates.late_s
        one.deaf = 2 * self._befalls("destroy without effect", fates.deaf)
        self.instances.append(one)
        return one

    def destroy(self, one: Instance) -> None:
        """Its bill ends at once, or when it is no longer stuck."""
        if one.deaf > 0:
            one.deaf -= 1
            return
        if one.destroy_at is None:
            stuck_s = (
                self.rng.uniform(0.3, 1.0) * self.fates.stuck_s if self._befalls("stuck terminating", self.fates.stuck) else 0.0
            )
            one.destroy_at = self.now + stuck_s
        self._live(one)

    def _befalls(self, name: str, share: float) -> bool:
        befalls = self.rng.random() < share
        self.happened[name] += befalls
        return befalls
