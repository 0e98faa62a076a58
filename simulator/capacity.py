"""The capacity model against long simulations: a grid of jobs and fleets, each at 0.9, 1.05 and 1.15 of the required rate.

The model sees what a live job measures: rates, delays and 512 quantiles of the lengths. The simulation draws lengths from the
distribution itself, with another seed, for a horizon several times the forecast's. All times are in units of T_train or seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from random import Random

from coordinator.domain.capacity import chosen_kappa, pause_s, required_rate
from coordinator.domain.capacity_forecast import Forecast, forecast, rehearsal_of
from coordinator.domain.capacity_inputs import CapacityInputs, Estimate, JobShape, Lengths, Loading, WorkerCapacity
from coordinator.domain.rehearsal import DELAY_SPREAD, Rehearsed, rehearse

LOADS = (0.9, 1.05, 1.15)
CAP = 10.0  # means: the longest completion that max_new_tokens allows
TAILS = {"cv 0.5": 0.5, "heavy": 1.5}  # standard deviation over mean of the uncut log-normal
P95_OF_MEAN = 1 - DELAY_SPREAD + 0.95 * 2 * DELAY_SPREAD  # of a delivery's delay
LONG_COMPLETIONS, LONG_STEPS = 30_000, 300  # both at least
LEAST_WORKING = 0.3  # share of a period that pauses leave: a fleet for less would be absurd, and is sized for this much


@dataclass(frozen=True, slots=True)
class Kind:
    """Part of a fleet: its share of the slots, its relative speed, and how it takes a new version."""

    slots: float
    speed: float = 1.0
    bcast: float = 1.0  # times the fleet's delay
    admitted: float = 1.0
    loading: Loading = Loading.KEEP
    apply: float = 0.02  # of the delay: standing still


MIXES: dict[str, tuple[Kind, ...]] = {
    "one": (Kind(1),),
    "equal": (Kind(1),) * 4,
    "mixed": (Kind(4, 2.0), Kind(2, admitted=0.9), Kind(2, bcast=0.5), Kind(1, 0.5)),
    "many": (Kind(1),) * 16,
    "idle": (Kind(1, loading=Loading.IDLE),) * 4,
    "blend": (Kind(2, 2.0), Kind(1, loading=Loading.IDLE), Kind(1, 0.7, admitted=0.85, loading=Loading.IDLE)),
}
PAUSING: dict[str, tuple[Kind, ...]] = {  # mixes that stand still for long at a publication
    "idle": MIXES["idle"],
    "blend": MIXES["blend"],
    "abort": (Kind(1, loading=Loading.ABORT),) * 4,
    "slow apply": (Kind(1, apply=0.5),) * 4,
}
SHAPES = ((4, 8), (8, 16), (16, 16))  # (G, B): R = 32, 128, 256
TRAIN_S = (10.0, 60.0)
BCAST = (0.1, 0.5, 1.0, 1.5)  # mean, times T_train
GENERATION = (0.1, 0.4, 1.2)  # mean, times T_train
DIALS = ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2), (6, 1), (6, 2), (6, 5), (11, 2), (11, 5), (11, 10))  # (S, kappa)
PAIRS_EACH = 4


@dataclass(frozen=True, slots=True)
class Case:
    """One job and fleet, up to the fleet's size."""

    mix: str
    tail: str
    bound: int
    kappa: int
    bcast: float
    generation: float
    group_size: int = 8
    groups_per_step: int = 16
    train_s: float = 60.0


@dataclass(frozen=True, slots=True)
class Result:
    """A case at one load: what the model said and what the long simulation gave."""

    case: Case
    load: float
    reachable: bool  # False: no fleet makes the rule hold (the pauses fill the period); then `load` is of what is left
    pause_share: float  # of a period, weighted by rate
    forecast: Forecast
    long: Rehearsed

    @property
    def inside(self) -> bool:
        """Inside the warning line, with the p99 of T_gen."""
        return self.reachable and self.forecast.assessment.inside

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted minus simulated utilisation and discards."""
        return self.forecast.utilisation - self.long.utilisation, self.forecast.discards - self.long.discards


def grid() -> list[Case]:
    """Every mix, tail and (S, kappa), each with four of the twelve pairs (T_bcast, T_gen); R and T_train take turns.

    In a fixed random order, so that every n-th case is a fair sample.
    """
    pairs = list(product(BCAST, GENERATION))
    cases = []
    for number, (mix, tail, dials) in enumerate(product(MIXES, TAILS, DIALS)):
        for turn in range(PAIRS_EACH):
            bcast, generation = pairs[(number * 5 + turn * 3) % len(pairs)]
            size, groups = SHAPES[(number + turn) % len(SHAPES)]
            cases.append(Case(mix, tail, *dials, bcast, generation, size, groups, TRAIN_S[turn % len(TRAIN_S)]))
    Random(0).shuffle(cases)  # noqa: S311 (seeded on purpose)
    return cases


def inputs_of(case: Case, load: float, *, is_auto: bool = False) -> tuple[CapacityInputs, bool]:
    """The fleet that gives `load` times the required rate, as it would be measured; whether one exists. `is_auto`: kappa by its default."""
    job = JobShape(case.group_size, case.groups_per_step, case.bound, "auto" if is_auto else case.kappa)
    lengths = Lengths.lognormal(TAILS[case.tail], cap=CAP)
    bcast_s, generation_s = case.bcast * case.train_s, case.generation * case.train_s
    kinds = (MIXES | PAUSING)[case.mix]
    workers = tuple(_worker(f"w{i}", kind, 1, generation_s / kind.speed, bcast_s) for i, kind in enumerate(kinds))
    p95_s = bcast_s * P95_OF_MEAN * max(kind.bcast for kind in kinds)
    inputs = CapacityInputs(job, case.train_s, p95_s, 0.01 * case.train_s, lengths, workers)
    wanted = load * required_rate(inputs)
    unit, reachable = _rate_per_slot(inputs, kinds)
    slots = [max(round(kind.slots * wanted / unit), 1) for kind in kinds]
    given = replace(inputs, workers=_fleet(slots, inputs, 1.0))
    real, _ = _total(given)
    return replace(inputs, workers=_fleet(slots, inputs, real / wanted)), reachable


def _worker(name: str, kind: Kind, slots: int, generation_s: float, bcast_s: float) -> WorkerCapacity:
    return WorkerCapacity(
        id=name,
        slots=slots,
        generating=Estimate(slots / generation_s),
        admitted=Estimate(kind.admitted),
        bcast_s=bcast_s * kind.bcast,
        apply_s=0.0 if kind.loading is Loading.IDLE else kind.apply * bcast_s * kind.bcast,
        loading=kind.loading,
    )


def _total(inputs: CapacityInputs) -> tuple[float, bool]:
    """The rate that the pauses leave, at least LEAST_WORKING of each worker's, and whether that floor was not needed."""
    period_s = chosen_kappa(inputs) * inputs.train_s
    shares = [1 - pause_s(worker, inputs) / period_s for worker in inputs.workers]
    rates = [worker.rate * max(share, LEAST_WORKING) for worker, share in zip(inputs.workers, shares, strict=True)]
    return math.fsum(rates), min(shares) >= LEAST_WORKING


def _rate_per_slot(inputs: CapacityInputs, kinds: tuple[Kind, ...]) -> tuple[float, bool]:
    weighted = tuple(
        replace(worker, generating=Estimate(worker.generating.value * kind.slots))
        for worker, kind in zip(inputs.workers, kinds, strict=True)
    )
    return _total(replace(inputs, workers=weighted))


def _fleet(slots: list[int], inputs: CapacityInputs, slower: float) -> tuple[WorkerCapacity, ...]:
    return tuple(
        replace(worker, slots=count, generating=Estimate(worker.generating.value * count / slower))
        for worker, count in zip(inputs.workers, slots, strict=True)
    )


def drawn(tail: str) -> Callable[[Random], float]:
    """Lengths from the distribution itself, divided by the mean that the cap leaves."""
    sigma = math.sqrt(math.log1p(TAILS[tail] ** 2))
    kept = capped_mean(sigma)
    return lambda rng: min(math.exp(sigma * rng.gauss(0.0, 1.0) - sigma * sigma / 2), CAP) / kept


def capped_mean(sigma: float) -> float:
    """E min(X, CAP) of a log-normal X with mean 1 (the limited expected value)."""
    place = (math.log(CAP) + sigma * sigma / 2) / sigma
    below = 0.5 * (1 + math.erf((place - sigma) / math.sqrt(2)))
    above = 0.5 * (1 - math.erf(place / math.sqrt(2)))
    return below + CAP * above


def measure(case: Case, load: float, *, seed: int = 1) -> Result:
    """Forecast and simulate."""
    inputs, reachable = inputs_of(case, load)
    said = forecast(inputs, seed=seed)
    kappa = said.assessment.kappa
    steps = max(round(LONG_COMPLETIONS / inputs.job.rollouts_per_step), LONG_STEPS)
    long = rehearse(rehearsal_of(inputs, kappa, steps=steps), drawn(case.tail), seed + 1_000_003)
    rate = math.fsum(worker.rate for worker in inputs.workers)
    paused = math.fsum(worker.rate * pause_s(worker, inputs) for worker in inputs.workers) / rate
    return Result(case, load, reachable, paused / (kappa * inputs.train_s), said, long)
