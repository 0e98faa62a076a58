"""The ledger's rules (law 7): double entry in integer micro-USD, from (balances, fact) to an entry, to nothing, or to a refusal.

An entry moves money between accounts; its moves sum to zero, and no account passes its limit. Money of a job goes
`outside` -> `funds` -> `reserved` -> `spent`; whenever something is spent, the same amount goes from the job's `debts` to the one
that earned it. So `spent` is what the job owes in sum, and what is funded (its budget) is never passed. Nothing is taken back:
what was wrong is repaired by an entry that compensates it.

What is owed is given as a cumulative amount, rounded down once; an entry posts what is new of it. So rounding stays under
1 uUSD, and the same fact posted again posts nothing. An entry's id names its subject and its place in the subject's account:
one that was made from balances of before has the id of one that exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MOST_UUSD = 2**62  # a balance fits the store's 64 bits


class Kind(StrEnum):
    """What an entry does."""

    FUND = "fund"  # a budget was set, raised or lowered
    RESERVE = "reserve"
    SETTLE = "settle"  # a worker earned
    RELEASE = "release"  # a reservation is needed no more
    ACCRUE = "accrue"  # a rental or traffic cost something, by the provider's clock
    COMPENSATE = "compensate"
    PAYOUT = "payout"  # an operator paid a worker what it had earned, outside of ECHO-2


class Account(StrEnum):
    """Kinds of account; an account is `kind/owner`."""

    OUTSIDE = "outside"  # of a job: where its money comes from
    FUNDS = "funds"  # of a job: given, not reserved yet
    RESERVED = "reserved"  # of a quote or a rental: may be spent by it only
    SPENT = "spent"  # of a job
    DEBTS = "debts"  # of a job: the other side of what was earned by it
    EARNED = "earned"  # of a quote: what its worker earned under it
    PROVIDER = "provider"  # of a rental: what its provider is owed
    TRAFFIC = "traffic"  # of a job: what its bytes cost
    CASH = "cash"  # of a worker: where its payouts come from
    PAID = "paid"  # of a worker: what it was paid out


BELOW_ZERO = frozenset({Account.OUTSIDE, Account.DEBTS, Account.CASH})  # these stand at 0 or below, all others at 0 or above


@dataclass(frozen=True, slots=True)
class Balance:
    """An account as it stands: how many moves it has had, and their sum."""

    number: int = 0
    uusd: int = 0


@dataclass(frozen=True, slots=True)
class Move:
    """Money into an account (negative: out of it)."""

    account: str
    uusd: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One fact of money. `subject`: the job, quote or rental that it is about."""

    id: str
    kind: Kind
    job: str
    subject: str
    moves: tuple[Move, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Refused:
    """Why nothing was posted."""

    reason: str


@dataclass(frozen=True, slots=True)
class Claim:
    """Who earns from which job: a quote's worker, a rental's provider, or traffic."""

    job: str
    subject: str
    payee: Account = Account.EARNED

    @property
    def reserved(self) -> str:
        """The account that it is paid from."""
        return name(Account.RESERVED, self.subject)


Balances = Mapping[str, Balance]
Outcome = Entry | Refused | None
"""None: there is nothing to post."""


def name(kind: Account, owner: str) -> str:
    """An account's id."""
    return f"{kind}/{owner}"


def kind_of(account: str) -> Account:
    """The kind in an account's id. Raises ValueError for one that is none."""
    return Account(account.partition("/")[0])


def standing(balances: Balances, kind: Account, owner: str) -> int:
    """The balance of an account, micro-USD; 0 for one that had no move."""
    return balances.get(name(kind, owner), Balance()).uusd


def posted(balances: Balances, entry: Entry) -> dict[str, Balance] | Refused:
    """The balances that the entry changes, after it; or why it may not be posted."""
    total = sum(move.uusd for move in entry.moves)
    if total:
        return Refused(f"the moves of entry {entry.id} sum to {total} uUSD: they must sum to 0")
    if len({move.account for move in entry.moves}) != len(entry.moves) or not entry.moves:
        return Refused(f"entry {entry.id} must move each of its accounts once")
    after: dict[str, Balance] = {}
    for move in entry.moves:
        before = balances.get(move.account, Balance())
        balance = Balance(before.number + 1, before.uusd + move.uusd)
        wrong = _beyond(move.account, balance.uusd)
        if wrong:
            return Refused(f"entry {entry.id} may not be posted: {wrong}")
        after[move.account] = balance
    return after


def _beyond(account: str, uusd: int) -> str:
    """Which limit a balance passes; empty: none."""
    if abs(uusd) > MOST_UUSD:
        return f"{account} would stand at {uusd} uUSD, beyond what the ledger can hold"
    if kind_of(account) in BELOW_ZERO:
        return f"{account} would stand at {uusd} uUSD, above 0" if uusd > 0 else ""
    return f"{account} would stand at {uusd} uUSD, below 0" if uusd < 0 else ""


def fund(balances: Balances, job: str, *, total: int, reason: str) -> Outcome:
    """Set what the job was given in all. Lowered below what is spent and reserved, it falls to that."""
    given = -standing(balances, Account.OUTSIDE, job)
    uusd = max(min(total, MOST_UUSD) - given, -standing(balances, Account.FUNDS, job))
    if not uusd:
        return None
    funds, outside = name(Account.FUNDS, job), name(Account.OUTSIDE, job)
    return Entry(_id(balances, Kind.FUND, funds), Kind.FUND, job, job, (Move(outside, -uusd), Move(funds, uusd)), reason)


def reserve(balances: Balances, job: str, subject: str, *, uusd: int, reason: str) -> Outcome:
    """Set money of the job aside for a quote or a rental, before any of it can be spent."""
    if uusd < 0:
        return Refused(f"{uusd} uUSD cannot be reserved for {subject}: give 0 or more")
    if not uusd:
        return None
    free = standing(balances, Account.FUNDS, job)
    if uusd > free:
        return Refused(f"{uusd} uUSD cannot be reserved for {subject}: the job has {free} uUSD left")
    funds, reserved = name(Account.FUNDS, job), name(Account.RESERVED, subject)
    moves = (Move(funds, -uusd), Move(reserved, uusd))
    return Entry(_id(balances, Kind.RESERVE, reserved), Kind.RESERVE, job, subject, moves, reason)


def release(balances: Balances, job: str, subject: str, *, keep: int, reason: str) -> Outcome:
    """Give what a reservation holds above `keep` back to the job."""
    uusd = standing(balances, Account.RESERVED, subject) - keep
    if uusd <= 0:
        return None
    funds, reserved = name(Account.FUNDS, job), name(Account.RESERVED, subject)
    moves = (Move(reserved, -uusd), Move(funds, uusd))
    return Entry(_id(balances, Kind.RELEASE, reserved), Kind.RELEASE, job, subject, moves, reason)


def settle(balances: Balances, claim: Claim, *, owed: int, paid: int, reason: str) -> Outcome:
    """Post what is new of the `owed` in all, `paid` being what was posted of it before. It comes from the reservation only."""
    uusd = owed - paid
    if uusd < 0:
        return Refused(f"{owed} uUSD are owed for {claim.subject} and {paid} are posted: repair that by a compensating entry")
    if not uusd:
        return None
    held = standing(balances, Account.RESERVED, claim.subject)
    if uusd > held:
        return Refused(f"{uusd} uUSD are due for {claim.subject} and {held} are reserved: reserve before it is spent")
    owner = claim.job if claim.payee is Account.TRAFFIC else claim.subject
    moves = (
        Move(claim.reserved, -uusd),
        Move(name(Account.SPENT, claim.job), uusd),
        Move(name(Account.DEBTS, claim.job), -uusd),
        Move(name(claim.payee, owner), uusd),
    )
    kind = Kind.SETTLE if claim.payee is Account.EARNED else Kind.ACCRUE
    return Entry(_id(balances, kind, claim.reserved), kind, claim.job, claim.subject, moves, reason)


def payout(balances: Balances, worker: str, *, uusd: int, earned: int, reason: str) -> Entry | Refused:
    """Put on record that a worker was paid out, of the `earned` in all; never more than that. It belongs to no job."""
    if uusd <= 0:
        return Refused(f"{uusd} uUSD cannot be paid out to {worker}: give 1 or more")
    paid = standing(balances, Account.PAID, worker)
    if paid + uusd > earned:
        return Refused(f"{uusd} uUSD are more than {worker} has to get: {earned} are earned, {paid} are paid out")
    account = name(Account.PAID, worker)
    moves = (Move(name(Account.CASH, worker), -uusd), Move(account, uusd))
    return Entry(_id(balances, Kind.PAYOUT, account), Kind.PAYOUT, "", worker, moves, reason)


def compensate(entry: Entry, *, reason: str) -> Entry | Refused:
    """The entry that undoes another one; once, and never a compensating one."""
    if entry.kind is Kind.COMPENSATE:
        return Refused(f"entry {entry.id} compensates another one: post a new entry instead of undoing it")
    if not reason.strip():
        return Refused(f"entry {entry.id} is not compensated without a reason: say what was wrong")
    moves = tuple(Move(move.account, -move.uusd) for move in entry.moves)
    return Entry(f"{Kind.COMPENSATE}/{entry.id}", Kind.COMPENSATE, entry.job, entry.subject, moves, reason)


def _id(balances: Balances, kind: Kind, account: str) -> str:
    return f"{kind}/{account}/{balances.get(account, Balance()).number}"
