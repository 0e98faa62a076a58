"""The coordinator of a simulated fleet: groups, leases, seals and steps, by the product's own rules.

A lease is one event, not G: the end of each of its completions is known when it is granted (`worker.py`), so accepting them when the
lease ends, or is ended early, gives the same rows as accepting one by one.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import chain, count, islice
from random import Random

from coordinator.domain.grant import Grant, grantable
from coordinator.domain.leases import LeaseLimits, groups_for, wall_deadline
from coordinator.domain.seal import ReadyGroup, Seal, choose
from coordinator.domain.staleness import last_step
from simulator.fleet.laws import Laws, State
from simulator.fleet.scenario import Scenario
from simulator.fleet.worker import FleetWorker

ENDLESS = 10**9
ALIKE, APART = (1.0, 1.0), (0.0, 1.0)  # rewards of a group without and with signal
MOMENT_S = 1e-6  # wall and work times round differently
LEAST_TOKENS_PER_S = 1e-3  # the wall deadline's floor never binds here: rates are given


@dataclass(slots=True, eq=False)
class Group:
    """Rollouts of one prompt; `oldest` counts accepted completions only."""

    number: int
    alike: bool
    left: int  # completions not accepted yet
    oldest: int = ENDLESS
    leases: dict[Lease, None] = field(default_factory=dict)
    missing: list[tuple[float, FleetWorker]] = field(default_factory=list)  # length, the same in every attempt, and who had it last


@dataclass(slots=True, eq=False)
class Lease:
    """Completions of one group on one worker: lengths, and their ends in the worker's work time."""

    group: Group
    worker: FleetWorker
    version: int
    lengths: list[float]
    ends: list[float]
    deadline: float  # wall time
    refused: bool = False  # it will end, and not be admitted

    @property
    def last_end(self) -> float:
        """In work time."""
        return max(self.ends)


@dataclass(slots=True)
class Counts:
    """Completions by what became of them: attempts = started ones; the rest never began."""

    leased: int = 0
    accepted: int = 0
    refused: int = 0  # finished, not admitted
    lost: int = 0  # begun, and gone with the worker or the lease
    too_old: int = 0  # begun, and ended for its age
    never_began: int = 0
    accepted_too_old: int = 0  # accepted, then thrown away with their group
    issued_groups: int = 0
    expired_leases: int = 0


class Board:
    """The rows. Whoever calls says what time it is."""

    def __init__(self, scenario: Scenario, draw: Callable[[int], list[float]], rng: Random, laws: Laws) -> None:
        job = scenario.job
        self.size, self.per_step, self.bound = job.group_size, job.groups_per_step, job.staleness
        self.planned = job.steps or ENDLESS
        self.step = 0
        self.newest = 0
        self.counts = Counts()
        self.unsettled: dict[int, None] = {}  # ascending
        self.open: dict[int, Group] = {}
        self.ready: dict[int, ReadyGroup] = {}
        self.missing: list[tuple[int, int, Group]] = []  # a heap by number
        self._order = count()
        self._is_alone = scenario.workers == 1
        self.batch: Seal | None = None
        self.staleness: Counter[int] = Counter()
        self.rejected: Counter[str] = Counter()
        self._replaced = 0
        self._of_version: dict[int, dict[Group, None]] = {}
        self._admitted = [group.admitted for group in scenario.fleet]
        self._tokens = job.lengths.mean_tokens
        self._most_tokens = job.lengths.max_tokens
        self._limits = LeaseLimits(scenario.liveness.lease_min_s, scenario.liveness.lease_max_s, LEAST_TOKENS_PER_S)
        self._no_signal = job.no_signal
        self._draw, self._rng, self._laws = draw, rng, laws

    # Work

    def give(self, worker: FleetWorker, now: float) -> list[Lease]:
        """Leases for a worker that asks; it was looked at. Empty: nothing that its version may serve."""
        begins = worker.work_time(now)
        free = sum(1 for at in worker.free_at if at <= begins + MOMENT_S)
        if free == 0 or self.step > last_step(worker.version, self.bound):
            return []
        leases = list(chain.from_iterable(self._missing_for(worker, free, now))) if self.missing else []
        granted = sum(len(lease.lengths) for lease in leases)
        if not leases or free - granted >= self.size:
            leases += self._issue(worker, free - granted, now)
        return leases

    def _rule(self, version: int) -> Grant:
        return grantable(
            committed_steps=self.step,
            unsettled=len(self.unsettled),
            groups_per_step=self.per_step,
            bound=self.bound,
            held_version=version,
            planned_steps=self.planned,
        )

    def _issue(self, worker: FleetWorker, free: int, now: float) -> list[Lease]:
        groups = groups_for(free, group_size=self.size, grantable=self._rule(worker.version).groups)
        if groups:
            self._laws.granted(self.step, len(self.unsettled), groups, worker.version, worker)
        leases = []
        for _ in range(groups):
            group = Group(self.counts.issued_groups, self._rng.random() < self._no_signal, self.size)
            self.counts.issued_groups += 1
            self.unsettled[group.number] = None
            self.open[group.number] = group
            self._laws.issued(group.number)
            leases += self._lease(group, worker, self._draw(self.size), now)
        return leases

    def _lease(self, group: Group, worker: FleetWorker, lengths: list[float], now: float) -> list[Lease]:
        """One lease; what will be refused is told apart, because it is missing as soon as it ends."""
        begins, slots, mean_s = worker.work_time(now), worker.free_at, worker.generation_s
        ends = []
        for length in lengths:
            end = max(slots[0], begins) + length * mean_s
            heapq.heapreplace(slots, end)
            ends.append(end)
        deadline = wall_deadline(
            now,
            slots=max(worker.slots, len(lengths)),
            max_new_tokens=self._most_tokens,
            tokens_per_s=worker.slots / mean_s * self._tokens,
            limits=self._limits,
        )
        leases = self._parted(group, worker, lengths, ends, deadline)
        for lease in leases:
            group.leases[lease] = None
            worker.leases[lease] = None
        self._of_version.setdefault(worker.version, {})[group] = None
        self.counts.leased += len(lengths)
        return leases

    def _parted(self, group: Group, worker: FleetWorker, lengths: list[float], ends: list[float], deadline: float) -> list[Lease]:
        share, version = self._admitted[worker.group], worker.version
        bad = [i for i in range(len(ends)) if self._rng.random() >= share] if share < 1.0 else []
        if not bad:
            return [Lease(group, worker, version, lengths, ends, deadline)]
        good = [i for i in range(len(ends)) if i not in bad]
        leases = [Lease(group, worker, version, [lengths[i]], [ends[i]], deadline, refused=True) for i in bad]
        if good:
            leases.append(Lease(group, worker, version, [lengths[i] for i in good], [ends[i] for i in good], deadline))
        return leases

    def _missing_for(self, worker: FleetWorker, free: int, now: float) -> Iterator[list[Lease]]:
        """Lost completions of the oldest groups that this version can still serve."""
        places = self.per_step * (last_step(worker.version, self.bound) - self.step + 1)
        later = []
        while self.missing and free > 0:
            entry = heapq.heappop(self.missing)
            group = entry[2]
            if group.number not in self.open or not group.missing:
                continue
            if not self._is_among(group.number, places):
                later.append(entry)
                break
            mine = [one for one in group.missing if one[1] is worker and not self._is_alone]
            others = [one for one in group.missing if one[1] is not worker or self._is_alone]
            taken, group.missing = others[:free], mine + others[free:]
            free -= len(taken)
            if group.missing:
                later.append(entry)
            if taken:
                yield self._lease(group, worker, [length for length, _ in taken], now)
        for entry in later:
            heapq.heappush(self.missing, entry)

    def _is_among(self, number: int, places: int) -> bool:
        """Whether the group is one of the first so many unsettled ones; numbers tell most of it."""
        first = next(iter(self.unsettled))
        return number - first < places or number in islice(self.unsettled, places)

    # Results

    def finish(self, lease: Lease) -> Group | None:
        """Every completion of the lease ended, in time; the group when it is whole now."""
        return self._take(lease, lease.lengths, [])

    def cut(self, lease: Lease, now: float, cause: str) -> Group | None:
        """The lease ends before its completions: what has ended is accepted, the rest is missing. The worker was looked at.

        `cause`: lost (the worker or the wall), old (its version serves no step any more).
        """
        worker = lease.worker
        until = worker.work_time(now)
        done = [length for length, end in zip(lease.lengths, lease.ends, strict=True) if end <= until]
        rest = [(length, end) for length, end in zip(lease.lengths, lease.ends, strict=True) if end > until]
        begun = sum(1 for length, end in rest if end - length * worker.generation_s < until)
        if cause == "old":
            self.counts.too_old += begun
        else:
            self.counts.lost += begun
        self.counts.never_began += len(rest) - begun
        whole = self._take(lease, done, [length for length, _ in rest])
        self._free(worker, now)
        return whole

    def _take(self, lease: Lease, done: list[float], missing: list[float]) -> Group | None:
        group, worker = lease.group, lease.worker
        del group.leases[lease], worker.leases[lease]
        worker.busy_s += sum(done) * worker.generation_s
        if lease.refused:
            self.counts.refused += len(done)
            done, missing = [], done + missing
        self.counts.accepted += len(done)
        group.left -= len(done)
        if done:
            group.oldest = min(group.oldest, lease.version)
        if missing:
            group.missing += [(length, worker) for length in missing]
            heapq.heappush(self.missing, (group.number, next(self._order), group))
        return group if done and group.left == 0 else None

    def _free(self, worker: FleetWorker, now: float) -> None:
        """Slots after a lease was cut; what else the worker has goes on as planned."""
        at = worker.work_time(now)
        ends = sorted((end for lease in worker.leases for end in lease.ends if end > at), reverse=True)[: worker.slots]
        worker.free_at = ends + [at] * (worker.slots - len(ends))
        heapq.heapify(worker.free_at)

    # Steps

    def graded(self, group: Group) -> None:
        """Its rewards are known; it may have died meanwhile."""
        if self.open.pop(group.number, None) is None:
            return
        self._laws.moved(group.number, State.ISSUED, State.READY)
        self.ready[group.number] = ReadyGroup(group.number, group.oldest, ALIKE if group.alike else APART)

    def seal(self) -> bool:
        """Try to make the learner's next batch; whether groups were rejected, so that others may be issued."""
        if self.batch is not None or len(self.ready) < self.per_step or self.step >= self.planned:
            return False
        chosen = choose(
            list(self.ready.values()),
            step=self.step,
            bound=self.bound,
            groups_per_step=self.per_step,
            max_replacements=self.per_step,
            replaced=self._replaced,
        )
        for number, reason in chosen.rejected:
            del self.ready[number], self.unsettled[number]
            code = reason.partition(":")[0]
            self.rejected[code] += 1
            self.counts.accepted_too_old += self.size * (code == "stale")
            self._replaced += code != "stale"
            self._laws.moved(number, State.READY, State.REJECTED)
        if chosen.groups is not None:
            self.batch = chosen
            self._laws.sealed(chosen, {number: self.ready[number].oldest_version for number in chosen.groups}, self.step)
            for number in chosen.groups:
                del self.ready[number]
        return bool(chosen.rejected)

    @property
    def gate_is_shut(self) -> bool:
        """Whether not even a worker with the newest version could be granted a new group."""
        return not self.would_grant(self.newest)

    def would_grant(self, version: int) -> bool:
        """Whether a worker with this version would get a new group."""
        return self._rule(version).groups > 0

    def commit(self, look: Callable[[FleetWorker], None], now: float) -> tuple[list[Lease], list[Group]]:
        """The learner's step is done: the leases that no step can use any more, cut, and groups that are whole by that."""
        assert self.batch is not None
        assert self.batch.groups is not None
        for number in self.batch.groups:
            del self.unsettled[number]
            self._laws.moved(number, State.SEALED, State.TRAINED)
        self.staleness.update(self.batch.staleness)
        self.batch, self._replaced = None, 0
        self.step += 1
        return self._bury(look, now)

    def _bury(self, look: Callable[[FleetWorker], None], now: float) -> tuple[list[Lease], list[Group]]:
        ended: list[Lease] = []
        whole: list[Group] = []
        for version in [version for version in self._of_version if self.step > last_step(version, self.bound)]:
            for group in self._of_version.pop(version):
                if group.number not in self.open:
                    continue
                incomplete = group.left > 0
                ended += self._cut_all([lease for lease in group.leases if lease.version <= version], look, now)
                if self.step > last_step(group.oldest, self.bound):
                    ended += self._end(group, look, now)
                elif incomplete and group.left == 0:
                    whole.append(group)
        return ended, whole

    def _cut_all(self, leases: list[Lease], look: Callable[[FleetWorker], None], now: float) -> list[Lease]:
        for lease in leases:
            look(lease.worker)
            self.cut(lease, now, "old")
        return leases

    def _end(self, group: Group, look: Callable[[FleetWorker], None], now: float) -> list[Lease]:
        """A group that holds something too old ends whole."""
        leases = self._cut_all(list(group.leases), look, now)
        self.counts.accepted_too_old += self.size - group.left
        self.rejected["stale_open"] += 1
        del self.open[group.number], self.unsettled[group.number]
        self._laws.moved(group.number, State.ISSUED, State.REJECTED)
        return leases
