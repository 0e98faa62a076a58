"""Bodies of the ledger's REST routes. Money is integer micro-dollars."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from coordinator.wire.rest import Identifier, Limit, RestAnswer, RestBody

AccountId = Annotated[str, Field(max_length=300, pattern=r"^[a-z]{1,20}/[A-Za-z0-9._:/-]+$")]


class LedgerQuery(RestBody):
    """GET /ledger: newest first."""

    job: Identifier | None = Field(None, description="only entries of this job")
    worker: Identifier | None = Field(None, description="only entries that concern this worker")
    account: AccountId | None = Field(None, description="only entries that moved this account; job and worker are ignored")
    before: Annotated[int, Field(ge=0, lt=2**62)] | None = Field(
        None, description="only entries before this seq; for the next page"
    )
    limit: Limit = Field(100, description="at most this many")


class BalancesQuery(RestBody):
    """GET /ledger/balances."""

    job: Identifier | None = Field(None, description="only accounts of this job")
    worker: Identifier | None = Field(None, description="only accounts of this worker")
    limit: Limit = Field(200, description="at most this many accounts; the totals are over all of them")


class PostingView(RestAnswer):
    """One move of an entry."""

    account: str
    uusd: int = Field(description="into the account; negative: out of it")
    balance_uusd: int = Field(description="of the account, after it")


class EntryView(RestAnswer):
    """One fact of money; its postings sum to zero, and it is never changed."""

    id: str
    seq: int
    kind: str
    job_id: str
    worker_id: str | None
    subject: str = Field(description="the job, quote or rental that it is about")
    reason: str
    at: float
    postings: tuple[PostingView, ...]


class LedgerPage(RestAnswer):
    """GET /ledger."""

    entries: tuple[EntryView, ...]
    next_before: int | None = Field(description="pass as `before` for the next page; null: this was the last one")


class NewPayout(RestBody):
    """POST /ledger/payouts: a worker was paid outside of ECHO-2."""

    worker: Identifier
    uusd: Annotated[int, Field(gt=0, le=2**62)] = Field(description="micro-dollars; not more than is earned and not paid out yet")
    note: Annotated[str, Field(max_length=500)] = Field("", description="such as the number of the transfer; the worker reads it")


class PayoutView(RestAnswer):
    """A payout on record, and where the worker stands after it."""

    entry_id: str
    worker_id: str
    uusd: int
    note: str
    at: float
    earned_uusd: int = Field(description="posted in the ledger, over all jobs")
    paid_out_uusd: int = Field(description="in all, with this one")


class AccountView(RestAnswer):
    """An account as it stands."""

    account: str
    kind: str
    job_id: str
    worker_id: str | None
    postings: int
    uusd: int


class Balances(RestAnswer):
    """GET /ledger/balances."""

    totals: dict[str, int] = Field(description="kind of account -> sum, over every matching account; all kinds sum to 0 over a job")
    accounts: tuple[AccountView, ...] = Field(description="by id")
