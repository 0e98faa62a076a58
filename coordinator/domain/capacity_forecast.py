"""What the learner's utilisation and the discards will be, and what one more worker, S or Mbit/s would buy.

Short rehearsals of the job answer, inside the warning line and outside. At least 240 steps each: a twentieth to a quarter of a second
of one core, so callers with an event loop use a thread. Errors of the estimate: see docs/capacity.md.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.domain.capacity import Assessment, assess
from coordinator.domain.capacity_inputs import CapacityInputs, Transfer, WorkerCapacity
from coordinator.domain.rehearsal import Player, Rehearsal, Rehearsed, rehearse
from p2p.domain.fluid import fluid_bound

COMPLETIONS = 12_000  # wanted in one forecast
FEWEST_STEPS, MOST_STEPS = 240, 400  # steps and deliveries vary as well
LARGE_STEP = 512  # rollouts
CEILING = 8  # times as many as planned: then the rehearsal is given up (a fleet whose work is almost all thrown away)
MOST_COMPLETIONS = 300_000  # and at that many in any case
NOISE = 0.01  # gains below it are not told from chance
BYTES_PER_MBIT = 125_000.0


@dataclass(frozen=True, slots=True)
class Forecast:
    """`assessment` by formula; the rest from the rehearsal."""

    assessment: Assessment
    utilisation: float
    discards: float  # share of started completions that are thrown away for their age
    staleness: dict[int, int]  # staleness -> trained groups
    step_s: float  # seconds per step, idle time included; inf: no step was finished


@dataclass(frozen=True, slots=True)
class Gain:
    """What a change would buy."""

    change: str
    forecast: Forecast
    utilisation: float  # after minus before
    discards: float
    words: str


def rehearsal_of(inputs: CapacityInputs, kappa: int, *, steps: int) -> Rehearsal:
    """The job as it would run on these inputs, so many steps after a warm-up."""
    job = inputs.job
    warm_up = 10 + 2 * (job.bound + 1)
    return Rehearsal(
        players=tuple(_player(worker) for worker in inputs.workers),
        group_size=job.group_size,
        groups_per_step=job.groups_per_step,
        bound=job.bound,
        kappa=kappa,
        train_s=inputs.train_s,
        grade_s=inputs.grade_s,
        no_signal=job.no_signal,
        steps=warm_up + steps,
        warm_up=warm_up,
        most_completions=min(CEILING * (warm_up + steps) * job.rollouts_per_step, MOST_COMPLETIONS),
    )


def _player(worker: WorkerCapacity) -> Player:
    return Player(
        slots=worker.slots,
        generation_s=worker.generation_s,
        bcast_s=worker.bcast_s,
        apply_s=worker.apply_s,
        admitted=worker.admitted.value,
        loading=worker.loading,
    )


def forecast(inputs: CapacityInputs, *, seed: int = 0, completions: int = COMPLETIONS) -> Forecast:
    """Assess and rehearse. The same arguments give the same answer."""
    assessment = assess(inputs)
    steps = min(max(round(completions / inputs.job.rollouts_per_step), _fewest(inputs)), MOST_STEPS)
    found = rehearse(rehearsal_of(inputs, assessment.kappa, steps=steps), inputs.lengths.draw, seed)
    return _read(assessment, found)


def _fewest(inputs: CapacityInputs) -> int:
    """Large steps vary less from one to the next, and cost more to rehearse."""
    return FEWEST_STEPS if inputs.job.rollouts_per_step <= LARGE_STEP else FEWEST_STEPS // 2


def _read(assessment: Assessment, found: Rehearsed) -> Forecast:
    step_s = found.seconds / found.steps if found.steps else math.inf
    return Forecast(assessment, found.utilisation, found.discards, found.staleness, step_s)


def gains(inputs: CapacityInputs, *, seed: int = 0, completions: int = COMPLETIONS) -> tuple[Gain, ...]:
    """What one more typical worker, one more S and one more Mbit/s would buy, each by itself."""
    before = forecast(inputs, seed=seed, completions=completions)
    worker = _typical(inputs.workers)
    more = replace(inputs, workers=(*inputs.workers, replace(worker, id=f"{worker.id}+1")))
    looser = replace(inputs, job=replace(inputs.job, bound=inputs.job.bound + 1))
    changes = [(f"one more worker like {worker.id}", more), (f"S = {looser.job.bound}", looser)]
    if inputs.transfer is not None:
        changes.append(faster_link(inputs, inputs.transfer))
    return tuple(_gain(change, before, forecast(changed, seed=seed, completions=completions)) for change, changed in changes)


def _typical(workers: Sequence[WorkerCapacity]) -> WorkerCapacity:
    """The one of median rate."""
    return sorted(workers, key=lambda worker: (worker.rate, worker.id))[len(workers) // 2]


def _gain(change: str, before: Forecast, after: Forecast) -> Gain:
    utilisation = after.utilisation - before.utilisation
    discards = after.discards - before.discards
    parts = []
    if abs(utilisation) >= NOISE:
        parts.append(f"the learner is busy {after.utilisation:.0%} of the time instead of {before.utilisation:.0%}")
    if abs(discards) >= NOISE:
        parts.append(f"{after.discards:.1%} of the completions are thrown away instead of {before.discards:.1%}")
    return Gain(change, after, utilisation, discards, f"{change}: {' and '.join(parts) or 'nothing that can be told from chance'}")


def faster_link(inputs: CapacityInputs, transfer: Transfer) -> tuple[str, CapacityInputs]:
    """One Mbit/s where it shortens dissemination most, and the inputs with it.

    T_bcast is scaled as the fluid bound of the fleet's links is. Links that are not measured limit nothing and help nobody.
    """
    names = [worker.id for worker in inputs.workers]
    ups = [worker.up_mbps or 0.0 for worker in inputs.workers]
    downs = [math.inf if worker.down_mbps is None else worker.down_mbps for worker in inputs.workers]
    seeder = transfer.seeder_up_mbps
    slowest = min(range(len(downs)), key=lambda i: downs[i])
    options = {
        "one more Mbit/s up at the coordinator": _spread_s(transfer, seeder + 1, ups, downs),
        f"one more Mbit/s up at {names[0]}": _spread_s(transfer, seeder, [ups[0] + 1, *ups[1:]], downs),
        f"one more Mbit/s down at {names[slowest]}": _spread_s(
            transfer, seeder, ups, [down + (i == slowest) for i, down in enumerate(downs)]
        ),
    }
    change = min(options, key=lambda name: options[name])
    ratio = options[change] / _spread_s(transfer, seeder, ups, downs)
    workers = tuple(_scaled(worker, ratio) for worker in inputs.workers)
    return change, replace(inputs, workers=workers, bcast_p95_s=inputs.bcast_p95_s * ratio)


def _scaled(worker: WorkerCapacity, ratio: float) -> WorkerCapacity:
    return replace(worker, bcast_s=worker.apply_s + (worker.bcast_s - worker.apply_s) * ratio)


def _spread_s(transfer: Transfer, seeder: float, ups: Sequence[float], downs: Sequence[float]) -> float:
    size = transfer.nbytes / BYTES_PER_MBIT
    return fluid_bound(size, seeder, ups, downs)
