"""A job rehearsed on a virtual clock: what the learner's idle time and the discards will be, where no formula says it.

Grant, lease size, seal, staleness and publication are the rules that the service applies; only time and lengths are made up,
from the seed. One event a completion, so that 200,000 of them take about a second. Left out: crashes, churn, uploads.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from random import Random

from coordinator.domain import publication
from coordinator.domain.capacity_inputs import Loading
from coordinator.domain.grant import grantable
from coordinator.domain.leases import groups_for
from coordinator.domain.seal import ReadyGroup, Seal, choose
from coordinator.domain.staleness import last_step

ENDLESS = 10**9
DELAY_SPREAD = 0.5  # a delivery takes between 0.5 and 1.5 of its worker's mean
ALIKE, APART = (1.0, 1.0), (0.0, 1.0)  # rewards of a group without and with signal

Draw = Callable[[Random], float]  # a completion's length, relative to the mean


@dataclass(frozen=True, slots=True)
class Player:
    """One worker of the rehearsal. Seconds."""

    slots: int
    generation_s: float  # mean of one completion, with all slots busy
    bcast_s: float  # mean, from publication until it serves the version
    apply_s: float = 0.0
    admitted: float = 1.0  # share of its finished completions that are settled
    loading: Loading = Loading.KEEP


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """What is rehearsed. Figures count from step `warm_up` (0: from the first seal) to step `steps`.

    `planned_steps` is where the job ends and the grants before it; without it the middle of a long job is looked at.
    """

    players: tuple[Player, ...]
    group_size: int
    groups_per_step: int
    bound: int
    kappa: int
    train_s: float
    grade_s: float = 0.0
    no_signal: float = 0.0  # share of groups whose rewards are all alike
    steps: int = 60
    warm_up: int = 20
    planned_steps: int = ENDLESS
    most_completions: int = 1_000_000  # started; the rehearsal ends early there


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """What came out. `discards`: share of the started completions that were thrown away for their age."""

    utilisation: float  # share of the time in which the learner trained
    discards: float
    staleness: dict[int, int]  # staleness -> trained groups
    steps: int  # counted
    completions: int  # started, counted
    seconds: float  # virtual, counted
    whole: bool  # False: `most_completions` ended it early


def rehearse(rehearsal: Rehearsal, draw: Draw, seed: int) -> Rehearsed:
    """Run it. The same arguments give the same answer."""
    return _Run(rehearsal, draw, Random(seed)).run()  # noqa: S311 (seeded on purpose)


@dataclass(slots=True, eq=False)
class _Group:
    number: int
    alike: bool
    left: int  # completions that are not accepted yet
    oldest: int = ENDLESS  # version of any accepted token
    tasks: dict[_Task, None] = field(default_factory=dict)  # leased, not finished; a set's order would not be seeded


@dataclass(slots=True, eq=False)
class _Task:
    """One leased completion."""

    group: _Group
    version: int  # of the lease
    worker: _Worker
    length: float  # relative to the mean; the same in every attempt (same prompt, same seed)
    begun: int = ENDLESS  # the version that made its first token
    still_s: float = 0.0  # the worker's, when its end was foretold


@dataclass(slots=True, eq=False)
class _Worker:
    player: Player
    version: int | None = None
    fetching: bool = False
    still: bool = True
    still_s: float = 0.0  # all time it stood still while completions ran
    queue: deque[_Task] = field(default_factory=deque)
    running: dict[_Task, None] = field(default_factory=dict)

    @property
    def free(self) -> int:
        return self.player.slots - len(self.running) - len(self.queue)


@dataclass(slots=True)
class _Counts:
    at: float = 0.0
    step: int = 0
    started: int = 0
    discarded: int = 0


class _Run:
    def __init__(self, rehearsal: Rehearsal, draw: Draw, rng: Random) -> None:
        self._of = rehearsal
        self._draw = draw
        self._rng = rng
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._scheduled = 0
        self._workers = [_Worker(player) for player in rehearsal.players]
        self._step = 0
        self._unsettled: dict[int, None] = {}  # issue numbers, ascending
        self._issued = 0
        self._open: dict[int, _Group] = {}  # groups with completions to come
        self._missing: list[_Task] = []  # completions that lost their lease
        self._ready: dict[int, ReadyGroup] = {}
        self._batch: Seal | None = None  # the one that is trained
        self._replaced = 0
        self._newest: int | None = None
        self._counts = _Counts()
        self._from = _Counts()
        self._staleness: Counter[int] = Counter()

    def run(self) -> Rehearsed:
        of = self._of
        self._publish_if_due()
        while self._step < of.steps and self._counts.started < of.most_completions:
            self._now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
        begin = self._from
        steps = self._step - begin.step
        seconds = max(self._now - begin.at, steps * of.train_s)
        started = self._counts.started - begin.started
        return Rehearsed(
            utilisation=steps * of.train_s / seconds if seconds else 0.0,
            discards=(self._counts.discarded - begin.discarded) / max(started, 1),
            staleness=dict(sorted(self._staleness.items())),
            steps=steps,
            completions=started,
            seconds=seconds,
            whole=self._step >= of.steps,
        )

    def _after(self, delay_s: float, action: Callable[..., None], *arguments: object) -> None:
        self._scheduled += 1
        heapq.heappush(self._events, (self._now + delay_s, self._scheduled, action, arguments))

    # Weights

    def _publish_if_due(self) -> None:
        of = self._of
        if publication.is_due(committed_steps=self._step, published=self._newest, kappa=of.kappa, planned_steps=of.planned_steps):
            self._newest = self._step
            for worker in self._workers:
                self._fetch(worker)

    def _fetch(self, worker: _Worker) -> None:
        if worker.fetching or worker.version == self._newest:
            return
        worker.fetching = True
        player = worker.player
        bcast_s = player.bcast_s * self._rng.uniform(1 - DELAY_SPREAD, 1 + DELAY_SPREAD)
        apply_s = min(player.apply_s, bcast_s)
        if player.loading is Loading.IDLE:
            apply_s = bcast_s
        self._after(bcast_s - apply_s, self._stand_still, worker, apply_s)
        self._after(bcast_s, self._serve, worker, self._newest)

    def _stand_still(self, worker: _Worker, for_s: float) -> None:
        worker.still = True
        worker.still_s += for_s

    def _serve(self, worker: _Worker, version: int) -> None:
        worker.still, worker.fetching, worker.version = False, False, version
        if worker.player.loading is Loading.ABORT:
            for task in list(worker.running):
                self._give_up(task)
        self._fetch(worker)
        self._wake()

    # Work

    def _ask(self, worker: _Worker) -> None:
        if worker.still or worker.version is None:
            return
        version = worker.version
        if worker.free > 0 and self._step <= last_step(version, self._of.bound):
            size, free = self._of.group_size, worker.free
            granted = self._lease_missing(worker, version) if self._missing else 0
            if not granted or free - granted >= size:  # one group beyond the free slots only for those who got nothing else
                self._issue(worker, version, free - granted)
        self._begin(worker, version)

    def _issue(self, worker: _Worker, version: int, free: int) -> None:
        of = self._of
        rule = grantable(
            committed_steps=self._step,
            unsettled=len(self._unsettled),
            groups_per_step=of.groups_per_step,
            bound=of.bound,
            held_version=version,
            planned_steps=of.planned_steps,
        )
        for _ in range(groups_for(free, group_size=of.group_size, grantable=rule.groups)):
            group = _Group(self._issued, self._rng.random() < of.no_signal, of.group_size)
            self._issued += 1
            self._unsettled[group.number] = None
            self._open[group.number] = group
            for _ in range(of.group_size):
                self._lease(group, worker, version, self._draw(self._rng))

    def _lease(self, group: _Group, worker: _Worker, version: int, length: float) -> None:
        task = _Task(group, version, worker, length)
        group.tasks[task] = None
        worker.queue.append(task)

    def _lease_missing(self, worker: _Worker, version: int) -> int:
        """Lost completions of the oldest groups that this version can still serve, by another worker than had them."""
        of, free, granted = self._of, worker.free, 0
        places = of.groups_per_step * (last_step(version, of.bound) - self._step + 1)
        served = set(islice(self._unsettled, places))
        kept: list[_Task] = []
        for lost in sorted(self._missing, key=lambda task: task.group.number):
            is_new_here = lost.worker is not worker or len(self._workers) == 1
            if granted < free and lost.group.number in served and is_new_here:
                self._lease(lost.group, worker, version, lost.length)
                granted += 1
            else:
                kept.append(lost)
        self._missing = kept
        return granted

    def _begin(self, worker: _Worker, version: int) -> None:
        player = worker.player
        while worker.queue and len(worker.running) < player.slots:
            task = worker.queue.popleft()
            worker.running[task] = None
            task.begun, task.still_s = version, worker.still_s
            self._counts.started += 1
            self._after(player.generation_s * task.length, self._finish, task)

    def _finish(self, task: _Task) -> None:
        worker = task.worker
        if task not in worker.running:
            return
        late_s = worker.still_s - task.still_s
        if late_s > 0:  # the worker stood still meanwhile
            task.still_s = worker.still_s
            self._after(late_s, self._finish, task)
            return
        if worker.player.admitted < 1.0 and self._rng.random() >= worker.player.admitted:
            self._give_up(task)
            self._wake()
            return
        self._accept(task)
        self._ask(worker)

    def _accept(self, task: _Task) -> None:
        group = task.group
        self._drop(task)
        group.left -= 1
        group.oldest = min(group.oldest, task.begun)
        if not group.left:
            self._after(self._of.grade_s, self._close, group)

    def _give_up(self, task: _Task) -> None:
        """The completion waits for another lease."""
        self._drop(task)
        self._missing.append(task)

    def _drop(self, task: _Task) -> None:
        del task.group.tasks[task]
        if task in task.worker.running:
            del task.worker.running[task]
        else:
            task.worker.queue.remove(task)

    def _throw_away(self, task: _Task) -> None:
        """Its age ends it."""
        self._counts.discarded += task in task.worker.running
        self._give_up(task)

    # Steps

    def _close(self, group: _Group) -> None:
        if self._open.pop(group.number, None) is None:  # it died while it was graded
            return
        self._ready[group.number] = ReadyGroup(group.number, group.oldest, ALIKE if group.alike else APART)
        if self._batch is None and len(self._ready) >= self._of.groups_per_step:
            self._seal()

    def _seal(self) -> None:
        of = self._of
        chosen = choose(
            list(self._ready.values()),
            step=self._step,
            bound=of.bound,
            groups_per_step=of.groups_per_step,
            max_replacements=of.groups_per_step,
            replaced=self._replaced,
        )
        for number, reason in chosen.rejected:
            del self._ready[number], self._unsettled[number]
            is_stale = reason.startswith("stale")
            self._counts.discarded += of.group_size * is_stale
            self._replaced += not is_stale
        if chosen.groups is not None:
            self._batch = chosen
            if self._of.warm_up == self._step == 0:
                self._from.at = self._now
            for number in chosen.groups:
                del self._ready[number]
            self._after(of.train_s, self._commit)
        if chosen.rejected:
            self._wake()

    def _commit(self) -> None:
        assert self._batch is not None
        assert self._batch.groups is not None
        for number in self._batch.groups:
            del self._unsettled[number]
        self._staleness.update(self._batch.staleness)
        self._batch, self._replaced = None, 0
        self._step += 1
        if self._step == self._of.warm_up:
            self._from = replace(self._counts, at=self._now, step=self._step)
            self._staleness.clear()
        self._publish_if_due()
        self._bury()
        self._seal()
        self._wake()

    def _bury(self) -> None:
        """End the leases that no step can use any more, and the groups that hold something too old."""
        bound = self._of.bound
        for group in list(self._open.values()):
            for task in [task for task in group.tasks if self._step > last_step(task.version, bound)]:
                self._throw_away(task)
            if self._step > last_step(group.oldest, bound):
                self._end(group)

    def _end(self, group: _Group) -> None:
        for task in list(group.tasks):
            self._throw_away(task)
        self._missing = [lost for lost in self._missing if lost.group is not group]
        self._counts.discarded += self._of.group_size - group.left
        del self._open[group.number], self._unsettled[group.number]

    def _wake(self) -> None:
        for worker in self._workers:
            self._ask(worker)
