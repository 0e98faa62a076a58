"""Posts entries of `pricing.ledger`: reads the accounts that they touch, and writes entries, postings and accounts in one transaction."""

from __future__ import annotations

from collections.abc import Iterable

from coordinator.domain.model import Job, JobState, LedgerAccount, LedgerEntry, Posting
from coordinator.domain.states import TERMINAL
from coordinator.service.ports import Reader, Tx
from pricing import ledger
from pricing.ledger import Account, Balance, Entry, Outcome, Refused
from pricing.money import usd_to_uusd

OF_JOB = (Account.OUTSIDE, Account.FUNDS, Account.SPENT, Account.DEBTS)


class LedgerRefused(Exception):
    """An entry that must be possible was refused: rows and rules disagree, so nothing of the transaction is kept."""


class Books:
    """The accounts of one transaction, and what it adds to them. Open them with every account that will move."""

    def __init__(self, balances: dict[str, Balance]) -> None:
        self.balances = balances
        self._added: list[tuple[Entry, str, dict[str, Balance]]] = []

    @classmethod
    async def open(cls, reader: Reader, job_id: str, others: Iterable[str] = ()) -> Books:
        """The accounts of a job, and `others` (ids)."""
        ids = sorted({*(ledger.name(kind, job_id) for kind in OF_JOB), *others})
        rows = await reader.select(LedgerAccount, id=ids)
        return cls({row.id: Balance(row.number, row.uusd) for row in rows})

    def post(self, outcome: Outcome, *, worker_id: str = "") -> str:
        """Add an entry; why it was refused, empty when it was not (or when there was nothing to post)."""
        if outcome is None:
            return ""
        after = outcome if isinstance(outcome, Refused) else ledger.posted(self.balances, outcome)
        if isinstance(after, Refused):
            return after.reason
        assert isinstance(outcome, Entry)
        self.balances.update(after)
        self._added.append((outcome, worker_id, after))
        return ""

    def must(self, outcome: Outcome, *, worker_id: str = "") -> None:
        """Add an entry that cannot be refused while rows and rules agree. Raises LedgerRefused."""
        refused = self.post(outcome, worker_id=worker_id)
        if refused:
            raise LedgerRefused(refused)

    def standing(self, kind: Account, owner: str) -> int:
        """An account's balance, with what was added."""
        return ledger.standing(self.balances, kind, owner)

    async def save(self, tx: Tx, *, now: float) -> None:
        """Write what was added. An entry that exists already is a Conflict: then the whole transaction is undone."""
        if not self._added:
            return
        newest = await tx.highest(LedgerEntry, "seq")
        first = 0 if newest is None else newest + 1
        entries, postings, accounts = [], [], {}
        for place, (entry, worker_id, after) in enumerate(self._added):
            entries.append(LedgerEntry(entry.id, first + place, entry.kind, entry.job, worker_id, entry.subject, entry.reason, now))
            for move in entry.moves:
                stands = after[move.account]
                postings.append(Posting(move.account, stands.number - 1, entry.id, move.uusd, stands.uusd))
                kind = ledger.kind_of(move.account)
                owner = "" if kind in OF_JOB else worker_id
                accounts[move.account] = LedgerAccount(move.account, kind, entry.job, owner, stands.number, stands.uusd)
        self._added.clear()
        await tx.put(*entries, *postings, *accounts.values())


def budget_uusd(job: Job) -> int | None:
    """The job's budget of money; None: none was set."""
    return None if job.config.budget.usd is None else usd_to_uusd(job.config.budget.usd)


def fund(books: Books, job: Job) -> None:
    """Post what was changed of the job's budget. Without a budget, and once it has ended, it is given what it uses."""
    budget = budget_uusd(job)
    if budget is None or job.state in TERMINAL[JobState]:
        budget, reason = 0, "the job needs no more"  # lowers it to what is spent and reserved
    else:
        reason = f"budget.usd is {job.config.budget.usd}"
    books.must(ledger.fund(books.balances, job.id, total=budget, reason=reason))


async def fund_job(tx: Tx, job: Job, *, now: float) -> None:
    """`fund` in a transaction of another command."""
    books = await Books.open(tx, job.id)
    fund(books, job)
    await books.save(tx, now=now)


async def spent_uusd(reader: Reader, job_id: str) -> int:
    """What was posted as spent by the job."""
    row = await reader.get(LedgerAccount, ledger.name(Account.SPENT, job_id))
    return 0 if row is None else row.uusd


async def spent_since(reader: Reader, job_id: str, since: float) -> int:
    """What was posted as spent by the job after `since`, Unix seconds. The account's moves are in order of time: found by halves."""
    account = ledger.name(Account.SPENT, job_id)
    stands = await reader.get(LedgerAccount, account)
    low, high, before = 0, 0 if stands is None else stands.number, 0
    while low < high:
        middle = (low + high) // 2
        move = await reader.get(Posting, account, middle)
        entry = None if move is None else await reader.get(LedgerEntry, move.entry_id)
        if move is None or entry is None or entry.at > since:
            high = middle
        else:
            low, before = middle + 1, move.balance_uusd
    return 0 if stands is None else max(stands.uusd - before, 0)


async def reserved_uusd(reader: Reader, job_id: str) -> int:
    """What is set aside for work under way."""
    return await reader.total(LedgerAccount, "uusd", job_id=job_id, kind=Account.RESERVED)


async def bound_uusd(reader: Reader, job_id: str) -> int:
    """What the job has spent and reserved: its budget cannot be less."""
    return await reader.total(LedgerAccount, "uusd", job_id=job_id, kind=[Account.SPENT, Account.RESERVED])


async def earned_uusd(reader: Reader, worker_id: str) -> int:
    """What was posted as earned by the worker, over all jobs."""
    return await reader.total(LedgerAccount, "uusd", worker_id=worker_id, kind=Account.EARNED)


async def paid_out_uusd(reader: Reader, worker_id: str) -> int:
    """What was put on record as paid out to the worker."""
    row = await reader.get(LedgerAccount, ledger.name(Account.PAID, worker_id))
    return 0 if row is None else row.uusd


async def pay_out(tx: Tx, worker_id: str, uusd: int, *, reason: str, now: float) -> Entry | Refused:
    """Put a payout on record, if so much is earned and not paid out yet."""
    books = await Books.open(tx, "", (ledger.name(kind, worker_id) for kind in (Account.CASH, Account.PAID)))
    earned = await earned_uusd(tx, worker_id)
    made = ledger.payout(books.balances, worker_id, uusd=uusd, earned=earned, reason=reason)
    if isinstance(made, Entry):
        books.must(made, worker_id=worker_id)
        await books.save(tx, now=now)
    return made


async def compensate(tx: Tx, entry_id: str, *, reason: str, now: float) -> str:
    """Undo an entry by another one; why not, empty when it was posted."""
    row = await tx.get(LedgerEntry, entry_id)
    if row is None:
        return f"entry {entry_id} does not exist"
    if await tx.get(LedgerEntry, f"{ledger.Kind.COMPENSATE}/{entry_id}") is not None:
        return f"entry {entry_id} is compensated already"
    moves = tuple(ledger.Move(p.account, p.uusd) for p in await tx.select(Posting, entry_id=entry_id))
    books = await Books.open(tx, row.job_id, (move.account for move in moves))
    entry = Entry(row.id, ledger.Kind(row.kind), row.job_id, row.subject, moves, row.reason)
    refused = books.post(ledger.compensate(entry, reason=reason), worker_id=row.worker_id)
    await books.save(tx, now=now)
    return refused
