"""Pay under a quote: what is owed, reserved and leasable, by hand; and one look at a quote."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from coordinator.domain import accounting, paying
from coordinator.domain.accounting import Found, Inconsistent, Purse
from coordinator.domain.model import Lease, LeaseState, Meter, QuoteRow
from coordinator.domain.paying import Held, Measured, Work
from pricing import ledger
from pricing.ledger import Balance, Entry

QUOTE = QuoteRow("q", "j", "w", 1, "active", 2_000_000, 3_600_000, 100.0, 1e9, "cheap")  # 2 uUSD a token, 1 uUSD a millisecond
WORK = Work(max_new_tokens=10, group_size=4, max_slots=4)
METER = Meter("q", "j", "w", 100.0, 100.0, 0, 0, 0, 0, 100.0, 160.0, wanted=8, leasable=8)
FREE = replace(QUOTE, uusd_per_idle_hour=0)


def lease(issued: float, closed: float | None = None, state: LeaseState = LeaseState.LIVE, deadline: float = 500.0) -> Lease:
    return Lease("l", "j", "g", "w", 1, (0,), 0, "d", 3, deadline, 1, state, issued, "", closed, "q")


def found(at: float = 111.0, *, tokens: int = 0, paid_ms: int = 0, open_slots: int = 0, meter: Meter | None = METER) -> Found:
    looked, left = (None, None) if meter is None else (meter.looked_at, meter.leasable)
    return Found("q", "w", at, looked, left, at, 0, Measured(tokens, paid_ms, open_slots), WORK)


def funded(uusd: int, reserved: int = 0) -> dict[str, Balance]:
    books: dict[str, Balance] = {}
    for made in (
        lambda: ledger.fund(books, "j", total=uusd, reason="budget"),
        lambda: ledger.reserve(books, "j", "q", uusd=reserved, reason="slots"),
    ):
        entry = made()
        if isinstance(entry, Entry):
            change = ledger.posted(books, entry)
            assert isinstance(change, dict)
            books.update(change)
    return books


def test_what_is_owed_is_rounded_down_once_a_part():
    quote = replace(QUOTE, uusd_per_million_tokens=1_500_000, uusd_per_idle_hour=1_800_000)
    assert paying.owed_uusd(quote, tokens=3, paid_ms=3) == 4 + 1
    assert paying.owed_uusd(replace(quote, uusd_per_million_tokens=None), tokens=3, paid_ms=3) == 1


def test_what_may_be_leased_is_what_the_cover_pays_at_its_longest():
    seen = Measured(tokens=7, paid_ms=0, open_slots=2)
    for cover, slots in ((14 + 2 * 20 - 1, 0), (14 + 2 * 20, 0), (14 + 3 * 20 - 1, 0), (14 + 3 * 20, 1), (14 + 9 * 20 + 19, 7)):
        assert paying.leasable(FREE, seen, WORK, cover_uusd=cover, ahead_ms=0) == slots
        assert paying.most_uusd(FREE, seen, WORK, more_slots=slots, ahead_ms=0) <= max(cover, 54)
    assert paying.leasable(replace(FREE, uusd_per_million_tokens=0), seen, WORK, cover_uusd=0, ahead_ms=0) is None
    assert paying.leasable(replace(FREE, uusd_per_million_tokens=None), seen, WORK, cover_uusd=0, ahead_ms=0) is None


def test_no_lease_beyond_what_is_reserved():
    assert paying.can_lease(METER, slots=8, now=159.9) == ""
    assert "for 8 more completions of yours, 9 were to be leased" in paying.can_lease(METER, slots=9, now=159.9)
    assert "no money is reserved for your time" in paying.can_lease(METER, slots=1, now=160.0)
    unbounded = replace(METER, leasable=None)
    assert paying.can_lease(unbounded, slots=10**6, now=159.9) == ""
    assert paying.leased(unbounded, 5) is unbounded
    assert paying.leased(METER, 5).leasable == 3


def test_more_is_wanted_after_a_busy_time():
    assert paying.wanted_slots(None, WORK) == 8
    assert paying.wanted_slots(replace(METER, leasable=None), WORK) == 8
    assert paying.wanted_slots(replace(METER, wanted=100, leasable=10), WORK) == 270
    assert paying.wanted_slots(None, replace(WORK, max_slots=1)) == 4
    assert paying.wanted_slots(replace(METER, wanted=10**6, leasable=0), WORK) == paying.MOST_WANTED


@pytest.mark.parametrize(
    ("leases", "waits", "by_rate", "by_time"),
    [
        ((), False, 0, 0),
        ((), True, 10_000, 10_000),
        ((lease(99.0, 102.5), lease(102.0, 104.0), lease(109.0)), True, 5_000, 10_000),
        ((lease(99.0, 102.5), lease(102.0, 104.0), lease(109.0)), False, 0, 5_000),
        ((lease(50.0, 90.0), lease(200.0, 210.0)), True, 10_000, 10_000),
    ],
)
def test_paid_time_is_waiting_or_working(leases: tuple[Lease, ...], waits: bool, by_rate: int, by_time: int):
    """10 s, of which a union of leases covers 4 s and the last second."""
    ours = {"start": 100.0, "end": 110.0, "waits": waits, "by_token": frozenset({"q"})}
    assert paying.paid_ms(QUOTE, leases, **ours) == by_rate
    untimed = replace(QUOTE, uusd_per_million_tokens=None)
    timed = ours | {"by_token": frozenset()}
    assert paying.paid_ms(untimed, leases, **timed) == by_time
    assert paying.paid_ms(replace(QUOTE, role="spare"), leases, **ours) == 0
    assert paying.paid_ms(untimed, leases, **timed | {"start": 110.0, "end": 100.0}) == 0


def test_work_left_from_the_quote_before_is_paid_once():
    """10 s. A lease of a quote by time over the first 6 s, one of a quote by the token from second 4 to 8."""
    before = (replace(lease(99.0, 106.0), quote_id="timed"), replace(lease(104.0, 108.0), quote_id="rated"))
    for waits, paid in ((False, 4_000), (True, 4_000 + 2_000)):
        by_token = frozenset({"q", "rated"})
        assert paying.paid_ms(QUOTE, before, start=100.0, end=110.0, waits=waits, by_token=by_token) == paid
        untimed = replace(QUOTE, uusd_per_million_tokens=None)
        assert paying.paid_ms(untimed, before, start=100.0, end=110.0, waits=waits, by_token=frozenset({"rated"})) == paid


def test_what_a_quote_that_ended_pays_on():
    """Without a rate its own work, until what is reserved or another quote begins; but for time that work by the token pays."""
    over = replace(QUOTE, uusd_per_million_tokens=None, ended_at=110.0)
    own, rated = lease(101.0, None), replace(lease(99.0, 125.0), quote_id="rated")
    other = replace(lease(99.0, None), quote_id="timed")

    def paid(quote: QuoteRow, *leases: Lease, **more: float) -> int:
        held = Held(leases, frozenset({"rated"}), more.get("followed_at", math.inf))
        return paying.new_ms(quote, METER, held, now=more.get("now", 130.0), waits=False)

    assert paid(over, own) == 9_000 + 20_000
    assert paid(over, own, now=300.0) == 9_000 + 50_000
    assert paid(over, own, followed_at=115.0) == 9_000 + 5_000
    assert paid(over, own, rated) == 5_000
    assert paid(over, other) == 10_000
    assert paid(replace(over, uusd_per_million_tokens=1), own) == 9_000


def test_parts_of_a_millisecond_add_up_over_many_looks():
    times = [100.0 + n * 0.0007 for n in range(10_001)]

    def paid(start: float, end: float) -> int:
        return paying.paid_ms(QUOTE, (), start=start, end=end, waits=True, by_token=frozenset())

    assert sum(paid(a, b) for a, b in pairwise(times)) == paid(times[0], times[-1]) == 7_000


def test_what_may_still_be_paid_of_a_lease():
    assert paying.may_be_paid(lease(1.0), now=10_000.0)
    for state in (LeaseState.DEAD, LeaseState.CANCELLED):
        assert paying.may_be_paid(lease(1.0, 2.0, state), now=500.0)
        assert not paying.may_be_paid(lease(1.0, 2.0, state), now=500.1)
    for state in (LeaseState.DONE, LeaseState.EXPIRED, LeaseState.ABANDONED):
        assert not paying.may_be_paid(lease(1.0, 2.0, state), now=3.0)


def test_the_first_look_reserves_two_rounds():
    looked = accounting.look(Purse("j", 1000), FREE, None, found(meter=None), funded(1000))
    assert [(entry.kind, entry.moves[1].uusd) for entry in looked.entries] == [("reserve", 160)]
    assert (looked.meter.wanted, looked.meter.leasable, looked.meter.covered_until) == (8, 8, 171.0)
    assert looked.meter.closed_at is None


def test_slots_leased_while_it_was_measured_are_counted():
    """8 slots are covered, 3 went out after the measuring: 5 are left, not 8."""
    now = replace(METER, leasable=5)
    looked = accounting.look(Purse("j", 160), FREE, now, found(), funded(160, reserved=160))
    assert looked.meter.leasable == 5
    assert accounting.leased_since(found(), None) == found()
    assert accounting.leased_since(found(), replace(METER, leasable=None)) == found()


def test_settling_waits_a_little_and_never_for_the_end():
    books = funded(1000, reserved=160)
    early = accounting.look(Purse("j", 1000), FREE, METER, found(105.0, tokens=5), books)
    assert (early.meter.posted_uusd, early.meter.tokens) == (0, 5)
    later = accounting.look(Purse("j", 1000), FREE, METER, found(110.0, tokens=5), books)
    assert (later.meter.posted_uusd, later.meter.posted_at) == (10, 110.0)
    over = replace(FREE, ended_at=104.0, ended_because="dear")
    last = accounting.look(Purse("j", 1000), over, METER, found(105.0, tokens=5), books)
    assert [(entry.kind, entry.reason) for entry in last.entries] == [
        ("settle", "5 tokens, 0.000 s in all"),
        ("release", "the quote ended: dear"),
    ]
    assert (last.meter.posted_uusd, last.meter.closed_at, last.meter.leasable) == (10, 105.0, 0)


def test_an_ended_quote_keeps_what_is_under_way_reserved():
    over = replace(FREE, ended_at=104.0, ended_because="dear")
    looked = accounting.look(Purse("j", 1000), over, METER, found(105.0, tokens=5, open_slots=2), funded(1000, reserved=160))
    assert looked.entries[-1].moves[0].uusd == -(160 - 10 - 40)
    assert looked.meter.closed_at is None


def test_a_quote_that_ended_while_it_was_measured_is_finished_by_the_next_look():
    over = replace(FREE, ended_at=105.5, ended_because="dear")
    looked = accounting.look(Purse("j", 1000), over, METER, found(105.0, tokens=5), funded(1000, reserved=160))
    assert [entry.kind for entry in looked.entries] == ["settle"]
    assert (looked.meter.closed_at, looked.meter.covered_until) == (None, 160.0)
    fresh = accounting.look(Purse("j", 1000), over, None, found(105.0, meter=None), funded(1000))
    assert (fresh.entries, fresh.meter.covered_until) == ((), 105.0)


def test_a_quote_ends_when_the_budget_pays_no_further_group():
    """40 uUSD are 2 slots, a group is 4."""
    looked = accounting.look(Purse("j", 40), FREE, None, found(meter=None), funded(40))
    assert looked.ended_because.startswith("budget_used_up: budget.usd is 4e-05, 0 USD are spent, and 0.000040 USD are lacking")
    assert (looked.meter.leasable, looked.meter.covered_until) == (0, 111.0)
    assert [entry.kind for entry in looked.entries] == ["reserve", "release"]
    waiting = accounting.look(Purse("j", 40), FREE, METER, found(open_slots=1), funded(40, reserved=20))
    assert (waiting.ended_because, waiting.meter.leasable) == ("", 1), "work under way may come out shorter"


def test_a_quote_ends_when_its_time_cannot_be_covered():
    looked = accounting.look(Purse("j", 59_999), QUOTE, None, found(meter=None), funded(59_999))
    assert "budget_used_up" in looked.ended_because
    assert "0.000001 USD are lacking" in looked.ended_because


def test_time_of_work_under_way_stays_reserved_when_a_quote_without_a_rate_ends():
    """1 uUSD a millisecond; reserved until 160.0, the end is seen at 111.0."""
    over = replace(QUOTE, uusd_per_million_tokens=None, ended_at=110.0, ended_because="another does it for less")
    looked = accounting.look(
        Purse("j", 100_000), over, METER, found(paid_ms=10_000, open_slots=1), funded(100_000, reserved=60_000)
    )
    assert [(entry.kind, entry.moves[0].uusd) for entry in looked.entries] == [("settle", -10_000), ("release", -1_000)]
    assert (looked.meter.covered_until, looked.meter.closed_at) == (160.0, None)
    done = accounting.look(Purse("j", 100_000), over, METER, found(paid_ms=10_000), funded(100_000, reserved=60_000))
    assert [(entry.kind, entry.moves[0].uusd) for entry in done.entries] == [("settle", -10_000), ("release", -50_000)]
    assert done.meter.closed_at == 111.0


def test_a_job_without_a_budget_is_given_what_it_needs():
    looked = accounting.look(Purse("j", None), FREE, None, found(meter=None), {})
    assert [entry.kind for entry in looked.entries] == ["fund", "reserve"]
    assert looked.meter.leasable is None
    much = accounting.look(Purse("j", None), FREE, METER, found(tokens=500), funded(160, reserved=160))
    assert [entry.kind for entry in much.entries][:3] == ["fund", "reserve", "settle"]
    assert much.meter.posted_uusd == 1000


def test_too_large_a_reservation_is_given_back():
    looked = accounting.look(Purse("j", 1000), FREE, METER, found(), funded(1000, reserved=900))
    (entry,) = looked.entries
    assert (entry.kind, entry.moves[0].uusd) == ("release", 160 - 900)


def test_who_looked_last_is_known():
    assert accounting.is_current(found(meter=None), None)
    assert not accounting.is_current(found(meter=None), METER)
    assert not accounting.is_current(found(), None)
    assert accounting.is_current(found(), METER)
    assert not accounting.is_current(found(), replace(METER, looked_at=101.0))
    assert not accounting.is_current(found(), replace(METER, closed_at=105.0))


def test_rows_that_disagree_post_nothing():
    """Owed for more than could have been leased."""
    with pytest.raises(Inconsistent, match="200 uUSD are due for q and 160 are reserved"):
        accounting.look(Purse("j", 1000), FREE, METER, found(tokens=100), funded(1000, reserved=160))


def test_a_quote_that_ends_for_want_of_money_pays_no_time_beyond_the_look():
    """1 uUSD a millisecond: 11,000 are owed, 60,000 more would have to be reserved, and 49,100 are left."""
    looked = accounting.look(Purse("j", 60_100), QUOTE, METER, found(paid_ms=11_000), funded(60_100, reserved=60_000))
    assert "budget_used_up" in looked.ended_because
    assert [(entry.kind, entry.moves[0].uusd) for entry in looked.entries][-1] == ("release", -49_100)
    assert looked.meter.covered_until == 111.0


def test_one_worker_that_is_too_dear_does_not_use_a_budget_up():
    purse, fresh = Purse("j", 1_000), replace(METER, posted_uusd=0)
    assert not accounting.is_dry(purse, fresh, free=100)
    assert accounting.is_dry(purse, fresh, free=99)
    assert accounting.is_dry(purse, replace(METER, posted_uusd=1), free=900), "it was paid, and its money ran out"
    assert not accounting.is_dry(Purse("j", None), fresh, free=0)
