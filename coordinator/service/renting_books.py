"""Rentals in the ledger: reserved before they can be spent, accrued as the provider bills, released when they are gone (law 7).

Called in the transaction that writes the rows. A rental's account is `rental-<id>`; strays belong to no job and are in their rows only.
Reserves are topped up and costs posted by the ten minutes, so that the ledger does not grow with every look.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import structlog

from coordinator.domain.model import Job, JobState, LedgerAccount
from coordinator.domain.states import TERMINAL
from coordinator.service.ledger import Books, bound_uusd, budget_uusd, fund
from coordinator.service.ports import Reader, Tx
from pricing import ledger
from pricing.ledger import Account, Claim
from pricing.rental_plan import most_uusd
from pricing.rentals import Limits, Rental, ended, span_uusd

log = structlog.get_logger()
CHUNK_S = 600.0


def subject(rental: Rental) -> str:
    """Whose account it is in the ledger."""
    return f"rental-{rental.id}"


async def budget_left(reader: Reader, job: Job, rentals: Iterable[Rental]) -> int | None:
    """What these may cost in all: the job's budget without what all others have spent and reserved. None: no limit."""
    budget = budget_uusd(job)
    if budget is None:
        return None
    kinds = (Account.RESERVED, Account.PROVIDER)
    names = [ledger.name(kind, subject(one)) for one in rentals if one.job_id == job.id for kind in kinds]
    own = sum(row.uusd for row in await reader.select(LedgerAccount, id=names)) if names else 0
    return budget - (await bound_uusd(reader, job.id) - own)


async def post_rentals(tx: Tx, rentals: Iterable[Rental], limits: Limits, *, at: float, now: float) -> dict[str, Rental]:
    """Reserve, accrue and release for these rentals; by id, those that the job's money does not bear and that shall end."""
    by_job: dict[str, list[Rental]] = defaultdict(list)
    for rental in rentals:
        if rental.job_id:
            by_job[rental.job_id].append(rental)
    over: dict[str, Rental] = {}
    for job_id, some in sorted(by_job.items()):
        job = await tx.get(Job, job_id)
        if job is not None:
            over |= await _post_job(tx, job, some, limits, at=at, now=now)
    return over


async def _post_job(tx: Tx, job: Job, rentals: list[Rental], limits: Limits, *, at: float, now: float) -> dict[str, Rental]:
    kinds = (Account.RESERVED, Account.PROVIDER)
    books = await Books.open(tx, job.id, (ledger.name(kind, subject(one)) for kind in kinds for one in rentals))
    fund(books, job)
    over: dict[str, Rental] = {}
    for rental in sorted(rentals, key=lambda one: (one.is_wanted, one.id)):  # what is being ended is paid for first
        refused = _hold(books, job, rental, most_uusd(rental, limits, at=at))
        if refused and rental.is_wanted:
            over[rental.id] = ended(rental, f"budget: {refused}", now)
        elif refused:
            log.error("rental_beyond_its_reserve", rental=rental.id, provider=rental.provider, because=refused)
        _accrue(books, job, rental)
    fund(books, job)
    await books.save(tx, now=now)
    return over


def _hold(books: Books, job: Job, rental: Rental, most: int) -> str:
    """Reserve what it may cost from here on, and give back what is too much; why it was refused, empty when it was not."""
    name = subject(rental)
    held = books.standing(Account.RESERVED, name)
    need = most - books.standing(Account.PROVIDER, name)
    chunk = span_uusd(rental.price, CHUNK_S) if rental.is_open else 0
    if need > held:
        if not _reserve(books, job, rental, need + chunk - held):
            return ""
        return _reserve(books, job, rental, need - held)
    books.must(ledger.release(books.balances, job.id, name, keep=need + chunk, reason="the rental needs it no more"))
    return ""


def _reserve(books: Books, job: Job, rental: Rental, uusd: int) -> str:
    budget = budget_uusd(job)
    if budget is None or job.state in TERMINAL[JobState]:  # given what it uses, inside its budget: a bill may outlast its job
        given = -books.standing(Account.OUTSIDE, job.id)
        total = given + max(uusd - books.standing(Account.FUNDS, job.id), 0)
        reason = "no budget was set" if budget is None else "the job has ended, and its rental has not"
        total = total if budget is None else max(min(total, budget), given)
        books.must(ledger.fund(books.balances, job.id, total=total, reason=reason))
    why = f"rental of {rental.offer_id} at {rental.provider}"
    return books.post(ledger.reserve(books.balances, job.id, subject(rental), uusd=uusd, reason=why))


def _accrue(books: Books, job: Job, rental: Rental) -> None:
    """Post what is new of its cost, from its reserve. What goes beyond that stands in the rental's row alone, and is said."""
    name = subject(rental)
    paid = books.standing(Account.PROVIDER, name)
    if rental.is_open and rental.cost_uusd - paid < span_uusd(rental.price, CHUNK_S):
        return
    owed = min(rental.cost_uusd, paid + books.standing(Account.RESERVED, name))
    claim = Claim(job.id, name, Account.PROVIDER)
    refused = books.post(ledger.settle(books.balances, claim, owed=owed, paid=paid, reason=rental.reason))
    if refused or (owed < rental.cost_uusd and not rental.is_open):
        log.error("rental_not_posted", rental=rental.id, provider=rental.provider, uusd=rental.cost_uusd - owed, because=refused)
