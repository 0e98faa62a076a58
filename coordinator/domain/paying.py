"""What a worker is owed under its quote, how much of it must be reserved, and how much more may be leased to it (pure, law 7).

Money is reserved for the most that may be owed before the next look: every slot that may still be paid at its longest, and active
time up to `covered_until`. A lease goes out only within that, so what is owed can never pass what was reserved.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from coordinator.domain.model import Lease, LeaseState, Meter, QuoteRow
from pricing.quotes import TOKENS, Quote

MOST_WANTED = 1 << 16  # slots made leasable by one look
PAYABLE_ENDS = frozenset({LeaseState.DEAD, LeaseState.CANCELLED})
"""The coordinator ended them: work that comes before their wall deadline is refused and paid."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What is owed for under a quote: tokens (accepted, or refused and paid), paid time, and slots that may still come."""

    tokens: int
    paid_ms: int
    open_slots: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a job's slots may cost and how many are asked for at once."""

    max_new_tokens: int
    group_size: int
    max_slots: int  # of the worker


@dataclass(frozen=True, slots=True)
class Held:
    """What else bears on the time of a quote.

    Attributes:
        leases: of its worker, under whichever quote of the job, that touch the time since the last look.
        by_token: ids of the quotes among theirs that pay by the token.
        followed_at: when another quote of the worker's was opened, which pays its time from then on.
    """

    leases: tuple[Lease, ...] = ()
    by_token: frozenset[str] = frozenset()
    followed_at: float = math.inf


def owed_uusd(quote: QuoteRow, *, tokens: int, paid_ms: int) -> int:
    """Micro-USD in all, rounded down once. Grows with both."""
    rate = quote.uusd_per_million_tokens or 0
    terms = Quote(quote.worker_id, rate, quote.uusd_per_idle_hour, quote.made_at, quote.expires_at)
    return terms.owed_uusd(tokens=tokens, idle_s=paid_ms / 1000)


def most_uusd(quote: QuoteRow, seen: Measured, work: Work, *, more_slots: int, ahead_ms: int) -> int:
    """The most that may be owed in all, when `more_slots` are leased besides and all of `ahead_ms` is paid."""
    tokens = seen.tokens + (seen.open_slots + more_slots) * work.max_new_tokens
    return owed_uusd(quote, tokens=tokens, paid_ms=seen.paid_ms + ahead_ms)


def leasable(quote: QuoteRow, seen: Measured, work: Work, *, cover_uusd: int, ahead_ms: int) -> int | None:
    """The most slots that may be leased besides, when `cover_uusd` is posted or reserved; None: slots cost nothing."""
    rate = quote.uusd_per_million_tokens
    if not rate:
        return None
    left = cover_uusd - owed_uusd(quote, tokens=0, paid_ms=seen.paid_ms + ahead_ms)
    tokens = ((left + 1) * TOKENS - 1) // rate  # the most whose price, rounded down, is `left`
    return max((tokens - seen.tokens) // work.max_new_tokens - seen.open_slots, 0)


def wanted_slots(meter: Meter | None, work: Work) -> int:
    """Slots to make leasable for the time until the next look: two rounds, or three times what the last time took."""
    used = 0 if meter is None or meter.leasable is None else meter.wanted - meter.leasable
    return min(max(2 * work.max_slots, 3 * used, work.group_size), MOST_WANTED)


def can_lease(meter: Meter, *, slots: int, now: float) -> str:
    """Why `slots` more may not be leased under the meter's quote now; empty when they may."""
    if now >= meter.covered_until:
        return "no money is reserved for your time now: the coordinator reserves anew in a moment"
    if meter.leasable is not None and meter.leasable < slots:
        return f"the job's money is reserved for {meter.leasable} more completions of yours, {slots} were to be leased"
    return ""


def leased(meter: Meter, slots: int) -> Meter:
    """The meter after `slots` were leased under it."""
    return meter if meter.leasable is None else replace(meter, leasable=meter.leasable - slots)


def new_ms(quote: QuoteRow, meter: Meter, held: Held, *, now: float, waits: bool) -> int:
    """Milliseconds since the last look that are paid by time: none that was not reserved, and none that another quote pays.

    Work under way when a quote without a rate ends is paid on, unless another quote follows: nobody pays its tokens.
    """
    start, last = meter.looked_at, min(now, meter.covered_until)
    ended_at = last if quote.ended_at is None else min(last, quote.ended_at)
    while_open = paid_ms(quote, held.leases, start=start, end=ended_at, waits=waits, by_token=held.by_token)
    if quote.uusd_per_million_tokens is not None:
        return while_open
    own = [lease for lease in held.leases if lease.quote_id == quote.id or lease.quote_id in held.by_token]
    start, end = max(start, ended_at), min(last, held.followed_at)
    return while_open + paid_ms(quote, own, start=start, end=end, waits=False, by_token=held.by_token)


def paid_ms(quote: QuoteRow, leases: Iterable[Lease], *, start: float, end: float, waits: bool, by_token: frozenset[str]) -> int:
    """Milliseconds from `start` to `end` that are paid by time under the quote: those in which nothing of the worker's is paid by the token.

    With a lease they are paid whichever quote it was issued under, so nothing is lost when one quote follows another; without one
    while the worker waits for work. Both ends are cut to whole milliseconds, so that looks one after the other neither miss nor
    repeat any. `leases`: the worker's, under whichever quote of the job; `by_token`: ids of the quotes that pay by the token.
    """
    first, last = _ms(start), _ms(end)
    if last <= first or quote.role != "active":
        return 0
    every = list(leases)
    busy, rated = (_covered(_spans(some, last), first, last) for some in (every, [x for x in every if x.quote_id in by_token]))
    return busy - rated + (last - first - busy if waits else 0)


def _spans(leases: Iterable[Lease], last: int) -> list[tuple[int, int]]:
    return [(_ms(one.issued_at), last if one.closed_at is None else _ms(one.closed_at)) for one in leases]


def _ms(at: float) -> int:
    return int(at * 1000)


def _covered(spans: Iterable[tuple[int, int]], first: int, last: int) -> int:
    """Length of the union of the spans within [first, last]."""
    total, reached = 0, first
    for begin, end in sorted(spans):
        stop = min(end, last)
        total += max(stop - max(begin, reached), 0)
        reached = max(reached, stop)
    return total


def may_be_paid(lease: Lease, *, now: float) -> bool:
    """Whether slots of the lease that are not settled may still be owed for."""
    return lease.state is LeaseState.LIVE or (lease.state in PAYABLE_ENDS and now <= lease.deadline)
