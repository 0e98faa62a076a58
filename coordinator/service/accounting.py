"""Pays: measures what is owed under each quote, posts what is new of it, and reserves for what may come (law 7).

Level-triggered: a look reads meters, quotes and leases, and posts the difference to what the rows say is owed, so a look that a crash
cut off is simply taken again. `keep_accounts` waits for (1) QUOTES, woken when quotes or money changed, (2) TURN_S. A quote is
measured every LOOK_S, at its end, and when what may be leased under it runs low.

Measuring reads a snapshot, beside the writer; posting is one short transaction a job. What was leased between the two is known from
the meter, which counts down with every lease.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import structlog

from coordinator.domain import accounting, paying
from coordinator.domain.accounting import Found, Purse
from coordinator.domain.model import (
    Job,
    JobState,
    Lease,
    LedgerAccount,
    Meter,
    QuoteRow,
    Refusal,
    Rollout,
    RolloutState,
    Turn,
    Worker,
    WorkerState,
)
from coordinator.domain.paying import Held, Measured, Work
from coordinator.domain.states import TERMINAL
from coordinator.domain.turns import is_played
from coordinator.service.deps import QUOTES, Deps
from coordinator.service.ledger import Books, budget_uusd, fund, fund_job, spent_uusd
from coordinator.service.ports import Reader, Tx
from coordinator.service.spending import pause_for, used_up
from pricing import ledger
from pricing.ledger import Account

log = structlog.get_logger()
TURN_S = 2.0
LOOK_S = 5.0
LATE_S = 30.0  # what happened is committed, and seen, within this
ASKED_S = 45.0  # a worker that asked for work within this time waits for it
IDS_AT_ONCE = 500
POSTED_AT_ONCE = 64  # quotes in one transaction: others want to write as well
ACCEPTED = [
    RolloutState.ACCEPTED,
    RolloutState.SCORED,
    RolloutState.UNSCORED,
    RolloutState.GRADER_FAILED,
    RolloutState.GRADER_TIMEOUT,
]


async def accepted_tokens(reader: Reader, **filters: object) -> int:
    """Sampled tokens that were accepted, in turns that are over too."""
    return await reader.total(Rollout, "length", state=ACCEPTED, **filters) + await reader.total(Turn, "length", **filters)


async def keep_accounts(deps: Deps) -> None:
    """Look for ever. A failed look is logged and repeated: the rows still say what is owed."""
    with deps.wake.watch(QUOTES) as watch:
        while True:
            try:
                await look(deps)
            except ConnectionError:
                raise  # the store has ended
            except Exception:
                log.exception("accounting_failed")
            await watch.wait(TURN_S)


async def look(deps: Deps) -> None:
    """One look at all quotes that are due; then what ended jobs have left goes back to where it came from."""
    now = deps.clock.now()
    found = await deps.store.read(lambda reader: measure(reader, deps, now=now))
    for job_id, quotes in found.items():
        for start in range(0, len(quotes), POSTED_AT_ONCE):
            deps.reach("accounting.measured")
            some = quotes[start : start + POSTED_AT_ONCE]
            await deps.store.write(partial(post, deps=deps, job_id=job_id, found=some))
            deps.reach("accounting.posted")
        deps.wake.notify(job_id)
    for job in await deps.store.read(ended_with_funds):
        await deps.store.write(partial(fund_job, job=job, now=now))


async def ended_with_funds(reader: Reader) -> list[Job]:
    """Ended jobs whose budget is not all spent or reserved: `post` sees those with open meters only."""
    held = [row.job_id for row in await reader.select(LedgerAccount, kind=Account.FUNDS, uusd__gt=0)]
    return await reader.select(Job, id=held, state=sorted(TERMINAL[JobState])) if held else []


async def measure(reader: Reader, deps: Deps, *, now: float) -> dict[str, list[Found]]:
    """What is owed for under the quotes that are due, by job."""
    meters = {meter.quote_id: meter for meter in await reader.select(Meter, closed_at=None)}
    quotes = {quote.id: quote for quote in await reader.select(QuoteRow, ended_at=None)}
    ended = sorted(set(meters) - set(quotes))
    quotes |= {quote.id: quote for quote in await reader.select(QuoteRow, id=ended)} if ended else {}
    due: dict[str, list[QuoteRow]] = defaultdict(list)
    for quote in quotes.values():
        if _is_due(quote, meters.get(quote.id), now=now):
            due[quote.job_id].append(quote)
    workers = {quote.worker_id for some in due.values() for quote in some}
    rows = {row.id: row for row in await reader.select(Worker, id=sorted(workers))} if workers else {}
    seen = _Seen(meters, quotes, rows)
    return {job: await _measure_job(reader, deps, some, seen, now=now) for job, some in due.items()}


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one look is about: meters by quote, quotes that are not closed, and the workers of those that are due."""

    meters: Mapping[str, Meter]
    quotes: Mapping[str, QuoteRow]
    workers: Mapping[str, Worker]


def _is_due(quote: QuoteRow, meter: Meter | None, *, now: float) -> bool:
    if meter is None or now >= meter.looked_at + LOOK_S:
        return True
    if quote.ended_at is not None:
        return meter.looked_at < quote.ended_at
    return meter.leasable is not None and 2 * meter.leasable < meter.wanted


async def _measure_job(reader: Reader, deps: Deps, quotes: Sequence[QuoteRow], about: _Seen, *, now: float) -> list[Found]:
    """A fixed number of statements, however many quotes are due."""
    job = await reader.get(Job, quotes[0].job_id)
    if job is None:
        return []
    known = {quote.id: about.meters[quote.id] for quote in quotes if quote.id in about.meters}
    seen = await _rows(reader, job, known, about, now=now) if known else {}
    found = []
    for quote in quotes:
        worker = about.workers.get(quote.worker_id)
        one = new_quote(quote, _work(job, worker), at=now)
        if quote.id in known:
            waits = worker is not None and _waits(deps, quote, worker, now=now)
            one = _measured(quote, known[quote.id], one, seen[quote.id], waits=waits)
        found.append(one)
    return found


def _work(job: Job, worker: Worker | None) -> Work:
    slots = 0 if worker is None else worker.max_slots
    return Work(job.config.sampling.max_new_tokens, job.config.algorithm.group_size, slots)


@dataclass(slots=True)
class _Rows:
    """What may still change what is owed under one quote."""

    leases: list[Lease] = field(default_factory=list)  # live ones, those that closed lately, and ended ones whose work is paid
    held: Held = field(default_factory=Held)
    refused: list[Refusal] = field(default_factory=list)  # and paid, lately
    accepted: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))  # lease id -> tokens of each accepted rollout

    def tokens(self, leases: Iterable[Lease]) -> int:
        """Accepted under these leases."""
        return sum(sum(self.accepted[lease.id]) if lease.tokens is None else lease.tokens for lease in leases)


async def _rows(reader: Reader, job: Job, meters: Mapping[str, Meter], about: _Seen, *, now: float) -> dict[str, _Rows]:
    """By quote."""
    job_id, plays = job.id, is_played(job.config)
    since = min(meter.counted_to for meter in meters.values())
    leases = [
        *await reader.select(Lease, job_id=job_id, closed_at=None),
        *await reader.select(Lease, job_id=job_id, closed_at__ge=since),
        *await reader.select(Lease, job_id=job_id, state=list(paying.PAYABLE_ENDS), deadline__ge=now - LATE_S),
    ]
    rows = {quote_id: _Rows() for quote_id in meters}
    await _place_leases(reader, rows, meters, about, {lease.id: lease for lease in leases}.values())
    by_id = {lease.id: lease for lease in leases if lease.quote_id in rows}
    for lease in by_id.values():
        rows[lease.quote_id or ""].leases.append(lease)
    uncounted = sorted(lease.id for lease in by_id.values() if lease.tokens is None)
    for start in range(0, len(uncounted), IDS_AT_ONCE):
        some = uncounted[start : start + IDS_AT_ONCE]
        settled: list[Rollout | Turn] = list(await reader.select(Rollout, lease_id=some, state=ACCEPTED))
        if plays:
            settled += await reader.select(Turn, lease_id=some)
        for one in settled:
            rows[by_id[one.lease_id or ""].quote_id or ""].accepted[one.lease_id or ""].append(one.length)
    workers = sorted({meter.worker_id for meter in meters.values()})
    for refusal in await reader.select(Refusal, worker_id=workers, at__ge=since, paid=True, job_id=job_id):
        if refusal.quote_id in rows:
            rows[refusal.quote_id or ""].refused.append(refusal)
    return rows


async def _place_leases(
    reader: Reader, rows: Mapping[str, _Rows], meters: Mapping[str, Meter], about: _Seen, leases: Iterable[Lease]
) -> None:
    """Tell each quote which leases its worker holds in all, and when another quote took over."""
    held: dict[str, list[Lease]] = defaultdict(list)
    for lease in leases:
        held[lease.worker_id].append(lease)
    others = {lease.quote_id for some in held.values() for lease in some if lease.quote_id is not None} - set(about.quotes)
    quotes = [*about.quotes.values(), *(await reader.select(QuoteRow, id=sorted(others)) if others else ())]
    by_token = frozenset(quote.id for quote in quotes if quote.uusd_per_million_tokens is not None)
    of_worker: dict[tuple[str, str], list[QuoteRow]] = defaultdict(list)
    for quote in quotes:
        of_worker[quote.job_id, quote.worker_id].append(quote)
    for quote_id, meter in meters.items():
        made_at = about.quotes[quote_id].made_at
        later = [q.made_at for q in of_worker[meter.job_id, meter.worker_id] if q.id != quote_id and q.made_at >= made_at]
        rows[quote_id].held = Held(tuple(held[meter.worker_id]), by_token, min(later, default=math.inf))


def new_quote(quote: QuoteRow, work: Work, *, at: float) -> Found:
    """A quote under which nothing was leased yet: money is reserved before anything is."""
    return Found(quote.id, quote.worker_id, at, None, None, at, 0, Measured(0, 0, 0), work)


def _measured(quote: QuoteRow, meter: Meter, blank: Found, rows: _Rows, *, waits: bool) -> Found:
    """What is owed for; leases and refusals that cannot change any more are counted for good."""
    now = blank.at
    counted_to = max(meter.counted_to, now - LATE_S)
    old = [x for x in rows.leases if x.closed_at is not None and meter.counted_to <= x.closed_at < counted_to]
    young = [x for x in rows.leases if x.closed_at is None or x.closed_at >= counted_to]
    late = [x for x in rows.refused if x.at >= meter.counted_to]
    before = meter.tokens_before + rows.tokens(old) + sum(x.tokens for x in late if x.at < counted_to)
    tokens = before + rows.tokens(young) + sum(x.tokens for x in late if x.at >= counted_to)
    seen = Measured(
        tokens, meter.paid_ms + paying.new_ms(quote, meter, rows.held, now=now, waits=waits), _open_slots(rows, now=now)
    )
    return replace(blank, looked_at=meter.looked_at, left=meter.leasable, counted_to=counted_to, tokens_before=before, seen=seen)


def _open_slots(rows: _Rows, *, now: float) -> int:
    """Slots that may still be owed for; one that was refused in time is seen a little later."""
    leases = [lease for lease in rows.leases if paying.may_be_paid(lease, now=now - LATE_S)]
    paid = {(x.lease_id, x.slot) for x in rows.refused} & {(lease.id, slot) for lease in leases for slot in lease.slots}
    return sum(len(lease.slots) - len(rows.accepted[lease.id]) for lease in leases) - len(paid)


def _waits(deps: Deps, quote: QuoteRow, worker: Worker, *, now: float) -> bool:
    """Whether the worker was ready and asked for work that the coordinator had not: that time is paid."""
    if worker.state is not WorkerState.ACTIVE or worker.session_epoch != quote.session_epoch:
        return False
    heard = deps.presence.get(worker.id)
    return (
        heard is not None
        and now < heard.at + deps.settings.lost_after_s
        and now < deps.presence.asked_at(worker.id, quote.job_id) + ASKED_S
    )


async def post(tx: Tx, deps: Deps, job_id: str, found: Sequence[Found]) -> dict[str, Meter]:
    """Post what is new of what is owed, reserve for what may come, end quotes that cannot be paid; the meters after it, by quote."""
    job, now = await tx.get(Job, job_id), deps.clock.now()
    if job is None:
        return {}
    ids = sorted(one.quote_id for one in found)
    quotes = {row.id: row for row in await tx.select(QuoteRow, id=ids)}
    meters = {row.quote_id: row for row in await tx.select(Meter, quote_id=ids)}
    accounts = (ledger.name(kind, id_) for kind in (Account.RESERVED, Account.EARNED) for id_ in ids)
    books = await Books.open(tx, job_id, accounts)
    fund(books, job)
    purse = Purse(job_id, budget_uusd(job))
    after: dict[str, Meter] = {}
    ended: list[QuoteRow] = []
    unpaid: list[Meter] = []
    for one in found:
        quote, meter = quotes[one.quote_id], meters.get(one.quote_id)
        if not accounting.is_current(one, meter):
            continue
        if quote.ended_at is None and job.state in TERMINAL[JobState]:
            quote = replace(quote, ended_at=now, ended_because=f"the job is {job.state}")
            ended.append(quote)
        try:
            looked = accounting.look(purse, quote, meter, one, books.balances)
        except accounting.Inconsistent as wrong:  # the audit tells it as well; the others are paid all the same
            log.error("quote_not_settled", quote=quote.id, job=job_id, because=str(wrong))
            continue
        for entry in looked.entries:
            books.must(entry, worker_id=quote.worker_id)
        after[quote.id] = looked.meter
        if looked.ended_because:
            unpaid.append(looked.meter)
            ended.append(replace(quote, ended_at=now, ended_because=looked.ended_because))
    fund(books, job)  # what an ended job does not need any more
    await books.save(tx, now=now)
    await tx.put(*after.values(), *ended)
    if any(accounting.is_dry(purse, meter, free=books.standing(Account.FUNDS, job_id)) for meter in unpaid):
        await _pause_without_money(tx, job, now=now)
    return after


async def begin(tx: Tx, deps: Deps, job: Job, quote: QuoteRow, worker: Worker) -> Meter | None:
    """The meter of a quote that nobody looked at yet, in the transaction that leases under it; None when it cannot be paid."""
    one = new_quote(quote, _work(job, worker), at=deps.clock.now())
    meter = (await post(tx, deps, job.id, [one])).get(quote.id)
    return meter if meter is not None and meter.covered_until > meter.looked_at else None


async def meters_of(
    tx: Tx, deps: Deps, job: Job, workers: Mapping[str, Worker], quoted: Mapping[tuple[str, int], QuoteRow]
) -> dict[str, Meter]:
    """What pays the work of each of these workers, by worker; absent: nothing does. `quoted`: open quotes, by worker and session."""
    quotes = {quote.id: quote for (worker_id, epoch), quote in quoted.items() if _is_of(workers.get(worker_id), epoch)}
    meters = {row.quote_id: row for row in await tx.select(Meter, quote_id=sorted(quotes))} if quotes else {}
    for quote in quotes.values():
        if quote.id not in meters:
            meter = await begin(tx, deps, job, quote, workers[quote.worker_id])
            meters |= {} if meter is None else {quote.id: meter}
    return {meter.worker_id: meter for meter in meters.values()}


def _is_of(worker: Worker | None, epoch: int) -> bool:
    return worker is not None and worker.session_epoch == epoch


async def _pause_without_money(tx: Tx, job: Job, *, now: float) -> None:
    """Pause a job whose last worker had to go because its money is used up."""
    if job.state is not JobState.RUNNING or await tx.count(QuoteRow, job_id=job.id, ended_at=None, role="active"):
        return
    await pause_for(tx, job, used_up(job, spent=await spent_uusd(tx, job.id)), now=now)
