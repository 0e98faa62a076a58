"""Before a job: the rate that keeps the learner busy, the fleets that bring it and what they cost, and what stands in the way.

Each candidate fleet is the cheapest answer to some question (`pricing.activation`): all offers or only the quicker ones, the headroom
that is asked for or more, a small kappa or the one that slow links ask for. Each is rehearsed; three of those that keep all budgets are
named. The predictions are those of `capacity_forecast`, checked against long simulations in docs/capacity.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from coordinator.domain.capacity import chosen_kappa, pause_s
from coordinator.domain.capacity_forecast import NOISE, Forecast, forecast, gains
from coordinator.domain.capacity_inputs import CapacityError, CapacityInputs
from coordinator.domain.plan_answer import LEAST_RATE, MOST_RATE, Plan, Question
from coordinator.domain.plan_bounds import BUSY, DISCARDED, bound_lines, setting_of
from coordinator.domain.plan_choice import ALIKE, three
from coordinator.domain.plan_facts import PlanRefused
from coordinator.domain.plan_fleet import (
    P95,
    Fleet,
    broadcast_of,
    capacity_inputs,
    job_shape,
    lengths_of,
    priced,
    slots_of,
    start_hours,
    terms_of,
)
from coordinator.domain.plan_rate import plan_rate
from pricing.activation import activate
from pricing.cost import HOUR_S
from pricing.decision import Activation
from pricing.offers import Offer
from pricing.pool import Need, constant
from pricing.words import counted

RESERVES = (1.0, 1.25, 1.6)  # times the headroom that is asked for
QUICKER = (1.0, 0.5, 0.25)  # shares of the offers that are tried alone, quickest first
MOST_HEADROOM = 10.0


@dataclass(frozen=True, slots=True)
class _Found:
    """The cheapest set of some offers, and how the job runs on it."""

    activation: Activation
    kappa: int

    @property
    def key(self) -> tuple[object, ...]:
        return (self.kappa, *((one.offer_id, one.count) for one in self.activation.picked))


def plan(question: Question) -> Plan:
    """The answer to one question; the same question has the same answer. Raises PlanRefused.

    Up to some twenty rehearsals: one to several seconds of a core, so callers with an event loop use a thread.
    """
    _require(question)
    if question.required_rate is not None:
        return plan_rate(question, question.required_rate)
    try:
        return _planned(question)
    except CapacityError as error:
        raise PlanRefused(str(error)) from error


def _require(question: Question) -> None:
    headroom, rate, budget = question.headroom, question.required_rate, question.job.budget
    if not 1 <= headroom <= MOST_HEADROOM:
        raise PlanRefused(f"headroom is {headroom:g}: give a number from 1 to {MOST_HEADROOM:g}")
    if rate is not None and not LEAST_RATE <= rate <= MOST_RATE:
        raise PlanRefused(f"required_rate is {rate:g}: give completions per second from {LEAST_RATE:g} to {MOST_RATE:g}")
    for name in ("usd", "usd_per_hour", "deadline_hours"):
        value = getattr(budget, name)
        if value is not None and not math.isfinite(value):
            raise PlanRefused(f"budget.{name} is {value}: give a finite number, or leave it out for no limit")


def required_rate(question: Question) -> float:
    """R / T_train, with the groups that replace those without signal."""
    shape = job_shape(question.job, question.facts, bound=question.job.staleness.max)
    return shape.generated_per_step / question.facts["train_s"]


def _planned(question: Question) -> Plan:
    base = _settled(question, question.offers, 1.0)
    if not base.activation.picked:
        return _refusal(question, base, None, *_scarcity(question, base))
    first = _rehearsed(question, base)
    if base.activation.infeasible_because is not None:
        return _refusal(question, base, first, base.activation.binding, base.activation.infeasible_because)
    fleets = [first, *_others(question, base, first)]
    allowed = [fleet for fleet in fleets if question.over(fleet) is None]
    if not allowed:
        term, words = question.over(first) or ("", "")
        return _refusal(
            question,
            base,
            first,
            term,
            f"{counted(len(fleets), 'fleet', 'bring')} the rate and none keeps the budgets; the cheapest: {words}",
        )
    names = three(
        allowed,
        time=lambda one: one.hours,
        worth=lambda one: one.usd * one.hours,
        rule="cost to the end times hours to the end",
        said=_said,
    )
    cheapest = names[0].fleet
    said = _forecast_of(cheapest).assessment
    return replace(
        _outline(question, base, cheapest),
        binding_term=said.binding.value,
        binding_words=said.words,
        fleets=names,
        bounds=bound_lines(question, cheapest.counts),
        would_help=_would_help(question, cheapest),
    )


def _outline(question: Question, base: _Found, fleet: Fleet | None) -> Plan:
    """What every plan says."""
    return Plan(
        required_rate=required_rate(question),
        planned_rate=_rate_with_pauses(question, base.kappa) * question.headroom / question.facts["admitted"],
        headroom=question.headroom,
        kappa=base.kappa if fleet is None or fleet.kappa is None else fleet.kappa,
        bound=question.job.staleness.max,
        binding_term=base.activation.binding,
        binding_words=base.activation.reason,
        fleets=(),
        infeasible_because=None,
        refused=base.activation.refused,
    )


def _scarcity(question: Question, base: _Found) -> tuple[str, str]:
    """Why not a single worker is of use."""
    if math.isfinite(_rate_with_pauses(question, base.kappa)):
        return base.activation.binding, base.activation.infeasible_because or base.activation.reason
    inputs = _typical(question)
    return "broadcast", (
        f"workers stand still for {pause_s(inputs.workers[0], inputs):.3g} s at each publication and there is one every"
        f" {base.kappa * inputs.train_s:.3g} s: publish less often (staleness.publish_every, with a larger staleness.max)"
    )


def _refusal(question: Question, base: _Found, fleet: Fleet | None, term: str, words: str) -> Plan:
    """The plan that says why there is none, and what would help."""
    lines = bound_lines(question, fleet.counts) if fleet is not None else ()
    better = [line for line in lines if line.is_feasible and line.bound > question.job.staleness.max]
    if better and fleet is not None and _forecast_of(fleet).utilisation < BUSY:
        words = f"{words}; S = {better[0].bound} would keep the learner busy {better[0].utilisation:.0%} of the time"
    return replace(_outline(question, base, fleet), binding_term=term, infeasible_because=words, most_allowed=fleet, bounds=lines)


def _said(fleet: Fleet) -> str:
    said = _forecast_of(fleet)
    return (
        f"{counted(fleet.workers, 'worker', 'bring')} {fleet.rate:.4g} completions/s for {fleet.usd_per_hour:.4f} USD/h all in; the learner is busy"
        f" {said.utilisation:.1%} of the time and {said.discards:.1%} of the completions are thrown away"
    )


def _forecast_of(fleet: Fleet) -> Forecast:
    assert fleet.forecast is not None  # rehearsed
    return fleet.forecast


def _settled(question: Question, offers: Sequence[Offer], reserve: float) -> _Found:
    """The cheapest set, at the kappa that its own broadcast asks for."""
    job, kappa = question.job, chosen_kappa(_typical(question))
    while True:
        found = _activated(question, offers, reserve, kappa, longest_s=math.inf)
        if not found.picked:
            return _Found(found, kappa)
        counts = {one.offer_id: one.count for one in found.picked}
        inputs = capacity_inputs(job, question.facts, question.by_id, counts, bound=job.staleness.max, t_bcast_s=found.t_bcast_s)
        if (asked := chosen_kappa(inputs)) <= kappa:
            return _Found(found, kappa)
        kappa = asked


def _activated(question: Question, offers: Sequence[Offer], reserve: float, kappa: int, *, longest_s: float) -> Activation:
    """The cheapest set of these offers whose broadcast takes no longer than `longest_s`."""
    facts = question.facts
    rate = _rate_with_pauses(question, kappa)

    def required(t_bcast_s: float) -> float:
        return rate if t_bcast_s <= longest_s else math.inf

    hours = question.job.budget.steps * facts["train_s"] / HOUR_S
    need = Need(required if longest_s < math.inf else constant(rate), question.headroom * reserve, broadcast_of(facts, kappa))
    return activate(offers, need, terms_of(facts, kappa, hours=hours), limits=question.limits(), now=question.now)


def _typical(question: Question) -> CapacityInputs:
    """A worker whose links take no time: what it loses at a publication, any of them loses."""
    worker = Offer(id="typical", uusd_per_hour=0, completions_per_second=1.0, up_mbps=1.0, down_mbps=1.0)
    job, facts = question.job, question.facts
    return capacity_inputs(job, facts, {worker.id: worker}, {worker.id: 1}, bound=job.staleness.max, t_bcast_s=facts["apply_s"])


def _rate_with_pauses(question: Question, kappa: int) -> float:
    """What workers have to bring while they generate, so that the pauses of publications do not matter; inf: they never end."""
    inputs = _typical(question)
    share = 1 - pause_s(inputs.workers[0], inputs) / (kappa * inputs.train_s)
    return required_rate(question) / share if share > 0 else math.inf


def _rehearsed(question: Question, found: _Found) -> Fleet:
    """The set with what a short rehearsal of the job says."""
    counts = {one.offer_id: one.count for one in found.activation.picked}
    setting = setting_of(question, counts, question.job.staleness.max)
    start_h = start_hours(question.by_id, counts, question.facts)
    said = forecast(setting.inputs, seed=question.seed)
    return priced(found.activation, question.job, question.facts, kappa=setting.kappa, start_h=start_h, forecast=said)


def _others(question: Question, base: _Found, first: Fleet) -> Iterator[Fleet]:
    """More fleets, while the job could be done sooner than on the first one, or that one breaks a budget."""
    floor_h = question.job.budget.steps * question.facts["train_s"] / HOUR_S
    if first.hours <= floor_h * (1 + ALIKE) and question.over(first) is None:
        return
    seen = {base.key}
    for found in _more(question, base):
        if found.activation.infeasible_because is None and found.key not in seen:
            seen.add(found.key)
            yield _rehearsed(question, found)


def _more(question: Question, base: _Found) -> Iterator[_Found]:
    """The cheapest sets of other questions."""
    if base.kappa > 1:
        longest_s = question.facts["train_s"] / P95
        yield _Found(_activated(question, question.offers, 1.0, 1, longest_s=longest_s), 1)
    longest = lengths_of(question.job, question.facts).mean_of_longest(question.job.algorithm.group_size)
    quickest = sorted(question.offers, key=lambda offer: (_way_s(question, offer, longest), offer.id))
    for share in QUICKER:
        some = quickest[: max(1, math.ceil(len(quickest) * share))]
        for reserve in RESERVES:
            if (share, reserve) != (1.0, 1.0):
                yield _settled(question, some, reserve)


def _way_s(question: Question, offer: Offer, longest: float) -> float:
    """From publication to the last completion of a group on one worker of this offer; the longest is `longest` times the mean."""
    if not offer.completions_per_second > 0:
        return math.inf
    facts, size = question.facts, question.job.algorithm.group_size
    slots = slots_of(offer, facts)
    return broadcast_of(facts, 1)([offer.up], [offer.down]) + slots / offer.completions_per_second * (longest + (size - 1) / slots)


def _would_help(question: Question, fleet: Fleet) -> tuple[str, ...]:
    """What one more worker, one more S, one more Mbit/s and another kappa would buy, where the learner waits or much is thrown away."""
    said = _forecast_of(fleet)
    if said.utilisation >= BUSY and said.discards <= DISCARDED:
        return ()
    setting = setting_of(question, fleet.counts, question.job.staleness.max)
    words = []
    for kappa in sorted({1, setting.kappa - 1} & set(range(1, setting.kappa))):
        other = _with_kappa(question, fleet, kappa)
        if other.utilisation >= said.utilisation + NOISE:
            words.append(
                f"staleness.publish_every = {kappa}: the learner is busy {other.utilisation:.0%} of the time instead of"
                f" {said.utilisation:.0%}, {other.discards:.1%} of the completions are thrown away instead of {said.discards:.1%}"
            )
    return (*words, *(gain.words for gain in gains(setting.inputs, seed=question.seed)))


def _with_kappa(question: Question, fleet: Fleet, kappa: int) -> Forecast:
    """The same fleet, publishing every `kappa` steps."""
    staleness = question.job.staleness.model_copy(update={"publish_every": kappa})
    asked = replace(question, job=question.job.model_copy(update={"staleness": staleness}))
    return forecast(setting_of(asked, fleet.counts, question.job.staleness.max).inputs, seed=question.seed)
