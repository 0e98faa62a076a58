"""What each staleness bound S would give with one fleet: where the learner stays busy, and where completions are thrown away.

Outside the warning line a rehearsal answers. Inside it the formula is right; only the first bound inside is rehearsed, for its discards.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.domain.capacity import assess, chosen_kappa
from coordinator.domain.capacity_forecast import forecast
from coordinator.domain.capacity_inputs import CapacityInputs
from coordinator.domain.plan_answer import BoundLine, Question
from coordinator.domain.plan_fleet import broadcast_of, capacity_inputs

MOST_BOUND = 11
BUSY, DISCARDED = 0.97, 0.02  # what a bound has to keep


@dataclass(frozen=True, slots=True)
class Setting:
    """How a fleet would run under one bound."""

    kappa: int
    inputs: CapacityInputs


def setting_of(question: Question, counts: Mapping[str, int], bound: int) -> Setting:
    """Kappa by the job's own rule: each kappa has another delta, so it is raised until its own broadcast fits."""
    job, facts, offers = question.job, question.facts, question.by_id
    ups = [offers[name].up for name, count in counts.items() for _ in range(count)]
    downs = [offers[name].down for name in counts]
    kappa = 1
    while True:
        t_bcast_s = broadcast_of(facts, kappa)(ups, downs)
        inputs = capacity_inputs(job, facts, offers, counts, bound=bound, t_bcast_s=t_bcast_s)
        if (asked := chosen_kappa(inputs)) <= kappa:
            return Setting(kappa, replace(inputs, job=replace(inputs.job, publish_every=kappa)))
        kappa = asked


def bound_lines(question: Question, counts: Mapping[str, int]) -> tuple[BoundLine, ...]:
    """One for each S from 0 to `MOST_BOUND`, and for the job's own."""
    lines: list[BoundLine] = []
    for bound in sorted({*range(MOST_BOUND + 1), question.job.staleness.max}):
        setting = setting_of(question, counts, bound)
        said = assess(setting.inputs)
        if said.inside and any(line.inside for line in lines):
            lines.append(_line(bound, setting.kappa, said.line.bound, True, said.utilisation, None))
            continue
        found = forecast(setting.inputs, seed=question.seed)
        lines.append(_line(bound, setting.kappa, said.line.bound, said.inside, found.utilisation, found.discards))
    return tuple(lines)


def _line(bound: int, kappa: int, needs: int, inside: bool, utilisation: float, discards: float | None) -> BoundLine:
    is_feasible = utilisation >= BUSY and (discards is None or discards <= DISCARDED)
    return BoundLine(bound, kappa, needs, inside, utilisation, discards, is_feasible)
