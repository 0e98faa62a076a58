"""A plan for a rate that is given: prices alone decide, as they are asked.

Nothing is known of the learner, so traffic, warm-up and broadcasts are left out, and time means the time in which the fleet makes the
rollouts of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import floor

from coordinator.domain import publication
from coordinator.domain.plan_answer import LEAST_RATE, Plan, Question
from coordinator.domain.plan_choice import three
from coordinator.domain.plan_fleet import Fleet, picked_offers
from pricing.activation import activate
from pricing.cost import Terms
from pricing.covering import SLACK
from pricing.decision import Activation
from pricing.money import usd_to_uusd
from pricing.pool import Limits, Need, constant
from pricing.words import counted

RESERVES = (1.1, 1.2, 1.35, 1.5)  # times the planned rate: more than that the job could hardly use


def plan_rate(question: Question, required: float) -> Plan:
    """Fleets that bring `required` completions per second times the headroom."""
    hours = question.hours_at(required)
    cheapest = _cheapest(question, required, hours)
    planned = required * question.headroom
    fleet = _fleet(question, cheapest, required)
    why = _why_not(question, cheapest, fleet, required, hours)
    plan = Plan(
        required_rate=required,
        planned_rate=planned,
        headroom=question.headroom,
        kappa=_kappa(question),
        bound=question.job.staleness.max,
        binding_term=why[0] if why else cheapest.binding,
        binding_words=cheapest.reason,
        fleets=(),
        infeasible_because=why[1] if why else None,
        most_allowed=fleet if why and fleet.workers else None,
        refused=cheapest.refused,
    )
    if why:
        return plan
    fleets = three(
        [fleet, *_reserves(question, fleet, required, hours)],
        time=lambda one: 1 / one.rate,
        worth=lambda one: one.usd_per_hour / one.rate,
        rule="price of a completion",
        said=lambda one: (
            f"{counted(one.workers, 'worker', 'bring')} {one.rate:.4g} completions/s of {planned:.4g} planned for {one.usd_per_hour:.4f} USD/h"
        ),
    )
    return replace(plan, fleets=fleets)


def _kappa(question: Question) -> int:
    """Nothing is measured, so nothing asks for more than the job's own setting, or one."""
    staleness = question.job.staleness
    return publication.kappa(staleness.publish_every, bound=staleness.max, train_s=None, bcast_p95_s=None, pause_s=None)


def _cheapest(question: Question, required: float, hours: float) -> Activation:
    """By the asked prices; with what is paid at least, where that alone breaks the budget."""
    hourly = replace(question.limits(), uusd=None, deadline_hours=None)
    need = Need(constant(required), question.headroom)
    found = activate(question.offers, need, Terms(), limits=hourly, now=question.now)
    usd = question.job.budget.usd
    if usd is None or found.infeasible_because is not None or _to_the_end(question, found, hours) <= usd:
        return found
    limits = replace(hourly, uusd=usd_to_uusd(usd))
    return activate(question.offers, need, Terms(horizon_hours=hours), limits=limits, now=question.now)


def _to_the_end(question: Question, found: Activation, hours: float) -> float:
    """USD for all workers until the end, at least what is paid for each."""
    offers = question.by_id
    return sum(one.count * offers[one.offer_id].usd_per_hour * max(hours, offers[one.offer_id].min_hours) for one in found.picked)


def _fleet(question: Question, found: Activation, required: float) -> Fleet:
    hours = question.hours_at(min(required, found.rate) or LEAST_RATE)
    step_h = hours / question.job.budget.steps
    return Fleet(
        offers=picked_offers(found),
        usd_per_hour=found.usd_per_hour,
        asked_usd_per_hour=found.asked_usd_per_hour,
        rate=found.rate,
        kappa=None,
        t_bcast_s=None,
        hours=hours,
        usd=_to_the_end(question, found, hours),
        usd_per_step=found.usd_per_hour * step_h,
        usd_per_thousand=found.usd_per_hour * step_h / question.job.rollouts_per_step * 1000,
    )


def _why_not(question: Question, found: Activation, fleet: Fleet, required: float, hours: float) -> tuple[str, str] | None:
    deadline = question.job.budget.deadline_hours
    if deadline is not None and hours > deadline:
        faster = required * hours / deadline
        return "deadline", (
            f"{required:.4g} completions/s bring the job's {question.job.budget.steps * question.job.rollouts_per_step} in {hours:.2f} h"
            f" and the deadline is in {deadline:g} h: plan for {faster:.4g}, allow more time, or fewer steps"
        )
    if found.infeasible_because is not None:
        return found.binding, found.infeasible_because
    return question.over(fleet)


def _reserves(question: Question, cheapest: Fleet, required: float, hours: float) -> Sequence[Fleet]:
    """Fleets with more of a reserve, as far as the budgets go."""
    limits = _within(question, hours)
    need = Need(constant(required), question.headroom)
    fleets: list[Fleet] = []
    for times in RESERVES:
        found = activate(
            question.offers, replace(need, headroom=question.headroom * times), Terms(), limits=limits, now=question.now
        )
        fleet = _fleet(question, found, required)
        if fleet.rate >= cheapest.rate * (1 - SLACK) and fleet.usd_per_hour >= cheapest.usd_per_hour and not question.over(fleet):
            fleets.append(fleet)
        if found.infeasible_because is not None:
            break
    return fleets


def _within(question: Question, hours: float) -> Limits:
    """The hourly budget, or what the whole one leaves for an hour."""
    limits = question.limits()
    caps = [limits.uusd_per_hour] if limits.uusd_per_hour is not None else []
    if limits.uusd is not None:
        caps.append(floor(limits.uusd / hours))
    return replace(limits, uusd=None, deadline_hours=None, uusd_per_hour=min(caps, default=None))
