"""Law 7 from the rows alone: postings sum to zero, accounts are their postings, every settled rollout is paid once.

No budget is passed, and no worker was paid out more than it earned.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from coordinator.domain import paying
from coordinator.domain.audit_turns import CountedTurn
from coordinator.domain.model import (
    Job,
    Lease,
    LedgerAccount,
    LedgerEntry,
    Meter,
    Posting,
    QuoteRow,
    Refusal,
    Rollout,
)
from pricing.ledger import BELOW_ZERO, Account, Kind, name
from pricing.money import usd_to_uusd


@dataclass(frozen=True, slots=True)
class Money:
    """The rows of one job that are about money. Entries, postings and accounts come with those of its workers' payouts."""

    job: Job
    quotes: Sequence[QuoteRow]
    meters: Sequence[Meter]
    entries: Sequence[LedgerEntry]
    postings: Sequence[Posting]  # of these entries
    accounts: Sequence[LedgerAccount]
    earned: Mapping[str, int]  # micro-USD by worker of the job, over all jobs


def audit_money(
    rows: Money, rollouts: Sequence[Rollout | CountedTurn], leases: Sequence[Lease], refusals: Sequence[Refusal]
) -> tuple[str, ...]:
    """Findings, each in words; none: law 7 holds."""
    return (
        *_entries(rows),
        *_accounts(rows),
        *_budget(rows),
        *_settled(rows),
        *_paid_once(rows, rollouts, leases, refusals),
        *_paid_out(rows),
    )


def _entries(rows: Money) -> Iterator[str]:
    """Each entry sums to zero, and no move belongs to none."""
    sums: Counter[str] = Counter()
    for posting in rows.postings:
        sums[posting.entry_id] += posting.uusd
    known = {entry.id for entry in rows.entries}
    for entry_id, total in sorted(sums.items()):
        if total:
            yield f"the postings of entry {entry_id} sum to {total} uUSD"
    for entry_id in sorted(known - set(sums)):
        yield f"entry {entry_id} has no postings"


def _accounts(rows: Money) -> Iterator[str]:
    """An account is the sum of its postings, numbered without gap, and never passed its limit."""
    moves: dict[str, list[Posting]] = defaultdict(list)
    for posting in rows.postings:
        moves[posting.account].append(posting)
    stands = {account.id: account for account in rows.accounts}
    for account_id in sorted(set(moves) | set(stands)):
        own = sorted(moves[account_id], key=lambda posting: posting.number)
        total = 0
        for place, posting in enumerate(own):
            total += posting.uusd
            if posting.number != place or posting.balance_uusd != total:
                yield f"posting {posting.number} of account {account_id} says {posting.balance_uusd} uUSD, its postings make {total}"
            kind = account_id.partition("/")[0]
            if total > 0 if kind in BELOW_ZERO else total < 0:
                yield f"account {account_id} stood at {total} uUSD after entry {posting.entry_id}, beyond its limit"
        account = stands.get(account_id)
        if account is None or account.uusd != total or account.number != len(own):
            said = "has no row" if account is None else f"is said to stand at {account.uusd} uUSD after {account.number} postings"
            yield f"account {account_id} {said}, its {len(own)} postings make {total}"


def _standing(rows: Money, kind: Account) -> int:
    return sum(account.uusd for account in rows.accounts if account.kind == kind)


def _budget(rows: Money) -> Iterator[str]:
    usd, spent, reserved = rows.job.config.budget.usd, _standing(rows, Account.SPENT), _standing(rows, Account.RESERVED)
    if usd is not None and spent + reserved > usd_to_uusd(usd):
        yield f"{spent} uUSD are spent and {reserved} reserved, budget.usd is {usd}"
    earned = sum(_standing(rows, kind) for kind in (Account.EARNED, Account.PROVIDER, Account.TRAFFIC))
    if not spent == earned == -_standing(rows, Account.DEBTS):
        yield f"{spent} uUSD are spent, {earned} are earned, and the debts are {_standing(rows, Account.DEBTS)}"


def _settled(rows: Money) -> Iterator[str]:
    """What was posted for a quote is what its meter says; once it is closed, exactly what is owed, and nothing stays reserved."""
    quotes = {quote.id: quote for quote in rows.quotes}
    by_account = {account.id: account.uusd for account in rows.accounts}
    undone = _compensated(rows)
    for meter in sorted(rows.meters, key=lambda meter: meter.quote_id):
        quote = quotes.get(meter.quote_id)
        if quote is None:
            yield f"the meter of quote {meter.quote_id} has no quote"
            continue
        posted = by_account.get(name(Account.EARNED, quote.id), 0) + undone[quote.id]
        if posted != meter.posted_uusd:
            yield f"{posted} uUSD are posted for quote {quote.id}, its meter says {meter.posted_uusd}"
        owed = paying.owed_uusd(quote, tokens=meter.tokens, paid_ms=meter.paid_ms)
        if meter.posted_uusd > owed or (meter.closed_at is not None and meter.posted_uusd != owed):
            yield f"{meter.posted_uusd} uUSD are posted for quote {quote.id}, {owed} are owed"
        if meter.closed_at is not None and by_account.get(name(Account.RESERVED, quote.id), 0):
            yield f"quote {quote.id} is closed and {by_account[name(Account.RESERVED, quote.id)]} uUSD stay reserved for it"


def _compensated(rows: Money) -> Counter[str]:
    """What compensating entries took back of what was earned, by quote."""
    taken: Counter[str] = Counter()
    subjects = {entry.id: entry.subject for entry in rows.entries if entry.kind == Kind.COMPENSATE}
    for posting in rows.postings:
        if posting.entry_id in subjects and posting.account == name(Account.EARNED, subjects[posting.entry_id]):
            taken[subjects[posting.entry_id]] -= posting.uusd
    return taken


def _paid_once(
    rows: Money, rollouts: Sequence[Rollout | CountedTurn], leases: Sequence[Lease], refusals: Sequence[Refusal]
) -> Iterator[str]:
    """Of a closed quote: its tokens are those of the rollouts accepted under it, and of the refusals that it pays, each once."""
    quote_of: dict[str, str] = {lease.id: lease.quote_id for lease in leases if lease.quote_id is not None}
    tokens: Counter[str] = Counter()
    for rollout in rollouts:
        quote_id = quote_of.get(rollout.lease_id or "")
        if rollout.accepted_at is not None and quote_id is not None:
            tokens[quote_id] += rollout.length
    for refusal in refusals:
        if refusal.paid and refusal.quote_id is not None:
            tokens[refusal.quote_id] += refusal.tokens
    meters = {meter.quote_id: meter for meter in rows.meters}
    for quote_id in sorted(set(quote_of.values()) - set(meters)):
        yield f"work was leased under quote {quote_id}, which nothing measures"
    for meter in sorted(meters.values(), key=lambda meter: meter.quote_id):
        made = tokens[meter.quote_id]
        if meter.tokens > made or (meter.closed_at is not None and meter.tokens != made):
            yield f"{meter.tokens} tokens are owed for under quote {meter.quote_id}, its rollouts and paid refusals have {made}"


def _paid_out(rows: Money) -> Iterator[str]:
    for account in sorted(rows.accounts, key=lambda account: account.id):
        earned = rows.earned.get(account.worker_id, 0)
        if account.kind == Account.PAID and account.uusd > earned:
            yield f"{account.uusd} uUSD are paid out to worker {account.worker_id}, {earned} are earned in all jobs"
