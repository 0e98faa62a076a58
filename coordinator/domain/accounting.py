"""One look at a quote: what to post for it, what to reserve, whether it goes on, and its meter after it (pure, law 7).

Entries come in the order in which they must be posted, and are possible by construction: whatever may have become owed since the last
look was reserved at that look. A quote for which no more can be reserved ends with that reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from coordinator.domain import paying
from coordinator.domain.model import Meter, QuoteRow
from coordinator.domain.paying import Measured, Work
from pricing import ledger
from pricing.ledger import Account, Balance, Claim, Entry, Outcome, Refused
from pricing.money import uusd_to_usd

AHEAD_S = 60.0  # active time is reserved for so long: a coordinator that stands still for longer pays no time
AHEAD_MS = 60_000
SETTLE_S = 10.0  # between two postings to one quote, while it lasts
USED_UP = "budget_used_up"
NEARLY = 10  # less than this part of a budget is left: it is as good as used up


class Inconsistent(Exception):
    """An entry that must be possible was refused: rows and rules disagree, and nothing may be posted."""


@dataclass(frozen=True, slots=True)
class Found:
    """What was measured under one quote, as of `at`."""

    quote_id: str
    worker_id: str
    at: float
    looked_at: float | None  # of the meter that it was measured from; None: there was none
    left: int | None  # slots leasable by that meter then
    counted_to: float
    tokens_before: int
    seen: Measured
    work: Work


@dataclass(frozen=True, slots=True)
class Purse:
    """Whose money is spent: the job and its budget, micro-USD; None: it has no budget and is given what it needs."""

    job: str
    budget_uusd: int | None


@dataclass(frozen=True, slots=True)
class Looked:
    """The outcome; `ended_because` empty: the quote goes on, or had ended before."""

    entries: tuple[Entry, ...]
    meter: Meter
    ended_because: str = ""


def is_current(found: Found, meter: Meter | None) -> bool:
    """Whether nobody looked at the quote since it was measured."""
    if meter is None:
        return found.looked_at is None
    return meter.closed_at is None and meter.looked_at == found.looked_at


def leased_since(found: Found, meter: Meter | None) -> Found:
    """With the slots that were leased since it was measured, as the meter counted them."""
    if found.left is None or meter is None or meter.leasable is None:
        return found
    seen = replace(found.seen, open_slots=found.seen.open_slots + found.left - meter.leasable)
    return replace(found, seen=seen)


def is_dry(purse: Purse, meter: Meter, *, free: int) -> bool:
    """Whether a quote ended because the job's money is used up, and not because one worker asks for more than there is.

    A stranger's price must not stop a job that could pay others. `meter`: the quote's; `free`: micro-USD that nothing is reserved of.
    """
    return meter.posted_uusd > 0 or NEARLY * free < (purse.budget_uusd or 0)


def look(purse: Purse, quote: QuoteRow, meter: Meter | None, found: Found, balances: Mapping[str, Balance]) -> Looked:
    """Settle, then reserve or end. `meter` is as it is now; `found` was measured from it. Raises Inconsistent."""
    found = leased_since(found, meter)
    books = _Books(purse, quote, dict(balances), [], 0 if meter is None else meter.posted_uusd)
    posted_at = found.at if meter is None else meter.posted_at
    because = ""
    if quote.ended_at is None:
        if found.at >= posted_at + SETTLE_S:
            posted_at = books.settle(found)
        because = books.reserve(found, paying.wanted_slots(meter, found.work))
    goes_on = quote.ended_at is None and not because
    # Nothing of it came after it was measured: what happens at that very moment may come after.
    is_whole = quote.ended_at is not None and quote.ended_at < found.at
    if not goes_on:
        posted_at = books.settle(found)
    tail_ms = _tail_ms(quote, found, meter)
    if because or is_whole:
        books.release(found, because or quote.ended_because, ahead_ms=tail_ms)
    leasable = books.leasable(found) if goes_on else 0
    covered_until = found.at if meter is None or (not tail_ms and (because or is_whole)) else meter.covered_until
    after = Meter(
        quote_id=quote.id,
        job_id=purse.job,
        worker_id=quote.worker_id,
        looked_at=found.at,
        counted_to=found.counted_to,
        tokens_before=found.tokens_before,
        tokens=found.seen.tokens,
        paid_ms=found.seen.paid_ms,
        posted_uusd=books.paid,
        posted_at=posted_at,
        covered_until=found.at + AHEAD_S if goes_on else covered_until,
        wanted=leasable or 0,
        leasable=leasable,
        closed_at=found.at if is_whole and not found.seen.open_slots else None,
    )
    return Looked(tuple(books.entries), after, because)


def _tail_ms(quote: QuoteRow, found: Found, meter: Meter | None) -> int:
    """Time that an ended quote may still come to: with no rate, that of the leases under way, as far as it is reserved."""
    if meter is None or quote.uusd_per_million_tokens is not None or not found.seen.open_slots:
        return 0
    return max(int(meter.covered_until * 1000) - int(found.at * 1000), 0)


@dataclass(slots=True)
class _Books:
    """The balances while one quote is looked at, and what was added to them."""

    purse: Purse
    quote: QuoteRow
    balances: dict[str, Balance]
    entries: list[Entry]
    paid: int  # posted of what is owed under the quote

    @property
    def claim(self) -> Claim:
        return Claim(self.purse.job, self.quote.id)

    @property
    def cover(self) -> int:
        """What is posted or reserved for the quote: the most that it may come to."""
        return self.paid + ledger.standing(self.balances, Account.RESERVED, self.quote.id)

    def add(self, outcome: Outcome) -> None:
        if outcome is None:
            return
        after = outcome if isinstance(outcome, Refused) else ledger.posted(self.balances, outcome)
        if isinstance(after, Refused):
            raise Inconsistent(after.reason)
        assert isinstance(outcome, Entry)
        self.balances.update(after)
        self.entries.append(outcome)

    def settle(self, found: Found) -> float:
        """Post what is new of what is owed; when that was."""
        owed = paying.owed_uusd(self.quote, tokens=found.seen.tokens, paid_ms=found.seen.paid_ms)
        words = f"{found.seen.tokens} tokens, {found.seen.paid_ms / 1000:.3f} s in all"
        if self.purse.budget_uusd is None and owed > self.cover:
            self._take(owed - self.cover, "leases without a budget are not counted beforehand")
        self.add(ledger.settle(self.balances, self.claim, owed=owed, paid=self.paid, reason=words))
        self.paid = owed
        return found.at

    def reserve(self, found: Found, wanted: int) -> str:
        """Reserve for what may come until the next look; why the quote must end, empty when it goes on."""
        goal = self._most(found, wanted)
        least = self._most(found, 0)
        if 2 * self.cover < goal + least:
            self._take(goal - self.cover, f"{found.seen.open_slots} slots are leased, {wanted} more may be")
        elif self.cover > 2 * goal:
            words = "more was reserved than may be used"
            self.add(ledger.release(self.balances, self.purse.job, self.quote.id, keep=goal - self.paid, reason=words))
        if self.cover < least:
            return self._used_up(least - self.cover)
        slots = self.leasable(found)
        if slots is not None and slots < found.work.group_size and not found.seen.open_slots:
            return self._used_up(self._most(found, found.work.group_size) - self.cover)
        return ""

    def release(self, found: Found, because: str, *, ahead_ms: int) -> None:
        """Give back what the quote, which has ended, cannot come to any more."""
        most = paying.most_uusd(self.quote, found.seen, found.work, more_slots=0, ahead_ms=ahead_ms)
        words = f"the quote ended: {because}"
        self.add(ledger.release(self.balances, self.purse.job, self.quote.id, keep=max(most - self.paid, 0), reason=words))

    def leasable(self, found: Found) -> int | None:
        """Slots that the reservation pays besides those leased; None: no budget bounds them."""
        if self.purse.budget_uusd is None:
            return None
        return paying.leasable(self.quote, found.seen, found.work, cover_uusd=self.cover, ahead_ms=AHEAD_MS)

    def _most(self, found: Found, more_slots: int) -> int:
        return paying.most_uusd(self.quote, found.seen, found.work, more_slots=more_slots, ahead_ms=AHEAD_MS)

    def _take(self, uusd: int, reason: str) -> None:
        """Reserve so much, or what there is of it; a job without a budget is given what it lacks."""
        job = self.purse.job
        free = ledger.standing(self.balances, Account.FUNDS, job)
        if self.purse.budget_uusd is None and free < uusd:
            total = uusd - free - ledger.standing(self.balances, Account.OUTSIDE, job)
            self.add(ledger.fund(self.balances, job, total=total, reason="the job has no budget: what it needs"))
            free = uusd
        self.add(ledger.reserve(self.balances, job, self.quote.id, uusd=min(uusd, free), reason=reason))

    def _used_up(self, lacks: int) -> str:
        budget = uusd_to_usd(self.purse.budget_uusd or 0)
        spent = uusd_to_usd(ledger.standing(self.balances, Account.SPENT, self.purse.job))
        return (
            f"{USED_UP}: budget.usd is {budget:g}, {spent:g} USD are spent, and {uusd_to_usd(lacks):.6f} USD are lacking for more work "
            "of this worker's"
        )
