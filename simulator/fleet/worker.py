"""A simulated worker whose time passes only when somebody looks: no event for a beat, a delivered version or a finished completion.

Two clocks. Wall time is the simulation's. Work time stands still while the worker does (`still_s` so far), so that the end of every
completion is known when its group is leased: later pauses move wall times, not work times.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.fleet.board import Lease

COLD = -1  # place of a worker that holds nothing
SKIP_GROWTH = 0.68  # a delta over k versions is k^0.68 times as large (measured on real gradients)


@dataclass(frozen=True, slots=True)
class Publication:
    """One version on its way. Seconds by class of worker, one or more for each; `cold_s` is for those who hold nothing."""

    at: float
    version: int
    arrivals_s: tuple[tuple[float, ...], ...]
    cold_s: tuple[float, ...]
    most_skip: float = inf  # times a delta: a keyframe is no larger


def _when(one: Publication) -> float:
    return one.at


@dataclass(slots=True, eq=False)
class FleetWorker:
    """One worker. `place` is that of its version among the publications."""

    number: int
    group: int
    slots: int
    generation_s: float  # mean of one completion, all slots busy
    apply_s: float
    idles: bool  # stands still while it loads
    alive: bool = True
    known: bool = True  # the coordinator takes it for present
    active: bool = False  # may be given work
    paid: bool = False
    died_at: float = inf
    price_uusd: int = 0
    paid_from: float = 0.0
    paid_s: float = 0.0  # in intervals that have ended
    place: int = COLD
    version: int = COLD
    still_s: float = 0.0
    still_until: float = 0.0
    from_s: float = 0.0  # since when it may fetch
    target: int = COLD  # being fetched
    pause_at: float = inf
    swap_at: float = inf
    free_at: list[float] = field(default_factory=list)  # of each slot, in work time; a heap
    leases: dict[Lease, None] = field(default_factory=dict)
    life: int = 0  # grows with every death and every end of activity, so that older events are void
    asking: bool = False  # an event will ask for work
    busy_s: float = 0.0  # slot-seconds of accepted and lost work

    def work_time(self, now: float) -> float:
        """Where its work is; inside a pause, where it will go on. A dead one's stays."""
        return max(min(now, self.died_at), self.still_until) - self.still_s

    def look(self, now: float, log: list[Publication]) -> None:
        """Let everything happen that happened until now, or until its death."""
        now = min(now, self.died_at)
        while True:
            if self.target == COLD and not self._fetch(now, log):
                return
            if self.pause_at <= now:
                self.still_s += self.swap_at - self.pause_at
                self.still_until = self.swap_at
                self.pause_at = inf
            if self.swap_at > now:
                return
            self.place, self.version, self.from_s = self.target, log[self.target].version, self.swap_at
            self.target, self.swap_at = COLD, inf

    def _fetch(self, now: float, log: list[Publication]) -> bool:
        """Begin to fetch the newest version that there was when it could; False when there is none yet."""
        following = self.place + 1
        if following >= len(log):
            return False
        begin = max(self.from_s, log[following].at)
        following = bisect_right(log, begin, lo=following, key=_when) - 1
        if begin > now:
            return False
        one = log[following]
        if self.place == COLD:
            takes_s = one.cold_s[self.group]
        else:
            times = one.arrivals_s[self.group] or one.cold_s[self.group : self.group + 1]  # nobody of its group was active
            takes_s = times[self.number % len(times)] * min((following - self.place) ** SKIP_GROWTH, one.most_skip)
        self.target, self.swap_at = following, begin + takes_s + (0.0 if self.place == COLD else self.apply_s)
        self.pause_at = begin if self.idles else self.swap_at - self.apply_s
        return True

    def begin(self, now: float) -> None:
        """It becomes active: it fetches from now on what it does not hold."""
        self.active = True
        self.target, self.pause_at, self.swap_at = COLD, inf, inf
        self.from_s = max(self.from_s, now)
        if not self.leases:
            self.free_at = [self.work_time(now)] * self.slots

    def end(self) -> None:
        """It is given no more work; what it fetched half is lost. What it was leased it finishes."""
        self.active, self.asking = False, False
        self.life += 1
        self.target, self.pause_at, self.swap_at = COLD, inf, inf

    def die(self, now: float) -> None:
        """It crashes; the coordinator does not know yet."""
        self.alive, self.died_at = False, now

    def revive(self) -> None:
        """It, or another in its place, is there again and holds nothing."""
        self.alive, self.known, self.died_at = True, True, inf
        self.place, self.version = COLD, COLD
