"""What the capacity model is told: measured figures as values, each with its unit. Times in seconds, rates per second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random
from statistics import NormalDist
from typing import Literal

POINTS = 512  # of a length distribution that is given by a formula


class CapacityError(ValueError):
    """An input that cannot be; the message names the field, the value and what it may be."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measured figure and the standard deviation of its error (0: exact)."""

    value: float
    sd: float = 0.0

    def __post_init__(self) -> None:
        _require("value", self.value)
        _require("sd", self.sd)


@dataclass(frozen=True, slots=True)
class Lengths:
    """How long completions are, relative to their mean: equally likely values, ascending, with mean 1."""

    values: tuple[float, ...]

    @classmethod
    def measured(cls, sample: Sequence[float]) -> Lengths:
        """From lengths of finished completions, in any unit. Raises CapacityError without a positive one."""
        total = math.fsum(sample)
        if not math.isfinite(total) or total <= 0 or min(sample) < 0:
            raise CapacityError(f"lengths of {len(sample)} completions sum up to {total}: give finite ones of which one is above 0")
        return cls(tuple(sorted(value * len(sample) / total for value in sample)))

    @classmethod
    def lognormal(cls, cv: float, *, cap: float = math.inf, points: int = POINTS) -> Lengths:
        """Log-normal with standard deviation `cv` times the mean, cut at `cap` times the mean of the uncut ones."""
        sigma = math.sqrt(math.log1p(cv * cv))
        places = ((i + 0.5) / points for i in range(points))
        return cls.measured([min(math.exp(sigma * NormalDist().inv_cdf(p) - sigma * sigma / 2), cap) for p in places])

    @property
    def cv_squared(self) -> float:
        """Variance over the squared mean."""
        return math.fsum((value - 1) ** 2 for value in self.values) / len(self.values)

    def quantile_of_longest(self, share: float, count: int) -> float:
        """The length that the longest of `count` completions stays within in `share` of the cases."""
        place = math.ceil(len(self.values) * math.pow(share, 1 / count) - 1e-9)
        return self.values[min(max(place, 1), len(self.values)) - 1]

    def mean_of_longest(self, count: int) -> float:
        """The mean of the longest of `count` completions."""
        size = len(self.values)
        return math.fsum(value * (((i + 1) / size) ** count - (i / size) ** count) for i, value in enumerate(self.values))

    def draw(self, rng: Random) -> float:
        """One of them."""
        return self.values[int(rng.random() * len(self.values))]


class Loading(StrEnum):
    """What a worker does when a new version comes."""

    IDLE = "idle"  # it stands still from publication until it serves the version: no room for a second copy
    KEEP = "keep"  # it fetches in the background and stands still while applying; running completions go on
    ABORT = "abort"  # as KEEP, but running completions are given up and begun again


@dataclass(frozen=True, slots=True)
class WorkerCapacity:
    """One active worker."""

    id: str
    slots: int  # completions at once
    generating: Estimate  # g: finished rollouts per second while it generates
    admitted: Estimate  # a: share of them that is settled, 0 to 1
    bcast_s: float  # mean, from publication until it serves the version
    apply_s: float = 0.0  # of which it stands still for applying
    loading: Loading = Loading.KEEP
    up_mbps: float | None = None  # None: not measured
    down_mbps: float | None = None

    def __post_init__(self) -> None:
        _require("slots", self.slots, least=1)
        _require("generating", self.generating.value, above=0.0)
        _require("admitted", self.admitted.value, above=0.0, most=1.0)
        _require("bcast_s", self.bcast_s)
        _require("apply_s", self.apply_s, most=self.bcast_s)

    @property
    def generation_s(self) -> float:
        """T_gen: mean seconds of one completion with all slots busy (Little: slots = rate x time)."""
        return self.slots / self.generating.value

    @property
    def rate(self) -> float:
        """Settled rollouts per second while it generates: a * g."""
        return self.admitted.value * self.generating.value


@dataclass(frozen=True, slots=True)
class JobShape:
    """What the job asks for."""

    group_size: int  # G
    groups_per_step: int  # B
    bound: int  # S
    publish_every: int | Literal["auto"] = "auto"
    no_signal: float = 0.0  # share of groups whose rewards are all alike, so that others are made in their place

    def __post_init__(self) -> None:
        _require("group_size", self.group_size, least=1)
        _require("groups_per_step", self.groups_per_step, least=1)
        _require("bound", self.bound)
        _require("no_signal", self.no_signal, most=1.0)

    @property
    def rollouts_per_step(self) -> int:
        """R = G * B."""
        return self.group_size * self.groups_per_step

    @property
    def generated_per_step(self) -> float:
        """Rollouts to admit for one step: groups without signal are replaced, at most B times a step."""
        return float(self.rollouts_per_step) * (2.0 if self.no_signal >= 0.5 else 1 / (1 - self.no_signal))


@dataclass(frozen=True, slots=True)
class Transfer:
    """What one publication sends, and how fast the coordinator's side can."""

    nbytes: float  # to each worker
    seeder_up_mbps: float

    def __post_init__(self) -> None:
        _require("nbytes", self.nbytes, above=0.0)
        _require("seeder_up_mbps", self.seeder_up_mbps, above=0.0)


@dataclass(frozen=True, slots=True)
class CapacityInputs:
    """All that the model looks at."""

    job: JobShape
    train_s: float  # T_train, one step
    bcast_p95_s: float  # T_bcast: 95th percentile over active workers, from publication until the version is served
    grade_s: float  # from a completion's end to its group's reward
    lengths: Lengths
    workers: tuple[WorkerCapacity, ...]
    transfer: Transfer | None = None  # None: links are not measured

    def __post_init__(self) -> None:
        _require("train_s", self.train_s, above=0.0)
        _require("bcast_p95_s", self.bcast_p95_s)
        _require("grade_s", self.grade_s)
        if not self.workers:
            raise CapacityError("workers is empty: the model needs at least one")


def _require(name: str, value: float, *, least: float = 0.0, above: float | None = None, most: float = math.inf) -> None:
    if math.isfinite(value) and least <= value <= most and (above is None or value > above):
        return
    lower = f"above {above}" if above is not None else f"at least {least}"
    upper = "" if most == math.inf else f" and at most {most}"
    raise CapacityError(f"{name} is {value}: it must be finite, {lower}{upper}")
