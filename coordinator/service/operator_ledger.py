"""The ledger as operators and authors read it."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from coordinator.domain.model import Job, LedgerAccount, LedgerEntry, Posting, Worker
from coordinator.service import ledger
from coordinator.service.operator_done import Done
from coordinator.service.operator_errors import conflict, unknown
from coordinator.service.ports import Reader, Tx
from coordinator.service.tokens import Caller
from coordinator.wire.rest_ledger import (
    AccountView,
    Balances,
    BalancesQuery,
    EntryView,
    LedgerPage,
    LedgerQuery,
    NewPayout,
    PayoutView,
    PostingView,
)
from pricing.ledger import Account, Refused


async def page(reader: Reader, caller: Caller, query: LedgerQuery) -> LedgerPage:
    """Entries, newest first."""
    before: dict[str, Any] = {} if query.before is None else {"seq__lt": query.before}
    if query.account is not None:
        entries, more = await _of_account(reader, caller, query, before)
    else:
        filters = await _visible(reader, caller, query.job) | ({} if query.worker is None else {"worker_id": query.worker})
        entries = await reader.select(LedgerEntry, order_by="-seq", limit=query.limit, **filters, **before)
        more = len(entries) == query.limit
    by_entry: dict[str, list[Posting]] = defaultdict(list)
    for row in await reader.select(Posting, entry_id=[entry.id for entry in entries]) if entries else []:
        by_entry[row.entry_id].append(row)
    views = tuple(_entry(entry, by_entry[entry.id]) for entry in entries)
    return LedgerPage(entries=views, next_before=entries[-1].seq if entries and more else None)


async def _of_account(reader: Reader, caller: Caller, query: LedgerQuery, before: dict[str, Any]) -> tuple[list[LedgerEntry], bool]:
    """The account's newest moves up to the page's begin; its own numbers are in the order of `seq`."""
    row = await reader.get(LedgerAccount, query.account)
    if row is None or not await reader.count(LedgerAccount, id=row.id, **await _visible(reader, caller, row.job_id)):
        return [], False
    above: dict[str, Any] = {}
    found: list[LedgerEntry] = []
    while len(found) < query.limit:
        moves = await reader.select(Posting, account=row.id, order_by="-number", limit=query.limit, **above)
        ids = [move.entry_id for move in moves]
        found += await reader.select(LedgerEntry, id=ids, order_by="-seq", **before) if ids else []
        if len(moves) < query.limit:
            return found[: query.limit], False
        above = {"number__lt": moves[-1].number}
    return found[: query.limit], True


async def _visible(reader: Reader, caller: Caller, job_id: str | None) -> dict[str, Any]:
    """The filter by job; an author finds nothing of jobs of others."""
    if not caller.is_author:
        return {} if job_id is None else {"job_id": job_id}
    own = [job.id for job in await reader.select(Job, owner=caller.token.id)]
    return {"job_id": [one for one in own if job_id in (None, one)]}


def _entry(row: LedgerEntry, postings: list[Posting]) -> EntryView:
    return EntryView(
        id=row.id,
        seq=row.seq,
        kind=row.kind,
        job_id=row.job_id,
        worker_id=row.worker_id or None,
        subject=row.subject,
        reason=row.reason,
        at=row.at,
        postings=tuple(PostingView(account=p.account, uusd=p.uusd, balance_uusd=p.balance_uusd) for p in postings),
    )


async def balances(reader: Reader, caller: Caller, query: BalancesQuery) -> Balances:
    """Accounts as they stand, and sums by kind."""
    filters = await _visible(reader, caller, query.job) | ({} if query.worker is None else {"worker_id": query.worker})
    rows = await reader.select(LedgerAccount, limit=query.limit, **filters)
    totals = {str(kind): await reader.total(LedgerAccount, "uusd", kind=kind, **filters) for kind in Account}
    return Balances(totals={kind: uusd for kind, uusd in totals.items() if uusd}, accounts=tuple(map(_account, rows)))


def _account(row: LedgerAccount) -> AccountView:
    return AccountView(
        account=row.id, kind=row.kind, job_id=row.job_id, worker_id=row.worker_id or None, postings=row.number, uusd=row.uusd
    )


async def pay_out(tx: Tx, new: NewPayout, *, now: float) -> Done:
    """Put a payout on record. Not more than is earned and not paid out yet."""
    if await tx.get(Worker, new.worker) is None:
        raise unknown("worker", new.worker)
    made = await ledger.pay_out(tx, new.worker, new.uusd, reason=new.note, now=now)
    if isinstance(made, Refused):
        fix = f"see GET /api/v1/workers/{new.worker}: pay out at most what is earned and not paid out yet"
        raise conflict("payout_above_earnings", made.reason, field="uusd", fix=fix)
    return Done(
        PayoutView(
            entry_id=made.id,
            worker_id=new.worker,
            uusd=new.uusd,
            note=new.note,
            at=now,
            earned_uusd=await ledger.earned_uusd(tx, new.worker),
            paid_out_uusd=await ledger.paid_out_uusd(tx, new.worker),
        )
    )
