"""The market loop: looks at the rows, decides who is active for which job, and writes that as quotes.

Level-triggered. It waits for (1) workers that come, go, confirm or change their price, woken by "workers", (2) at most TURN_S. A look
costs three small reads; the market is decided again when they changed, and every DECIDE_S all the same, because rates move.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import structlog

from coordinator.domain.capacity_forecast import forecast
from coordinator.domain.market import Verdict, decide, limits_of
from coordinator.domain.market_money import unpayable
from coordinator.domain.market_orders import Orders, orders, timed
from coordinator.domain.market_trials import room, too_dear
from coordinator.domain.model import Job, JobState, QuoteRow, Worker, WorkerState
from coordinator.service.deps import QUOTES, Deps
from coordinator.service.market_board import Shown
from coordinator.service.market_rows import Loaded, Outline, orphans, outlined, read_markets, read_outline, tried, with_money
from coordinator.service.ports import Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.service.spending import pause_for
from pricing.money import uusd_to_usd

log = structlog.get_logger()
TURN_S = 1.0
DECIDE_S = 5.0
COALESCE_S = 0.02  # changes within this time are looked at together
STEADY_S = 0.25  # between two decisions
REHEARSED = 4_000  # completions of the rehearsal that foretells idle time where no formula does
FIRST = "its rate is to be measured: its first quote is for active time"


@dataclass(slots=True)
class Market:
    """What was seen and decided last."""

    outline: Outline | None = None
    decided_at: float = 0.0
    idle: dict[str, tuple[tuple[str, ...], float, float]] = field(default_factory=dict)  # job -> active set, when, predicted idle

    def is_due(self, outline: Outline, now: float) -> bool:
        """Whether to decide now."""
        since = now - self.decided_at
        return since >= DECIDE_S or since < 0 or (outline != self.outline and since >= STEADY_S)


async def keep_market(deps: Deps) -> None:
    """Look for ever. A failed look is logged and repeated."""
    market = Market()
    with deps.wake.watch("workers") as watch:
        while True:
            try:
                await turn(deps, market)
            except ConnectionError:
                raise  # the store has ended: going on would look alive and do nothing
            except Exception:
                log.exception("market_failed")
            is_pending = market.outline is None
            await watch.wait(STEADY_S if is_pending else TURN_S)
            await asyncio.sleep(COALESCE_S)


async def turn(deps: Deps, market: Market) -> None:
    """One look; the market is decided anew if it changed."""
    now = deps.clock.now()
    outline = await deps.store.read(read_outline)
    if not market.is_due(outline, now):
        if outline != market.outline:
            market.outline = None  # something waits: look again soon
        return
    loaded = await deps.store.read(lambda reader: read_markets(reader, deps, now))
    verdicts = await asyncio.to_thread(decide, [one.market for one in loaded], now)
    idle = await _foretold(market, verdicts, now)
    changed = await deps.store.write(lambda tx: _save(tx, loaded, verdicts, idle, now=now))
    quotes = await deps.store.read(lambda reader: reader.select(QuoteRow, ended_at=None, order_by="id"))
    deps.market.shown = {one.market.job.id: _shown(one, verdicts, idle, quotes, now) for one in loaded}
    market.decided_at = now
    market.outline = replace(outline, quotes=outlined(quotes))
    for topic in (*changed, QUOTES) if changed else ():
        deps.wake.notify(topic)


def _shown(
    one: Loaded, verdicts: Mapping[str, Verdict], idle: Mapping[str, float], quotes: Sequence[QuoteRow], now: float
) -> Shown:
    job_id = one.market.job.id
    own = {quote.worker_id: quote for quote in quotes if quote.job_id == job_id}
    return Shown(now, one.market, verdicts[job_id], own, idle.get(job_id), one.measured_idle)


async def _foretold(market: Market, verdicts: Mapping[str, Verdict], now: float) -> dict[str, float]:
    """The learner's idle share with each job's active set: by formula, or by a short rehearsal outside the warning line."""
    found = {}
    for job_id, verdict in verdicts.items():
        active = tuple(sorted(verdict.active))
        known = market.idle.get(job_id)
        if known is not None and known[0] == active and now - known[1] < 3 * DECIDE_S:
            found[job_id] = known[2]
        elif verdict.assessment is not None and verdict.inputs is not None:
            inputs = verdict.inputs
            inside = verdict.assessment.inside and verdict.assessment.bound > 0
            busy = verdict.assessment.utilisation
            if not inside:
                busy = (await asyncio.to_thread(forecast, inputs, completions=REHEARSED)).utilisation
            found[job_id] = 1 - busy
            market.idle[job_id] = (active, now, 1 - busy)
    return found


async def _save(
    tx: Tx, loaded: Sequence[Loaded], verdicts: Mapping[str, Verdict], idle: Mapping[str, float], *, now: float
) -> set[str]:
    """Write quotes, events and metrics; the ids of the jobs whose quotes changed."""
    changed: set[str] = set()
    for quote, at, why in await orphans(tx, [one.market.job.id for one in loaded]):
        await _end(tx, [replace(quote, ended_at=max(min(at, now), quote.made_at), ended_because=why)])
        changed.add(quote.job_id)
    for one in loaded:
        job, verdict = one.market.job, verdicts[one.market.job.id]
        wanted = orders(job.id, one.market.bidders, verdict, one.open_quotes, one.gone, now)
        if not wanted.is_empty and await _apply(tx, one, wanted, now=now):
            changed.add(job.id)
        if (reason := unpayable(one.market, verdict, now)) is not None and await _pause(tx, one.market.job, reason, now=now):
            changed.add(job.id)
        await record_metrics(tx, job.id, job.committed_steps, _figures(one, verdict, idle.get(job.id)), now=now)
    return changed


async def _pause(tx: Tx, decided: Job, reason: str, *, now: float) -> bool:
    """Pause the job rather than let it stand still, unless it was changed meanwhile."""
    row = await tx.get(Job, decided.id)
    if row is None or row.state is not JobState.RUNNING or row.config.budget != decided.config.budget:
        return False
    await pause_for(tx, row, reason, now=now)
    return True


async def _end(tx: Tx, rows: Sequence[QuoteRow]) -> list[QuoteRow]:
    """End those that are still open."""
    ended = []
    for row in rows:
        known = await tx.get(QuoteRow, row.id)
        if known is not None and known.ended_at is None:
            await tx.put(row)
            ended.append(row)
    return ended


async def _apply(tx: Tx, one: Loaded, wanted: Orders, *, now: float) -> bool:
    """Write what still makes sense on the rows as they are now; whether anything changed."""
    job = await tx.get(Job, one.market.job.id)
    if job is None or job.state is not JobState.RUNNING:
        return False
    ended = await _end(tx, wanted.ended)
    opened = [row for row in wanted.opened if await _may_open(tx, row)]
    if opened:
        await tx.put(*opened)
    before, after = {row.worker_id for row in ended}, {row.worker_id for row in opened}
    names = {bidder.worker_id: bidder.name for bidder in one.market.bidders}
    for row in opened:
        if row.worker_id not in before:
            await record_event(tx, job.id, "worker_activated", _told(row, names, row.reason), now=now)
    for row in ended:
        if row.worker_id not in after:
            await record_event(tx, job.id, "worker_deactivated", _told(row, names, row.ended_because), now=now)
    return bool(ended or opened)


def _told(row: QuoteRow, names: Mapping[str, str], reason: str) -> dict[str, object]:
    return {
        "worker": row.worker_id,
        "name": names.get(row.worker_id, ""),
        "uusd_per_hour": row.uusd_per_idle_hour,
        "uusd_per_million_tokens": row.uusd_per_million_tokens,
        "reason": reason,
    }


async def _may_open(tx: Tx, row: QuoteRow) -> bool:
    """Whether the session still stands, and no other quote of it is open."""
    worker = await tx.get(Worker, row.worker_id)
    if worker is None or worker.session_epoch != row.session_epoch:
        return False
    if worker.state not in (WorkerState.STANDBY, WorkerState.ACTIVE):
        return False
    epoch = row.session_epoch
    return not await tx.count(QuoteRow, worker_id=row.worker_id, job_id=row.job_id, session_epoch=epoch, ended_at=None)


def _figures(one: Loaded, verdict: Verdict, predicted_idle: float | None) -> dict[str, float]:
    """What the job's time series say of the market; what is not known is left out."""
    figures: dict[str, float | None] = {
        "market/required_rate": verdict.required,
        "market/offered_rate": verdict.offered,
        "market/usd_per_hour": verdict.usd_per_hour,
        "market/active": float(len(verdict.active)),
        "market/offers": float(len(one.market.bidders)),
        "market/kappa": None if verdict.assessment is None else float(verdict.assessment.kappa),
        "market/predicted_idle": predicted_idle,
        "market/measured_idle": one.measured_idle,
    }
    return {name: value for name, value in figures.items() if value is not None}


async def welcome(tx: Tx, job: Job, worker: Worker, *, now: float) -> None:
    """The first quote of a session, opened with the confirmation of its first version: a worker that is to be measured waits for nobody.

    Not for one whose rate is known already (the market decides whether it is needed), nor for one that was tried already, nor beyond
    what the market would pay by the hour.
    """
    if job.state is not JobState.RUNNING:
        return
    known = await tx.select(QuoteRow, job_id=job.id, worker_id=worker.id, order_by="-made_at", limit=1)
    if known and known[0].session_epoch == worker.session_epoch:
        return
    price = worker.price_uusd_per_hour
    is_chosen = job.config.workers.activation == "market" and price > 0
    if is_chosen and known and known[0].uusd_per_million_tokens is not None:
        return
    if is_chosen and await tx.count(QuoteRow, worker_id=worker.id, session_epoch=worker.session_epoch, ended_at=None):
        return
    if price and not await _may_try(tx, job, worker, now=now):
        return
    row = timed(job.id, worker.id, worker.session_epoch, price, FIRST if price else "asks for no money", now)
    await tx.put(row)
    await record_event(tx, job.id, "worker_activated", _told(row, {worker.id: worker.name}, row.reason), now=now)


async def _may_try(tx: Tx, job: Job, worker: Worker, *, now: float) -> bool:
    """Whether money may be spent on measuring the worker."""
    price, budget = worker.price_uusd_per_hour, job.config.budget
    if too_dear(price, budget.usd) or (await tried(tx, [worker.id], now)).get(worker.id):
        return False
    most = room(limits_of(await with_money(tx, job, now), now))
    return most is None or price + await tx.total(QuoteRow, "uusd_per_idle_hour", job_id=job.id, ended_at=None) <= most


def pay_in_words(quote: QuoteRow) -> str:
    """What the owner reads of the pay that was agreed."""
    hourly = f"{uusd_to_usd(quote.uusd_per_idle_hour):.4f} USD an hour"
    if not quote.uusd_per_idle_hour:
        return "for no money"
    if quote.uusd_per_million_tokens is None:
        return f"paid {hourly} until its rate is measured"
    return f"paid {uusd_to_usd(quote.uusd_per_million_tokens):.4f} USD per million accepted tokens, and {hourly} while there is no work for it"
