"""A plan as the API and `echo2 plan --json` show it, and the question as they put it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.domain.plan_answer import Plan, Question
from coordinator.domain.plan_facts import KNOWN, Fact, Facts, settled_facts
from coordinator.domain.plan_fleet import Fleet
from coordinator.service.operator_figures import finite
from coordinator.wire.job import JobConfig
from coordinator.wire.plan import Assumption, PlannedBound, PlannedFleet, PlannedOffer, PlanView
from pricing.offers import Offer


def question_of(
    job: JobConfig,
    offers: Sequence[Offer],
    *,
    given: Mapping[str, float],
    measured: Mapping[str, Fact],
    required_rate: float | None,
    headroom: float | None,
    now: float,
) -> Question:
    """What is asked; the job's own headroom where none is given. Raises PlanRefused."""
    facts = settled_facts(job, given=given, measured=measured)
    asked = job.workers.headroom if headroom is None else headroom
    return Question(job, tuple(offers), facts, asked, required_rate, now)


def plan_view(plan: Plan, facts: Facts, *, by_rate: bool) -> PlanView:
    """The whole answer. `by_rate`: the rate was given, so that no assumption was used."""
    return PlanView(
        required_rate=plan.required_rate,
        planned_rate=finite(plan.planned_rate),
        headroom=plan.headroom,
        kappa=plan.kappa,
        S=plan.bound,
        binding_term=plan.binding_term,
        binding_words=plan.binding_words,
        fleets=tuple(_fleet(one.name, one.fleet, one.reason) for one in plan.fleets),
        infeasible_because=plan.infeasible_because,
        most_allowed=None
        if plan.most_allowed is None
        else _fleet("most_allowed", plan.most_allowed, "the best that the limits allow"),
        S_table=tuple(
            PlannedBound(
                S=line.bound,
                kappa=line.kappa,
                warning_line=line.needs,
                inside=line.inside,
                feasible=line.is_feasible,
                learner_utilisation=line.utilisation,
                discards=line.discards,
            )
            for line in plan.bounds
        ),
        would_help=plan.would_help,
        assumptions=() if by_rate else tuple(_assumption(name, fact) for name, fact in facts.by_name.items()),
        refused_offers=dict(plan.refused),
    )


def _assumption(name: str, fact: Fact) -> Assumption:
    return Assumption(name=name, value=fact.value, unit=KNOWN[name].unit, source=fact.source.value, why=fact.why)


def _fleet(name: str, fleet: Fleet, reason: str) -> PlannedFleet:
    said = fleet.forecast
    return PlannedFleet(
        name=name,
        usd_per_hour=fleet.usd_per_hour,
        completions_per_second=fleet.rate,
        offers=tuple(PlannedOffer(id=offer, count=count, reason=why) for offer, count, why in fleet.offers),
        reason=reason,
        workers=fleet.workers,
        asked_usd_per_hour=fleet.asked_usd_per_hour,
        usd_per_step=finite(fleet.usd_per_step),
        usd_per_1000_completions=finite(fleet.usd_per_thousand),
        usd_to_end=finite(fleet.usd),
        hours_to_end=finite(fleet.hours),
        kappa=fleet.kappa,
        t_bcast_s=fleet.t_bcast_s,
        learner_utilisation=None if said is None else said.utilisation,
        learner_idle=None if said is None else 1 - said.utilisation,
        discards=None if said is None else said.discards,
        staleness=None if said is None else {str(age): groups for age, groups in said.staleness.items()},
        predicted_by=None if said is None else "rehearsal",
    )
