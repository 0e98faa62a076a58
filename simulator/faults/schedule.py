"""Fault schedules: what kind of job, which workers, and what goes wrong when. All of it is a function of one seed.

Each schedule has a crash, a partition and (as every job publishes) version changes; most have much more.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random
from typing import Literal

from coordinator.domain.seeds import derive

EARLY_S = (2.0, 6.0)  # the one crash and the one partition of every schedule: before any job can be over
FAULTS_S = (1.0, 16.0)  # faults begin within this time; all of them have healed some time after


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that goes wrong at `at` seconds, in words that the story repeats. `whom`: a worker's place, -1: the coordinator."""

    at: float
    kind: str
    whom: int = -1
    for_s: float = 0.0
    amount: float = 0.0
    after_step: int = 0  # not before so many steps are committed
    when: str = ""  # as soon as the job is in this state, or "sealed": a batch waits for its step

    def __str__(self) -> str:
        where = "the coordinator" if self.whom < 0 else f"worker {self.whom}"
        return f"{self.kind} ({where}, for {self.for_s:.1f} s, {self.amount:g})"


Temper = Literal["honest", "slow", "late", "replayer", "thief", "fabricator", "broken_engine"]
HOSTILE: tuple[Temper, ...] = ("late", "replayer", "thief", "fabricator", "broken_engine")


@dataclass(frozen=True, slots=True)
class Kind:
    """A worker: `slots` completions at once, each at `tokens_per_s`; its clock runs at `drift` and is `skew_s` off."""

    temper: Temper
    slots: int
    tokens_per_s: float
    price_uusd_per_hour: int
    fetch_s: float
    latency_s: float
    drift: float
    skew_s: float


@dataclass(frozen=True, slots=True)
class Schedule:
    """One run. Probabilities are of each message or grading."""

    seed: int
    workers: tuple[Kind, ...]
    faults: tuple[Fault, ...]
    steps: int
    group_size: int
    groups_per_step: int
    bound: int
    publish_every: int | Literal["auto"]
    on_update: Literal["keep", "abort"]
    min_group: int | None
    checkpoint_every: int
    max_replacements: int | None
    train_s: float
    encode_s: float
    grade_s: float
    tail: float  # sigma of the log of a completion's length
    loss: float
    duplicates: float
    zero_variance: float
    ungraded: float
    disk_s: float  # the longest that a transaction waits for the disk
    submitted_s: float = 0.0  # when the job is queued
    broken_plane: bool = False  # the environment never starts
    activation: Literal["market", "all"] = "market"
    budget_usd: float | None = None
    turns: int = 1  # the most of a rollout
    crash_commits: tuple[tuple[int, Literal["before", "after"]], ...] = field(default_factory=tuple)

    def __str__(self) -> str:
        tempers = ", ".join(f"{kind.temper} {kind.slots}x{kind.tokens_per_s:g}" for kind in self.workers)
        return (
            f"seed {self.seed}: {self.steps} steps of {self.groups_per_step} groups of {self.group_size}, S {self.bound}, "
            f"kappa {self.publish_every}, workers {tempers}"
        )


def schedule(seed: int) -> Schedule:
    """The schedule of a seed."""
    rng = Random(derive(seed, "schedule"))  # noqa: S311 (seeded on purpose)
    workers = _workers(rng)
    size, steps = rng.choice((2, 2, 3, 4)), rng.choice((3, 4, 5))
    return Schedule(
        seed=seed,
        workers=workers,
        faults=_faults(rng, len(workers), steps),
        steps=steps,
        group_size=size,
        groups_per_step=rng.choice((1, 2, 2, 3)),
        bound=rng.choice((0, 1, 1, 2, 2, 3)),
        publish_every=rng.choice(("auto", 1, 1, 2)),
        on_update=rng.choice(("keep", "keep", "abort")),
        min_group=rng.choice((None, None, 2)),
        checkpoint_every=rng.choice((1, 2, 3, 100)),
        max_replacements=rng.choice((None, None, 0, 1)),
        train_s=rng.choice((0.3, 0.8, 1.8)),
        encode_s=rng.choice((0.05, 0.3, 1.0)),
        grade_s=rng.choice((0.02, 0.3)),
        tail=rng.choice((0.0, 0.5, 1.2)),
        loss=rng.choice((0.0, 0.02, 0.1)),
        duplicates=rng.choice((0.0, 0.05, 0.2)),
        zero_variance=rng.choice((0.0, 0.0, 0.3)),
        ungraded=rng.choice((0.0, 0.0, 0.05)),
        disk_s=rng.choice((0.0, 0.0, 0.02)),
        activation=rng.choice(("market", "all")),
        budget_usd=rng.choice((None, None, 0.03, 0.1, 5.0)),
        crash_commits=_crash_commits(rng),
        turns=Random(derive(seed, "turns")).choice((1, 1, 3)),  # noqa: S311 (seeded on purpose)
    )


def _workers(rng: Random) -> tuple[Kind, ...]:
    """The first is honest and quick enough to end the job alone."""
    tempers: list[Temper] = ["honest", *rng.choices(("honest", "slow", *HOSTILE), k=rng.choice((1, 2, 2, 3)))]
    return tuple(_kind(rng, temper) for temper in tempers)


def _kind(rng: Random, temper: Temper) -> Kind:
    return Kind(
        temper=temper,
        slots=rng.choice((2, 3, 4, 8)),
        tokens_per_s=rng.uniform(0.8, 2.0) if temper == "slow" else rng.uniform(5.0, 16.0),
        price_uusd_per_hour=rng.choice((0, 200_000, 1_000_000)),
        fetch_s=rng.choice((0.1, 0.4, 1.5)),
        latency_s=rng.choice((0.005, 0.05, 0.2)),
        drift=rng.uniform(0.98, 1.02),
        skew_s=rng.choice((0.0, 3.0, -40.0, 300.0)),
    )


_WHEN: tuple[Literal["before", "after"], ...] = ("before", "after")


def _crash_commits(rng: Random) -> tuple[tuple[int, Literal["before", "after"]], ...]:
    """Commits of the whole run (counted from 1) at which the coordinator dies, just before or just after they are durable."""
    count = rng.choice((0, 1, 1, 2))
    return tuple(sorted((rng.randrange(10, 220), rng.choice(_WHEN)) for _ in range(count)))


# kind -> (weight, who, seconds to draw from, amounts to draw from)
_Row = tuple[int, str, tuple[float, ...], tuple[float, ...]]
_KINDS: dict[str, _Row] = {
    "coordinator_crash": (3, "coordinator", (0.2, 1.0, 3.0, 6.0), (0, 1)),
    "learner_crash": (3, "coordinator", (0,), (0, 1)),
    "worker_crash": (4, "worker", (0.5, 2.0, 8.0), (0, 1)),
    "preemption": (2, "worker", (3.0, 10.0), (0, 1.0, 4.0)),
    "partition": (3, "worker", (1.0, 4.0, 8.0), (0,)),
    "clock_step": (2, "coordinator", (0,), (-8.0, -1.0, 2.0, 15.0)),
    "worker_clock_step": (1, "worker", (0,), (-90.0, 90.0)),
    "engine_fault": (1, "worker", (3.0,), (0,)),
    "pause": (2, "coordinator", (1.0, 4.0, 9.0), (0,)),
    "new_bound": (3, "coordinator", (0,), (0, 0, 1, 4)),
    "drain": (1, "worker", (4.0,), (0,)),
    "quarantine": (1, "worker", (0, 0, 4.0), (0,)),
    "release": (1, "worker", (0,), (0,)),
    "new_price": (2, "worker", (1.0,), (0, 100_000, 5_000_000)),
    "disk_full": (1, "coordinator", (1.0, 3.0, 5.0), (0,)),
    "publisher_fault": (1, "coordinator", (0.5, 1.5, 2.5), (0,)),
    "cancel": (1, "coordinator", (0,), (0,)),
}


def _faults(rng: Random, workers: int, steps: int) -> tuple[Fault, ...]:
    crash = rng.choice(("coordinator_crash", "coordinator_crash", "learner_crash", "worker_crash"))
    names = list(_KINDS)
    more = rng.choices(names, weights=[_KINDS[name][0] for name in names], k=rng.choice((0, 1, 2, 3, 4)))
    faults = [_fault(rng, "partition", workers, EARLY_S)]
    faults.append(replace(_fault(rng, crash, workers, EARLY_S), after_step=rng.randrange(steps - 1)))
    faults += [_fault(rng, kind, workers, FAULTS_S) for kind in more]
    return tuple(sorted(faults, key=lambda fault: fault.at))


def _fault(rng: Random, kind: str, workers: int, within_s: tuple[float, float]) -> Fault:
    _, who, seconds, amounts = _KINDS[kind]
    at = rng.uniform(*within_s)
    whom = rng.randrange(workers) if who == "worker" else -1
    return Fault(round(at, 3), kind, whom, rng.choice(seconds), float(rng.choice(amounts)))
