"""How many rollouts per second keep the learner busy, and what is in the way (DESIGN 5).

The rule counts what each worker loses at a publication: with background fetching that is next to nothing, so T_bcast costs
staleness, not rate. Where the learner is short of rollouts it also publishes less often, and the pauses weigh less:
`busy_share` solves for that. Everything here is a function of measured inputs; evaluate it again at each publication.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from coordinator.domain import publication
from coordinator.domain.capacity_inputs import CapacityInputs, Estimate, Loading, WorkerCapacity

P99 = 0.99
NEVER = 10**6  # steps
ONE_SIDED_95 = 1.645  # standard deviations


class Binding(StrEnum):
    """What limits the steps per second."""

    LEARNER = "learner"  # nothing else: the fleet suffices and its work comes in time
    GENERATION = "generation"  # the workers' rate
    BROADCAST = "broadcast"  # the pauses at publications: without them the rate would suffice
    STALENESS = "staleness"  # the way from publication to training is longer than the bound allows
    SYNCHRONY = "synchrony"  # S = 0: each step waits for its own rollouts


@dataclass(frozen=True, slots=True)
class WarningLine:
    """The bound S that one path needs: kappa + max(steps on the way, queue)."""

    kappa: int
    way: int  # ceil((T_bcast + T_gen + T_grade) / T_train)
    queue: int  # steps whose rollouts the workers hold at once when all slots are busy

    @property
    def bound(self) -> int:
        """The smallest S inside the line."""
        return self.kappa + max(self.way, self.queue)


@dataclass(frozen=True, slots=True)
class Assessment:
    """The model's answer. Rates are settled rollouts per second."""

    kappa: int
    required: float  # R / T_train, with replacements for groups without signal
    offered: Estimate  # sum of a * g * (1 - T_pause / (kappa * T_train))
    line: WarningLine  # with the p99 of T_gen
    mean_line: WarningLine
    bound: int  # S
    utilisation: float  # of the learner, by formula: exact inside the line, an upper limit outside
    binding: Binding
    words: str

    @property
    def inside(self) -> bool:
        """Whether the formula holds: S is at or above the warning line."""
        return self.line.bound <= self.bound

    @property
    def headroom(self) -> float:
        """Offered over required."""
        return self.offered.value / self.required

    @property
    def is_sure(self) -> bool:
        """Whether the rate suffices also at the lower end of its 90 % interval."""
        return self.offered.value - ONE_SIDED_95 * self.offered.sd >= self.required


def pause_s(worker: WorkerCapacity, inputs: CapacityInputs) -> float:
    """T_pause: what a worker loses at one publication.

    Aborting throws away the age of what runs, (1 + cv^2) / 2 mean lengths: long completions are more often under way.
    """
    if worker.loading is Loading.IDLE:
        return worker.bcast_s
    if worker.loading is Loading.KEEP:
        return worker.apply_s
    return worker.apply_s + worker.generation_s * (1 + inputs.lengths.cv_squared) / 2


def chosen_kappa(inputs: CapacityInputs) -> int:
    """Kappa as publication decides it."""
    pauses = [(worker.rate, pause_s(worker, inputs)) for worker in inputs.workers]
    return fleet_kappa(inputs.job.publish_every, inputs.job.bound, inputs.train_s, inputs.bcast_p95_s, pauses)


def fleet_kappa(
    setting: int | Literal["auto"],
    bound: int,
    train_s: float | None,
    bcast_p95_s: float | None,
    pauses: Sequence[tuple[float, float]],
) -> int:
    """Kappa for a fleet, from (rate, seconds of pause) of each worker: its pause is the mean over its rate. None: not measured yet."""
    rate = math.fsum(rate for rate, _ in pauses)
    pause = math.fsum(rate * seconds for rate, seconds in pauses) / rate if rate > 0 else 0.0
    return publication.kappa(setting, bound=bound, train_s=train_s, bcast_p95_s=bcast_p95_s, pause_s=pause)


def required_rate(inputs: CapacityInputs) -> float:
    """R / T_train."""
    return inputs.job.generated_per_step / inputs.train_s


def offered_rate(inputs: CapacityInputs, kappa: int) -> Estimate:
    """The rule's left side; errors of different workers are taken as independent."""
    period_s = kappa * inputs.train_s
    total, variance = 0.0, 0.0
    for worker in inputs.workers:
        share = max(1 - pause_s(worker, inputs) / period_s, 0.0)
        total += worker.rate * share
        by_rate = worker.generating.sd * worker.admitted.value
        by_share = worker.admitted.sd * worker.generating.value
        variance += share * share * (by_rate * by_rate + by_share * by_share)
    return Estimate(total, math.sqrt(variance))


def paper_rate(*, rollouts_per_step: float, train_s: float, bcast_s: float, kappa: int) -> float:
    """The rate that equal workers need that idle while loading: kappa * R / (kappa * T_train - T_bcast); inf: no rate suffices."""
    left_s = kappa * train_s - bcast_s
    return kappa * rollouts_per_step / left_s if left_s > 0 else math.inf


def busy_share(inputs: CapacityInputs, kappa: int) -> float:
    """The learner's utilisation that the rate allows: 1 where the rule holds.

    Below, with l steps per second, a worker pauses l / kappa times a second: sum a g (1 - T_pause l / kappa) = l R.
    """
    rate = math.fsum(worker.rate for worker in inputs.workers)
    paused = math.fsum(worker.rate * pause_s(worker, inputs) for worker in inputs.workers) / kappa
    return min(rate * inputs.train_s / (inputs.job.generated_per_step + paused), 1.0)


def group_s(worker: WorkerCapacity, inputs: CapacityInputs, *, kappa: int, share: float | None) -> float:
    """T_gen as the warning line counts it: from a group's lease to its last completion, `share` of all groups within it.

    The last of G completions waits until (G - 1) others found a place among the worker's slots, and is the longest of G. A
    worker that idles while loading stands still once for each publication on the way. One that aborts begins the group's last
    completion twice, and never ends one that is longer than kappa * T_train (inf). None: the mean.
    """
    size, lengths = inputs.job.group_size, inputs.lengths
    longest = lengths.mean_of_longest(size) if share is None else lengths.quantile_of_longest(share, size)
    alone_s = worker.generation_s * (longest + (size - 1) / worker.slots)
    period_s = kappa * inputs.train_s
    if worker.loading is Loading.IDLE:
        return alone_s + worker.bcast_s * math.ceil(alone_s / period_s)
    if worker.loading is Loading.KEEP:
        return alone_s
    longest_s = worker.generation_s * longest
    return alone_s + longest_s if longest_s <= period_s else math.inf


def warning_line(inputs: CapacityInputs, kappa: int, *, share: float | None = P99) -> WarningLine:
    """What S the slowest worker's groups need, `share` of them in time."""
    slowest_s = max(group_s(worker, inputs, kappa=kappa, share=share) for worker in inputs.workers)
    way_s = inputs.bcast_p95_s + slowest_s + inputs.grade_s
    held = math.fsum(worker.slots for worker in inputs.workers)
    way = math.ceil(way_s / inputs.train_s) if math.isfinite(way_s) else NEVER
    return WarningLine(kappa, way, math.ceil(held / inputs.job.rollouts_per_step))


def last_completion_s(inputs: CapacityInputs) -> float:
    """T_gen,last: from the first lease of a step to its last completion, when no other step's work is under way. An estimate.

    The larger of two: the rollouts that do not fit into the slots pass at the fleet's rate before the last ones end; or all are
    under way at once, whole groups on one worker each, and the slowest worker ends last.
    """
    workers, total = inputs.workers, inputs.job.generated_per_step
    slots = sum(worker.slots for worker in workers)
    mean_s = slots / math.fsum(worker.generating.value for worker in workers)
    passing_s = max(total - slots, 0.0) / math.fsum(worker.rate for worker in workers)
    ending_s = mean_s * inputs.lengths.mean_of_longest(max(round(min(slots, total)), 1))
    return max(passing_s + ending_s, *(_share_s(worker, inputs, total * worker.slots / slots) for worker in workers))


def _share_s(worker: WorkerCapacity, inputs: CapacityInputs, completions: float) -> float:
    """Until the last of a worker's share of a step ends, its groups begun in turn."""
    longest = inputs.lengths.mean_of_longest(max(round(completions), inputs.job.group_size))
    return worker.generation_s * (longest + (inputs.job.group_size - 1) / worker.slots)


def synchronous_share(*, train_s: float, bcast_s: float, last_s: float, grade_s: float) -> float:
    """S = 0: the learner's utilisation, T_train / (T_train + T_bcast + T_gen,last + T_grade)."""
    return train_s / (train_s + bcast_s + last_s + grade_s)


def assess(inputs: CapacityInputs) -> Assessment:
    """The whole answer by formula; `capacity_forecast` rehearses what no formula says."""
    kappa = chosen_kappa(inputs)
    required, offered = required_rate(inputs), offered_rate(inputs, kappa)
    line = warning_line(inputs, kappa)
    utilisation = busy_share(inputs, kappa)
    if inputs.job.bound == 0:
        mean_bcast_s = math.fsum(worker.bcast_s for worker in inputs.workers) / len(inputs.workers)
        last_s = last_completion_s(inputs)
        together = synchronous_share(train_s=inputs.train_s, bcast_s=mean_bcast_s, last_s=last_s, grade_s=inputs.grade_s)
        utilisation = min(utilisation, together)
    binding, words = _binding(inputs, line, required, offered.value)
    return Assessment(
        kappa=kappa,
        required=required,
        offered=offered,
        line=line,
        mean_line=warning_line(inputs, kappa, share=None),
        bound=inputs.job.bound,
        utilisation=utilisation,
        binding=binding,
        words=words,
    )


def _binding(inputs: CapacityInputs, line: WarningLine, required: float, offered: float) -> tuple[Binding, str]:
    bound = inputs.job.bound
    if bound == 0:
        return (
            Binding.SYNCHRONY,
            "S = 0: each step waits for its version to arrive, its rollouts and their grades; S = 1 would overlap them",
        )
    if offered < required:
        unpaused = math.fsum(worker.rate for worker in inputs.workers)
        rates = f"the workers give {offered:.3g} rollouts/s, the learner needs {required:.3g}"
        if unpaused < required:
            return Binding.GENERATION, rates
        return (
            Binding.BROADCAST,
            f"{rates}; without the pauses at each publication (kappa {line.kappa}) they would give {unpaused:.3g}",
        )
    if line.bound > bound:
        return Binding.STALENESS, f"S = {bound} is below the warning line: {_why(inputs, line)}"
    return Binding.LEARNER, f"the workers give {offered / required:.2f} times what the learner needs, and in time"


def _why(inputs: CapacityInputs, line: WarningLine) -> str:
    """The parts of the line in words, the largest named last."""
    if line.queue > line.way:
        return f"kappa {line.kappa} + {line.queue} steps' rollouts that the slots hold at once"
    slow = max(inputs.workers, key=lambda worker: group_s(worker, inputs, kappa=line.kappa, share=P99))
    slow_s = group_s(slow, inputs, kappa=line.kappa, share=P99)
    if not math.isfinite(slow_s):
        period_s = line.kappa * inputs.train_s
        return (
            f"{slow.id} aborts at each publication and needs more than the {period_s:.3g} s between two for its longest completions"
        )
    parts = {"T_bcast": inputs.bcast_p95_s, f"T_gen (p99 of a group on {slow.id})": slow_s, "T_grade": inputs.grade_s}
    largest = max(parts, key=lambda name: parts[name])
    spelled = " + ".join(f"{name} {seconds:.3g} s" for name, seconds in parts.items())
    return f"kappa {line.kappa} + {line.way} steps for {spelled}; most of it is {largest.split(' ')[0]}"
