"""Reads what the market decides on, all from rows: jobs, workers, quotes, and what the newest work and versions took."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from coordinator.domain import market_rates as rates
from coordinator.domain.accounting import USED_UP
from coordinator.domain.market import Bidder, Figures, JobMarket
from coordinator.domain.market_rates import Made
from coordinator.domain.market_trials import DAY_S, tried_until
from coordinator.domain.model import (
    Event,
    Group,
    GroupState,
    Holding,
    Invite,
    Job,
    JobState,
    Lease,
    QuoteRow,
    Refusal,
    Rollout,
    Turn,
    Worker,
    WorkerSession,
    WorkerState,
)
from coordinator.domain.turns import is_played
from coordinator.service.deps import Deps
from coordinator.service.ledger import spent_since, spent_uusd
from coordinator.service.ports import Reader
from coordinator.service.timings import Timings, newest_metric, read_timings, refresh_bytes
from coordinator.service.worker_places import may_serve
from pricing.cost import HOUR_S
from pricing.offers import BYTES_PER_MBIT
from pricing.rentals import OPEN, Rental

WINDOW_S = 600.0  # work that rates are measured over
MOST_ROLLOUTS = 4096
NEWEST = 512  # completions that lengths are taken from
MOST_REJECTED = 500
MOST_QUOTES = 2000
IDS_AT_ONCE = 500
MEASURED_STEPS = 3  # before them the learner's time counts as not measured
UNPAID_S = 30.0  # after which money is looked for again
BEHIND_S = 120.0  # an active worker that fell behind keeps its quote so long
PRESENT = [WorkerState.STANDBY, WorkerState.ACTIVE]
LATE = ("lease_expired", "lease_closed", "slot_closed", "stale", "lease_dead_by_version")


@dataclass(frozen=True, slots=True)
class Loaded:
    """One running job's market, its open quotes, and which of them lost their worker: since when, and why."""

    market: JobMarket
    open_quotes: tuple[QuoteRow, ...]
    gone: Mapping[str, tuple[float, str]]
    measured_idle: float | None


@dataclass(frozen=True, slots=True)
class Pool:
    """Rows that are the same for every job."""

    workers: tuple[Worker, ...]
    sessions: Mapping[str, tuple[WorkerSession, ...]]
    invited_to: Mapping[str, tuple[str, ...]]
    tried_until: Mapping[str, float]
    # By job, where several share the pool: workers with a version that can serve its next step.
    holders: Mapping[str, frozenset[str]]


@dataclass(frozen=True, slots=True)
class Outline:
    """The few rows that tell whether the market must be looked at again: their values are compared."""

    jobs: tuple[tuple[object, ...], ...]
    workers: tuple[tuple[object, ...], ...]
    quotes: tuple[tuple[object, ...], ...]


async def read_outline(reader: Reader) -> Outline:
    """Cheap enough for every change of a worker."""
    jobs = await reader.select(Job, state=JobState.RUNNING, order_by="id")
    workers = await reader.select(Worker, state=PRESENT, order_by="id")
    quotes = await reader.select(QuoteRow, ended_at=None, order_by="id")
    return Outline(
        tuple((job.id, job.config.budget, job.config.workers, job.config.staleness) for job in jobs),
        tuple((one.id, one.session_epoch, one.state, one.price_uusd_per_hour) for one in workers),
        outlined(quotes),
    )


def outlined(quotes: Sequence[QuoteRow]) -> tuple[tuple[object, ...], ...]:
    """What an outline compares of open quotes, which are in order of id."""
    return tuple((quote.id, quote.role) for quote in quotes)


async def read_markets(reader: Reader, deps: Deps, now: float) -> list[Loaded]:
    """Every running job's."""
    jobs = await reader.select(Job, state=JobState.RUNNING, order_by="id")
    pool = await _pool(reader, jobs, now)
    return [await _market(reader, deps, job, pool, now) for job in jobs]


async def orphans(reader: Reader, running: Iterable[str]) -> list[tuple[QuoteRow, float, str]]:
    """Open quotes of jobs that do not run: since when, and why."""
    known = set(running)
    left = [quote for quote in await reader.select(QuoteRow, ended_at=None) if quote.job_id not in known]
    ids = sorted({quote.job_id for quote in left})
    jobs = {job.id: job for job in await reader.select(Job, id=ids)} if ids else {}
    found = []
    for quote in left:
        job = jobs.get(quote.job_id)
        if job is None:
            found.append((quote, quote.made_at, "its job does not exist any more"))
        elif job.state is not JobState.RUNNING:
            found.append((quote, job.state_since, f"job {job.name} is {job.state.value}"))
    return found


async def tried(reader: Reader, workers: Sequence[str], now: float) -> dict[str, float]:
    """Until when each has had its trials (`market_trials.tried_until`)."""
    quotes: dict[str, list[QuoteRow]] = defaultdict(list)
    for chunk in _chunks(workers):
        for quote in await reader.select(QuoteRow, worker_id=chunk, uusd_per_million_tokens=None, made_at__gt=now - DAY_S):
            quotes[quote.worker_id].append(quote)
    return {worker: tried_until(own, now) for worker, own in quotes.items()}


async def _pool(reader: Reader, jobs: Sequence[Job], now: float) -> Pool:
    workers = await reader.select(Worker, state=PRESENT, order_by="id")
    sessions: dict[str, list[WorkerSession]] = defaultdict(list)
    for chunk in _chunks([one.id for one in workers]):
        for session in await reader.select(WorkerSession, worker_id=chunk):
            sessions[session.worker_id].append(session)
    invites = await reader.select(Invite)
    return Pool(
        tuple(workers),
        {worker: tuple(stays) for worker, stays in sessions.items()},
        {invite.id: invite.jobs for invite in invites},
        await tried(reader, [one.id for one in workers], now),
        {job.id: await _holders(reader, job) for job in jobs} if len(jobs) > 1 else {},
    )


async def _holders(reader: Reader, job: Job) -> frozenset[str]:
    oldest = job.committed_steps - job.config.staleness.max
    return frozenset(one.worker_id for one in await reader.select(Holding, job_id=job.id, version__ge=oldest))


@dataclass(frozen=True, slots=True)
class _Work:
    """A job's newest work, by worker."""

    made: Mapping[str, list[Made]]
    rollouts: Sequence[Rollout]
    before: Mapping[tuple[str, int], int]  # tokens of a slot's earlier turns
    bad: Mapping[str, int]  # completions that ended in no step
    usual: float  # the job's admitted share

    @property
    def lengths(self) -> tuple[int, ...]:
        """Sampled tokens of the newest rollouts, all their turns."""
        return tuple(one.length + self.before.get((one.group_id, one.slot), 0) for one in self.rollouts[:NEWEST])


async def _market(reader: Reader, deps: Deps, job: Job, pool: Pool, now: float) -> Loaded:
    timings = await read_timings(reader, job)
    work = await _work(reader, job, now)
    open_quotes = await reader.select(QuoteRow, job_id=job.id, ended_at=None, order_by="id")
    past = await reader.select(QuoteRow, job_id=job.id, order_by="-made_at", limit=MOST_QUOTES)
    able = [one for one in pool.workers if may_serve(job, one, pool.invited_to.get(one.invite_id, ()))[0]]
    own: dict[str, list[QuoteRow]] = defaultdict(list)
    for quote in past:
        own[quote.worker_id].append(quote)
    current = {(one.worker_id, one.session_epoch): one for one in reversed(open_quotes)}
    bidders = [
        _bidder(deps, job, one, pool, timings, work, current.get((one.id, one.session_epoch)), own.get(one.id, []), now)
        for one in able
    ]
    market = replace(
        await with_money(reader, job, now),
        figures=await _figures(reader, job, timings, work),
        bidders=tuple(bidders),
        changed_at=await _changed_at(reader, job),
    )
    return Loaded(market, tuple(open_quotes), await _gone(reader, open_quotes, able), timings.idle())


async def with_money(reader: Reader, job: Job, now: float) -> JobMarket:
    """The job with what bears on its budgets, and nobody who would work for it."""
    budget = job.config.budget
    spent = await spent_uusd(reader, job.id) if budget.usd is not None else 0
    if budget.usd_per_hour is None:
        return JobMarket(job, Figures(), (), spent)
    rented = await reader.select(Rental, job_id=job.id, state=list(OPEN))
    hour = await spent_since(reader, job.id, now - HOUR_S)
    return JobMarket(job, Figures(), (), spent, hour_uusd=hour, rented_uusd=sum(row.price for row in rented))


async def _turns(reader: Reader, job: Job, since: float) -> list[Turn]:
    """The newest turns that are over, newest first; none of a job of one turn."""
    if not is_played(job.config):
        return []
    most = rates.most_turns(job.config.sampling.max_new_tokens, MOST_ROLLOUTS)
    return await reader.select(Turn, job_id=job.id, accepted_at__gt=since, order_by="-accepted_at", limit=most)


async def _work(reader: Reader, job: Job, now: float) -> _Work:
    since = now - WINDOW_S
    rollouts = await reader.select(Rollout, job_id=job.id, accepted_at__gt=since, order_by="-accepted_at", limit=MOST_ROLLOUTS)
    turns = await _turns(reader, job, since)
    if turns and len(turns) == rates.most_turns(job.config.sampling.max_new_tokens, MOST_ROLLOUTS):  # cut: both of one span of time
        rollouts = [one for one in rollouts if (one.accepted_at or 0.0) >= turns[-1].accepted_at]
    before: Counter[tuple[str, int]] = Counter()
    for turn in turns:
        before[turn.group_id, turn.slot] += turn.length
    work: list[Rollout | Turn] = [*rollouts, *turns]
    issued: dict[str, float] = {}
    for chunk in _chunks(sorted({one.lease_id for one in work if one.lease_id})):
        issued.update({lease.id: lease.issued_at for lease in await reader.select(Lease, id=chunk)})
    rejected = await reader.select(Group, job_id=job.id, state=GroupState.REJECTED, order_by="-number", limit=MOST_REJECTED)
    lost = {group.id for group in rejected if not group.reason.startswith("no_signal")}
    made: dict[str, list[Made]] = defaultdict(list)
    bad: Counter[str] = Counter(one.worker_id or "" for one in rollouts if one.group_id in lost)
    for one in work:
        if one.worker_id and one.lease_id in issued and one.accepted_at is not None:
            made[one.worker_id].append(Made(issued[one.lease_id], one.accepted_at, one.length))
    refused: list[Refusal] = []
    for chunk in _chunks(sorted(made)):
        refused += await reader.select(Refusal, worker_id=chunk, at__ge=since, code=list(LATE))
    bad.update(one.worker_id for one in refused if one.job_id == job.id)
    total = len(rollouts) + len(refused)
    return _Work(made, rollouts, before, bad, usual=max(1 - sum(bad.values()) / total, 0.05) if total else 1.0)


def _bidder(  # noqa: PLR0913 (rows of different kinds)
    deps: Deps,
    job: Job,
    worker: Worker,
    pool: Pool,
    timings: Timings,
    work: _Work,
    quote: QuoteRow | None,
    own: Sequence[QuoteRow],
    now: float,
) -> Bidder:
    """`quote`: its open one; `own`: all of its quotes for the job, newest first."""
    made = work.made.get(worker.id, [])
    tokens = max(fmean(work.lengths), 1.0) if work.rollouts else float(job.config.sampling.max_new_tokens)
    rated = next((one for one in own if rates.quoted_rate(one) is not None), None)
    paced = rates.work_rate(made, slots=worker.max_slots)
    start = rates.claimed(worker.tokens_per_s or paced, tokens=tokens, quote=rated, now=now)
    bad = work.bad.get(worker.id, 0)
    heard = deps.presence.get(worker.id)
    barred = _barred(job, worker, quote, own, now)
    return Bidder(
        worker_id=worker.id,
        name=worker.name,
        owner=worker.owner,
        uusd_per_hour=worker.price_uusd_per_hour,
        slots=worker.max_slots,
        rate=rates.throughput(made, slots=worker.max_slots, start=start, tokens=tokens),
        admitted=rates.admitted(max(len(made) - bad, 0), bad, usual=work.usual),
        reliability=rates.reliability(pool.sessions.get(worker.id, ()), now),
        session_epoch=worker.session_epoch,
        tokens_per_s=paced or rates.quoted_rate(rated) or 0.0,
        bcast_s=timings.bcast_s.get(worker.id, timings.bcast_p95_s),
        apply_s=timings.apply_s.get(worker.id, 0.0),
        up_mbps=heard.uplink / BYTES_PER_MBIT if heard is not None and heard.uplink > 0 else None,
        down_mbps=timings.down[worker.id] / BYTES_PER_MBIT if worker.id in timings.down else None,
        trust="named" if worker.name in job.config.workers.names else "any",
        tried_until=pool.tried_until.get(worker.id, 0.0),
        quote=quote,
        holds=worker.id in pool.holders.get(job.id, (worker.id,)),
        is_ready=not barred,
        barred=barred,
    )


def _barred(job: Job, worker: Worker, quote: QuoteRow | None, own: Sequence[QuoteRow], now: float) -> str:
    """Why it may not be active now; empty when it may. One that fell behind while it was active is given the time to catch up.

    `own`: its quotes, newest first. Where the money for the newest one was used up, another one would end as soon.
    """
    if worker.state is not WorkerState.ACTIVE and (quote is None or now - worker.state_since >= BEHIND_S):
        return "it has no version yet that can serve the next step"
    last = own[0] if own else None
    if last is None or last.ended_at is None or not last.ended_because.startswith(USED_UP):
        return ""
    is_fresh = last.ended_at >= job.state_since and now - last.ended_at < UNPAID_S  # a job that was resumed since has new money
    return last.ended_because if is_fresh else ""


async def _figures(reader: Reader, job: Job, timings: Timings, work: _Work) -> Figures:
    spans = ((one.graded_at, one.accepted_at) for one in work.rollouts)
    graded = [max(end - begin, 0.0) for end, begin in spans if end is not None and begin is not None]  # the clock may step back
    whole = await newest_metric(reader, job.id, "publish/bytes_full")
    return Figures(
        train_s=timings.train_s(least=MEASURED_STEPS),
        bcast_p95_s=timings.bcast_p95_s,
        grade_s=fmean(graded) if graded else 0.0,
        no_signal=await _no_signal(reader, job, timings),
        lengths=work.lengths,
        refresh_bytes=await refresh_bytes(reader, job),
        start_bytes=0.0 if whole is None else whole.value,
        is_bcast_forecast=timings.is_forecast,
    )


async def _no_signal(reader: Reader, job: Job, timings: Timings) -> float:
    """Share of groups that came to the newest steps and were replaced there."""
    if not timings.batches:
        return 0.0
    first = timings.batches[-1].step
    rejected = await reader.select(Group, job_id=job.id, state=GroupState.REJECTED, step__ge=first)
    replaced = sum(group.reason.startswith("no_signal") for group in rejected)
    trained = sum(len(batch.groups) for batch in timings.batches)
    return min(replaced / (replaced + trained), 0.9) if replaced else 0.0


async def _changed_at(reader: Reader, job: Job) -> float | None:
    newest = await reader.select(Event, job_id=job.id, kind="worker_activated", order_by="-seq", limit=1)
    return newest[0].at if newest else None


async def _gone(reader: Reader, open_quotes: Sequence[QuoteRow], able: Sequence[Worker]) -> dict[str, tuple[float, str]]:
    """Quotes whose session is over, with its end; those of workers that may not go on."""
    present = {(one.id, one.session_epoch) for one in able}
    found: dict[str, tuple[float, str]] = {}
    for quote in open_quotes:
        if (quote.worker_id, quote.session_epoch) in present:
            continue
        session = await reader.get(WorkerSession, quote.worker_id, quote.session_epoch)
        worker = await reader.get(Worker, quote.worker_id)
        at = float("inf") if session is None or session.ended_at is None else session.ended_at
        found[quote.id] = (at, _farewell(worker, quote))
    return found


def _farewell(worker: Worker | None, quote: QuoteRow) -> str:
    if worker is None or worker.session_epoch != quote.session_epoch:
        return "its session ended"
    if worker.state in PRESENT:
        return "it may not serve the job any more"
    return f"the worker is {worker.state.value}" + (f": {worker.reason}" if worker.reason else "")


def _chunks(ids: Sequence[str]) -> Iterable[list[str]]:
    return (list(ids[start : start + IDS_AT_ONCE]) for start in range(0, len(ids), IDS_AT_ONCE))
