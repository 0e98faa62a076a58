"""The market as operators and authors see it: the newest verdicts, and the history of prices and quotes from rows."""

from __future__ import annotations

import asyncio
import math

from coordinator.domain.capacity_forecast import gains
from coordinator.domain.capacity_inputs import CapacityInputs
from coordinator.domain.market import Bidder, offer_of, terms_of
from coordinator.domain.model import Job, PriceRow, QuoteRow, Worker
from coordinator.service.deps import Deps
from coordinator.service.market_board import Shown
from coordinator.service.ports import Reader
from coordinator.service.tokens import Caller
from coordinator.wire.market import (
    GainView,
    HistoryQuery,
    JobMarketView,
    MarketHistory,
    MarketView,
    OfferView,
    PriceView,
    QuoteView,
)
from pricing.cost import HOUR_S, all_in

GAINS_S = 60.0  # simulations of what a change would buy are kept so long
REHEARSED = 4_000


async def market_view(deps: Deps, caller: Caller, *, with_gains: bool) -> MarketView:
    """Every running job that the caller may see."""
    found = []
    for job_id, shown in sorted(deps.market.shown.items()):
        if caller.is_author and shown.market.job.owner != caller.token.id:
            continue
        found.append(_job(shown, await _gains(deps, job_id, shown) if with_gains else ()))
    return MarketView(jobs=tuple(found))


async def _gains(deps: Deps, job_id: str, shown: Shown) -> tuple[GainView, ...]:
    """One at a time, in a thread, and not again within GAINS_S."""
    inputs, board, now = shown.verdict.inputs, deps.market, deps.clock.now()
    if inputs is None:
        return ()
    async with board.rehearsing:
        known = board.gains.get(job_id)
        if known is None or now - known[0] >= GAINS_S:
            known = (now, await asyncio.to_thread(_rehearsed, inputs))
            board.gains[job_id] = known
    return known[1]


def _rehearsed(inputs: CapacityInputs) -> tuple[GainView, ...]:
    return tuple(
        GainView(change=one.change, utilisation=one.utilisation, discards=one.discards, words=one.words)
        for one in gains(inputs, completions=REHEARSED)
    )


def _job(shown: Shown, bought: tuple[GainView, ...]) -> JobMarketView:
    verdict, market = shown.verdict, shown.market
    job, assessment, activation = market.job, verdict.assessment, verdict.activation
    return JobMarketView(
        job_id=job.id,
        name=job.name,
        decided_at=shown.at,
        reason=verdict.reason,
        activation=job.config.workers.activation,
        headroom=job.config.workers.headroom,
        required_rate=verdict.required,
        offered_rate=verdict.offered,
        active=len(verdict.active),
        usd_per_hour=verdict.usd_per_hour,
        usd_per_thousand=per_thousand(verdict.usd_per_hour, verdict.required, verdict.offered),
        binding=None if assessment is None else assessment.binding.value,
        binding_words="" if assessment is None else assessment.words,
        infeasible_because=None if activation is None else activation.infeasible_because,
        kappa=None if assessment is None else assessment.kappa,
        staleness_bound=job.config.staleness.max,
        warning_line=None if assessment is None else assessment.line.bound,
        train_s=market.figures.train_s,
        bcast_p95_s=market.figures.bcast_p95_s,
        is_bcast_forecast=market.figures.is_bcast_forecast,
        predicted_idle=shown.predicted_idle,
        measured_idle=shown.measured_idle,
        gains=bought,
        offers=tuple(_offer(shown, one) for one in sorted(market.bidders, key=lambda one: (one.uusd_per_hour, one.name))),
    )


def per_thousand(usd_per_hour: float, required: float | None, offered: float) -> float | None:
    """USD per 1,000 admitted completions at the rate that the learner takes; None when it takes none."""
    taken = min(required, offered) if required is not None else 0.0
    return usd_per_hour / (HOUR_S * taken) * 1000 if taken > 0 else None


def _offer(shown: Shown, one: Bidder) -> OfferView:
    verdict = shown.verdict
    worth = all_in(offer_of(one, shown.at), terms_of(shown.market, shown.at)).per_thousand()
    quote = shown.quotes.get(one.worker_id)
    return OfferView(
        worker_id=one.worker_id,
        name=one.name,
        owner=one.owner,
        trust=one.trust,
        uusd_per_hour=one.uusd_per_hour,
        completions_per_s=one.rate.rate(shown.at),
        deviation=one.rate.deviation(shown.at),
        is_measured=one.is_measured,
        tokens_per_s=one.tokens_per_s or None,
        admitted=one.admitted.value,
        reliability=one.reliability,
        up_mbps=one.up_mbps,
        down_mbps=one.down_mbps,
        usd_per_thousand=worth if math.isfinite(worth) else None,
        is_active=one.worker_id in verdict.active,
        reason=verdict.active.get(one.worker_id) or verdict.standby.get(one.worker_id, ""),
        quote=None if quote is None else quote.id,
        uusd_per_million_tokens=None if quote is None else quote.uusd_per_million_tokens,
        quote_expires_at=None if quote is None else quote.expires_at,
    )


async def history(reader: Reader, caller: Caller, query: HistoryQuery) -> MarketHistory:
    """Prices and quotes since a time."""
    whose: dict[str, object] = {} if query.worker is None else {"worker_id": query.worker}
    prices = await reader.select(PriceRow, at__ge=query.since, order_by="-at", limit=query.limit, **whose)
    jobs: dict[str, object] = {}
    if caller.is_author:
        jobs["job_id"] = [job.id for job in await reader.select(Job, owner=caller.token.id)] or [""]
    quotes = await reader.select(QuoteRow, made_at__ge=query.since, order_by="-made_at", limit=query.limit, **whose, **jobs)
    ids = sorted({one.worker_id for one in prices} | {one.worker_id for one in quotes})
    names = {one.id: one.name for one in await reader.select(Worker, id=ids)} if ids else {}
    return MarketHistory(
        prices=tuple(
            PriceView(worker_id=one.worker_id, name=names.get(one.worker_id, ""), at=one.at, uusd_per_hour=one.uusd_per_hour)
            for one in prices
        ),
        quotes=tuple(_quote(one, names) for one in quotes),
    )


def _quote(row: QuoteRow, names: dict[str, str]) -> QuoteView:
    return QuoteView(
        id=row.id,
        job_id=row.job_id,
        worker_id=row.worker_id,
        name=names.get(row.worker_id, ""),
        role=row.role,
        uusd_per_million_tokens=row.uusd_per_million_tokens,
        uusd_per_idle_hour=row.uusd_per_idle_hour,
        made_at=row.made_at,
        expires_at=row.expires_at,
        reason=row.reason,
        ended_at=row.ended_at,
        ended_because=row.ended_because,
    )
