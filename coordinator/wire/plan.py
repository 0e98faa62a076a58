"""POST /plan: a job, a market, what is assumed; and the plan, which `echo2 plan --json` prints as well.

Money in a market and in a plan is USD, for people, before any of it is booked; the ledger's is integer micro-USD. Rates are completions
per second. `None` means "not known" or "not set".
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from coordinator.wire.job import JobConfig
from coordinator.wire.rest import RestAnswer, RestBody

MOST_OFFERS = 2000  # in one request; `echo2 plan` takes larger markets
OfferText = Annotated[str, Field(max_length=200)]
Number = Annotated[float, Field(ge=0, le=1e9)]


class OfferBody(RestBody):
    """Some equal workers at one price: an entry of market.json."""

    id: str = Field(min_length=1, max_length=200)
    kind: OfferText | None = Field(None, description="the card, or what sort of machine it is")
    count: int | None = Field(None, ge=0, le=1_000_000, description="workers there are; without it 1")
    usd_per_hour: float = Field(ge=0, le=1e6, description="asked for one worker")
    completions_per_second: Number = Field(description="of one worker while it generates")
    up_mbps: float = Field(gt=0, le=1e7)
    down_mbps: float = Field(gt=0, le=1e7)
    usd_per_gb_up: float | None = Field(None, ge=0, le=1e4, description="per 10^9 bytes")
    usd_per_gb_down: float | None = Field(None, ge=0, le=1e4, description="per 10^9 bytes")
    reliability: float | None = Field(None, ge=0, le=1, description="chance that a worker is still there an hour later")
    min_hours: float | None = Field(None, ge=0, le=1e5, description="paid at least")
    owner: OfferText | None = None
    trust: Literal["any", "audited", "named"] | None = None
    expires_at: float | None = Field(None, ge=0, le=1e12, description="until when the price holds, Unix seconds")
    available_hours: float | None = Field(None, ge=0, le=1e6)
    gb_limit: Number | None = Field(None, description="10^9 bytes in both directions that the owner allows")


class PlanRequest(RestBody):
    """What to plan for."""

    job: JobConfig
    market: tuple[OfferBody, ...] = Field(max_length=MOST_OFFERS)
    required_rate: float | None = Field(
        None, ge=1e-6, le=1e9, description="completions per second; given, the capacity model is skipped"
    )
    headroom: float | None = Field(None, ge=1, le=10, description="times the required rate; without it the job's (1.15)")
    assumptions: dict[Annotated[str, Field(max_length=64)], float] = Field(
        default_factory=dict, max_length=64, description="figures in place of measured or assumed ones, by the names in an answer"
    )


class PlannedOffer(RestAnswer):
    """Workers of one offer."""

    id: str
    count: int
    reason: str


class PlannedFleet(RestAnswer):
    """A set of workers, what it costs, and what a short rehearsal of the job says of it (None where nothing was rehearsed)."""

    name: str
    usd_per_hour: float = Field(description="all in: asked price, traffic, warm-up, minimum paid time")
    completions_per_second: float
    offers: tuple[PlannedOffer, ...]
    reason: str
    workers: int
    asked_usd_per_hour: float
    usd_per_step: float | None
    usd_per_1000_completions: float | None = Field(description="trained ones")
    usd_to_end: float | None
    hours_to_end: float | None
    kappa: int | None
    t_bcast_s: float | None = Field(description="mean, from publication until a worker serves the version")
    learner_utilisation: float | None
    learner_idle: float | None
    discards: float | None = Field(description="share of started completions that are thrown away for their age")
    staleness: dict[str, int] | None = Field(description="staleness -> trained groups of the rehearsal")
    predicted_by: Literal["rehearsal"] | None


class PlannedBound(RestAnswer):
    """What one S would give with the cheapest fleet."""

    S: int
    kappa: int
    warning_line: int = Field(description="the smallest S that is safe in the worst case, at this kappa")
    inside: bool
    feasible: bool = Field(description="the learner is busy at least 97 % of the time and at most 2 % are thrown away")
    learner_utilisation: float
    discards: float | None = Field(description="None: inside the line, not rehearsed")


class Assumption(RestAnswer):
    """A figure that the plan takes for true."""

    name: str
    value: float
    unit: str
    source: Literal["measured", "given", "assumed"]
    why: str


class PlanView(RestAnswer):
    """The plan. `fleets` is empty when `infeasible_because` is not None."""

    required_rate: float = Field(description="completions per second that keep the learner busy, without headroom")
    planned_rate: float | None = Field(description="with headroom, pauses and rejections: what a fleet has to bring")
    headroom: float
    kappa: int
    S: int
    binding_term: str
    binding_words: str
    fleets: tuple[PlannedFleet, ...]
    infeasible_because: str | None
    most_allowed: PlannedFleet | None = Field(description="where nothing does: the best that the limits allow")
    S_table: tuple[PlannedBound, ...]
    would_help: tuple[str, ...]
    assumptions: tuple[Assumption, ...] = Field(description="empty when required_rate was given")
    refused_offers: dict[str, str] = Field(description="offers that cannot be used, and why")
