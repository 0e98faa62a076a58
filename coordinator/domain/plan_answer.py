"""What a plan is asked and what it answers: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coordinator.domain.plan_facts import Facts
from coordinator.domain.plan_fleet import Fleet
from coordinator.wire.job import JobConfig
from pricing.cost import HOUR_S
from pricing.covering import SLACK
from pricing.money import usd_to_uusd
from pricing.offers import Offer
from pricing.pool import Limits

MOST_RATE = 1e9  # completions per second
LEAST_RATE = 1e-6  # one in eleven days; below, sums of floats beside MOST_RATE lose it


@dataclass(frozen=True, slots=True)
class Question:
    """A job, a market, and how sure it has to be.

    Attributes:
        headroom: the rate is planned this many times as high as required.
        required_rate: completions per second; given, the capacity model is skipped.
        now: Unix seconds, for prices that expire.
    """

    job: JobConfig
    offers: tuple[Offer, ...]
    facts: Facts
    headroom: float = 1.15
    required_rate: float | None = None
    now: float = 0.0
    seed: int = 0

    @property
    def by_id(self) -> Mapping[str, Offer]:
        """The market by offer."""
        return {offer.id: offer for offer in self.offers}

    def limits(self, *, uusd_per_hour: int | None = None) -> Limits:
        """What the job allows; `uusd_per_hour` instead of its own."""
        budget = self.job.budget
        hourly = uusd_per_hour if uusd_per_hour is not None else _uusd(budget.usd_per_hour)
        return Limits(_uusd(budget.usd), hourly, budget.deadline_hours, self.job.workers.trust)

    def over(self, fleet: Fleet) -> tuple[str, str] | None:
        """Which budget this fleet does not keep to the end, and what would help; None when it keeps all. Activation keeps the hourly one."""
        budget = self.job.budget
        if fleet.hours == float("inf"):
            return "staleness", "no step is ever finished: every completion is too old before its batch is whole; raise S"
        if budget.deadline_hours is not None and fleet.hours > budget.deadline_hours:
            return "deadline", (
                f"{budget.steps} steps take {fleet.hours:.2f} h and the deadline is in {budget.deadline_hours:g} h:"
                " allow more time, fewer steps, or keep the learner busier"
            )
        if budget.usd is not None and fleet.usd > budget.usd * (1 + SLACK):
            return "usd", (
                f"it costs {fleet.usd:.2f} USD to the end ({fleet.hours:.2f} h) and the budget is {budget.usd:g} USD:"
                " allow more, or fewer steps"
            )
        return None

    def hours_at(self, rate: float) -> float:
        """Until so many completions per second have brought all of the job's."""
        return self.job.budget.steps * self.job.rollouts_per_step / rate / HOUR_S


@dataclass(frozen=True, slots=True)
class Named:
    """One of the three fleets: cheapest, balanced or fastest."""

    name: str
    fleet: Fleet
    reason: str


@dataclass(frozen=True, slots=True)
class BoundLine:
    """What one staleness bound S would give with the cheapest fleet.

    Attributes:
        needs: the smallest S inside the warning line at this kappa.
        inside: whether S is at or above it: then utilisation is the formula's.
        discards: share of the started completions; None where nothing was rehearsed (inside: at most 2 % at a headroom of 1.15).
        is_feasible: whether the learner stays busy and next to nothing is thrown away.
    """

    bound: int
    kappa: int
    needs: int
    inside: bool
    utilisation: float
    discards: float | None
    is_feasible: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `fleets` is empty when nothing does; `most_allowed` then is the best that the limits allow.

    Attributes:
        required_rate: completions per second that keep the learner busy.
        planned_rate: with the pauses at publications, the share that is admitted, and the headroom.
        kappa: of the cheapest fleet; for a given rate the job's setting, or 1.
        binding_term: what limits the job, or costs most.
    """

    required_rate: float
    planned_rate: float
    headroom: float
    kappa: int
    bound: int
    binding_term: str
    binding_words: str
    fleets: tuple[Named, ...]
    infeasible_because: str | None
    most_allowed: Fleet | None = None
    bounds: tuple[BoundLine, ...] = ()
    would_help: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)


def _uusd(usd: float | None) -> int | None:
    return None if usd is None else usd_to_uusd(usd)
