"""REST messages of the market. Money in integer micro-dollars, rates in completions a second, times as Unix seconds; None: not measured."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coordinator.wire.rest import RestAnswer, RestBody


class MarketQuery(RestBody):
    """GET /market."""

    gains: bool = Field(False, description="also what one more worker, S or Mbit/s would buy: short simulations, kept for a minute")


class HistoryQuery(RestBody):
    """GET /market/history."""

    worker: Annotated[str, Field(max_length=200)] | None = Field(None, description="id; default: all")
    since: float = Field(0.0, ge=0, allow_inf_nan=False, description="Unix seconds")
    limit: int = Field(200, ge=1, le=2000, description="at most so many prices, and as many quotes")


class OfferView(RestAnswer):
    """A worker that may serve the job, and what was decided about it."""

    worker_id: str
    name: str
    owner: str
    trust: str
    uusd_per_hour: int = Field(description="asked, for active time")
    completions_per_s: float = Field(description="with all slots busy, best guess")
    deviation: float = Field(description="of completions_per_s, one standard deviation")
    is_measured: bool = Field(description="whether the rate rests on its work for this job")
    tokens_per_s: float | None = Field(description="accepted, in time with work")
    admitted: float = Field(description="share of its completions that end in a step")
    reliability: float = Field(description="chance of staying an hour")
    up_mbps: float | None
    down_mbps: float | None
    usd_per_thousand: float | None = Field(description="all in, per 1,000 admitted completions")
    is_active: bool
    reason: str = Field(description="why it is active, or is not")
    quote: str | None = Field(description="id of its open quote")
    uusd_per_million_tokens: int | None = Field(description="of the open quote; null: it is paid by the hour")
    quote_expires_at: float | None


class GainView(RestAnswer):
    """What a change would buy, by simulation."""

    change: str
    utilisation: float = Field(description="of the learner, after minus before")
    discards: float = Field(description="share thrown away, after minus before")
    words: str


class JobMarketView(RestAnswer):
    """One running job's market."""

    job_id: str
    name: str
    decided_at: float
    reason: str
    activation: str
    headroom: float
    required_rate: float | None = Field(description="keeps the learner busy; null: its time is not measured yet")
    offered_rate: float = Field(description="of the active set")
    active: int
    usd_per_hour: float = Field(description="asked by the active set")
    usd_per_thousand: float | None = Field(description="asked, per 1,000 admitted completions at the rate that the learner takes")
    binding: str | None = Field(description="what limits the learner: learner, generation, broadcast, staleness, synchrony")
    binding_words: str
    infeasible_because: str | None
    kappa: int | None
    staleness_bound: int
    warning_line: int | None = Field(description="the least S at which work surely comes in time")
    train_s: float | None
    bcast_p95_s: float
    is_bcast_forecast: bool = Field(
        False, description="no delta was broadcast yet: its size is forecast from the weights, its time from the links"
    )
    predicted_idle: float | None = Field(description="of the learner, with the active set")
    measured_idle: float | None = Field(description="over its newest steps")
    gains: tuple[GainView, ...] = ()
    offers: tuple[OfferView, ...]


class MarketView(RestAnswer):
    """GET /market."""

    jobs: tuple[JobMarketView, ...] = Field(description="the running ones")


class PriceView(RestAnswer):
    """What a worker asks from `at` on."""

    worker_id: str
    name: str
    at: float
    uusd_per_hour: int


class QuoteView(RestAnswer):
    """An activation and its pay."""

    id: str
    job_id: str
    worker_id: str
    name: str
    role: str
    uusd_per_million_tokens: int | None
    uusd_per_idle_hour: int
    made_at: float
    expires_at: float
    reason: str
    ended_at: float | None
    ended_because: str


class MarketHistory(RestAnswer):
    """GET /market/history. Newest first."""

    prices: tuple[PriceView, ...]
    quotes: tuple[QuoteView, ...]
