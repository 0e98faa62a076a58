"""What a spine simulation is asked and what it answers. Times in seconds of the virtual clock, rates per second."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

MEAN_TOKENS = 32.0
MAX_TOKENS = 512


@dataclass(frozen=True, slots=True)
class WorkerModel:
    """One simulated worker: `slots` completions at once, each at `tokens_per_s`."""

    slots: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Outage:
    """The coordinator is down in [at, at + for_s); its learner dies with it.

    `rolled_back`: the replay gives the newest published version other weights (law 2).
    """

    at: float
    for_s: float
    rolled_back: bool = False


@dataclass(frozen=True, slots=True)
class WorkerCrash:
    """A worker loses its memory at `at` and joins again `for_s` later; None: never."""

    worker: int
    at: float
    for_s: float | None


@dataclass(frozen=True, slots=True)
class Scenario:
    """One simulated job. `load` is capacity over need: it fixes the step time; 1.15 is the usual headroom."""

    workers: tuple[WorkerModel, ...]
    seed: int = 0
    steps: int = 30
    group_size: int = 4
    groups_per_step: int = 8
    bound: int = 3
    publish_every: int | Literal["auto"] = "auto"
    load: float = 1.15
    tail: float = 0.5  # sigma of the log of a completion's length; 0: all alike
    bcast_s: float = 1.0  # publication until a worker confirmed it, on average
    grade_s: float = 0.1
    zero_variance: float = 0.0  # share of groups whose rewards are all alike
    min_group: int | None = None
    beat_s: float = 5.0
    lost_after_s: float = 17.5
    grace_s: float = 10.0
    outages: tuple[Outage, ...] = ()
    crashes: tuple[WorkerCrash, ...] = ()

    @property
    def rollouts_per_step(self) -> int:
        """R = G * B."""
        return self.group_size * self.groups_per_step

    @property
    def capacity_per_s(self) -> float:
        """Completions per second while everybody generates."""
        return sum(worker.slots * worker.tokens_per_s for worker in self.workers) / MEAN_TOKENS

    @property
    def train_s(self) -> float:
        """Seconds per optimiser step."""
        return self.load * self.rollouts_per_step / self.capacity_per_s

    def lease_s(self, sigmas: float | None) -> float:
        """Seconds from a group's lease to its last completion, on the slowest worker.

        The last slot waits until (G - 1) others found a place among the worker's slots. `sigmas` places the completion's
        length in its distribution; None is the mean.
        """
        spread = 1.0 if sigmas is None else math.exp(sigmas * self.tail - self.tail**2 / 2)
        tokens = min(MEAN_TOKENS * spread, MAX_TOKENS)
        waits = ((worker, (self.group_size - 1) / worker.slots * MEAN_TOKENS) for worker in self.workers)
        return max((tokens + wait) / worker.tokens_per_s for worker, wait in waits)


P99_SIGMAS = 2.326  # of the normal distribution


def warning_line(scenario: Scenario, *, kappa: int) -> int:
    """The smallest S inside DESIGN 5's line: kappa + max(ceil((T_bcast + T_gen + T_grade) / T_train), queue).

    Taken with the p99 of T_gen, which is never below the mean's. The queue is how many steps' rollouts the workers hold at
    once when all their slots are busy.
    """
    queue = math.ceil(sum(worker.slots for worker in scenario.workers) / scenario.rollouts_per_step)
    slow_s = max(scenario.lease_s(None), scenario.lease_s(P99_SIGMAS))
    path_s = scenario.bcast_s + slow_s + scenario.grade_s
    return kappa + max(math.ceil(path_s / scenario.train_s), queue)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. `discards` is the share of started completions that were thrown away for their age."""

    steps: int
    utilisation: float  # share of the time since the first seal in which the learner trained
    discards: float
    staleness: Mapping[int, int]  # staleness -> trained groups
    started: int  # completions
    seconds: float  # virtual
    kappa: int  # at the end
    reasons: Mapping[str, int] = field(default_factory=dict)  # refusals and rejections by code
    story: tuple[str, ...] = ()
