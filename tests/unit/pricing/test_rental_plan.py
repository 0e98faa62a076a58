"""Rentals together: who is who in the list, what the budgets allow, what is opened and ended."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pricing.feeds.contract import Handle, RentalOffer, Shown
from pricing.rental_plan import (
    Facts,
    Purse,
    Wanted,
    afford,
    affordable,
    committed_uusd,
    decide,
    decide_blind,
    match,
    most_uusd,
    over_budget,
    usable,
)
from pricing.rentals import Limits, Rental, RentalState, called, ended, requested

LIMITS = Limits(blind_s=600.0, stop_s=1200.0, margin_percent=0, cool_s=900.0)
HOUR = 3_600_000  # uUSD/h: 1000 uUSD a second; a machine then binds 1,800,000 while it runs and 1,200,000 while it ends
RICH = Purse("vast", 10**12)


def offer(name: str, price: int = HOUR, machine: str | None = None) -> RentalOffer:
    return RentalOffer("vast", name, "RTX 4090", price, machine=f"m{name}" if machine is None else machine)


def rental(name: str, **changes: Any) -> Rental:
    """Running since 0, paid up to 0, its worker heard."""
    row = requested(offer(name, changes.pop("price", HOUR)), key=name, job_id="j", label=f"l-{name}", now=0.0)
    row = called(row, at=0.0, looked_at=0.0, invite_id="i")
    return replace(row, **{"state": RentalState.RUNNING, "instance_id": f"i-{name}", "worker_seen_at": 0.0, **changes})


def facts(*rentals: Rental, **changes: Any) -> Facts:
    return replace(Facts(rentals, RICH, at=0.0, now=0.0), **changes)


def test_machines_belong_to_the_row_that_knows_them_then_to_their_label() -> None:
    known, asked, other = rental("a"), rental("b", instance_id=None), rental("c")
    unsent = requested(offer("d"), key="d", job_id="j", label="l-d", now=0.0)
    handles = [Handle("i-a", "l-a", Shown.RUNNING), Handle("9", "l-b", Shown.STARTING), Handle("10", "l-d", Shown.RUNNING)]
    found = match([known, asked, other, unsent], [*handles, *handles])  # a page that repeats is read once
    assert {row: one.id for row, one in found.by_row.items()} == {"a": "i-a", "b": "9"}
    assert [one.id for one in found.strays] == ["10"]


def test_of_two_machines_with_one_label_the_other_is_a_stray() -> None:
    """The row keeps the one that it knows, else the older name; what is over (TERMINATED) counts as not shown."""
    twins = [Handle("12", "l-a", Shown.RUNNING), Handle("9", "l-a", Shown.RUNNING)]
    asked = match([rental("a", instance_id=None)], twins)
    assert (asked.by_row["a"].id, [one.id for one in asked.strays]) == ("9", ["12"])
    known = match([rental("a", instance_id="12")], twins)
    assert (known.by_row["a"].id, [one.id for one in known.strays]) == ("12", ["9"])
    assert match([rental("a")], [Handle("i-a", "l-a", Shown.GONE)]).by_row == {}


def test_a_gone_row_explains_its_machine_after_open_ones() -> None:
    gone = rental("a", state=RentalState.GONE, instance_id=None)
    found = match([gone, rental("b", instance_id=None, label="l-a")], [Handle("9", "l-a", Shown.RUNNING)])
    assert list(found.by_row) == ["b"]
    assert list(match([gone], [Handle("9", "l-a", Shown.RUNNING)]).by_row) == ["a"]


def test_what_a_rental_may_cost_in_the_end() -> None:
    """It ran 100 s and may run 600 s unseen and 1200 s until it is stopped."""
    running = rental("a")
    assert 1_900_000 <= most_uusd(running, LIMITS, at=100.0) <= 1_900_010
    assert 1_300_000 <= most_uusd(ended(running, "x: y", 0.0), LIMITS, at=100.0) <= 1_300_010
    assert most_uusd(replace(running, state=RentalState.GONE, cost_uusd=7), LIMITS, at=1e6) == 7
    assert 2_375_000 <= most_uusd(running, replace(LIMITS, margin_percent=25), at=100.0) <= 2_375_010  # unseen, it may have risen


def test_machines_end_while_stopping_them_still_fits_the_dearest_first() -> None:
    cheap, dear = rental("a", price=HOUR), rental("b", price=2 * HOUR)
    both = committed_uusd([cheap, dear], Purse("vast", 0), LIMITS, at=0.0)
    assert over_budget([cheap, dear], Purse("vast", both), LIMITS, at=0.0) == ()
    assert over_budget([cheap, dear], Purse("vast", both - 1), LIMITS, at=0.0) == (dear,)
    assert over_budget([cheap, dear], Purse("vast", 10), LIMITS, at=0.0) == (dear, cheap)
    unsent = replace(cheap, tries=0, paid_until=None)
    assert over_budget([unsent, dear], Purse("vast", both - 1_200_000), LIMITS, at=0.0) == (dear,)
    assert over_budget([unsent], Purse("vast", 1_000), LIMITS, at=0.0) == (unsent,)


@given(
    st.lists(st.tuples(st.integers(1, 10 * HOUR), st.floats(0, 3000)), max_size=8),
    st.integers(0, 10**8),
    st.floats(0, 600),
)
def test_if_the_budget_holds_at_one_turn_it_can_be_held_at_the_next(
    some: list[tuple[int, float]], limit: int, gap_s: float
) -> None:
    """The promise: with turns no more than blind_s apart, a decision to end always comes in time."""
    rows = [rental(str(n), price=price, paid_until=-age) for n, (price, age) in enumerate(some)]
    purse = Purse("vast", limit)
    if committed_uusd(rows, purse, LIMITS, at=0.0) > limit:
        return
    let_go = over_budget(rows, purse, LIMITS, at=gap_s)
    after = [ended(row, "budget: x", gap_s) if row in let_go else row for row in rows]
    rounding = sum(2 + 3 * row.price // HOUR for row in rows)  # each span is rounded up to a millisecond and a micro-dollar
    assert committed_uusd(after, purse, LIMITS, at=gap_s) <= limit + rounding


def test_a_machine_is_opened_only_inside_the_purse() -> None:
    assert afford(offer("a"), [], Purse("vast", 1_800_010), LIMITS, at=0.0) is None
    words = afford(offer("a"), [], Purse("vast", 1_799_999), LIMITS, at=0.0)
    assert words is not None
    assert words.startswith("vast: 1799999 uUSD are allowed, 0 are spent or bound")


def test_offers_that_the_providers_purse_does_not_bear_are_not_shown() -> None:
    purse = Purse("vast", 3_700_000)
    assert affordable([offer("a"), offer("b", 2 * HOUR)], facts(provider_purse=purse), LIMITS) == (offer("a"), offer("b", 2 * HOUR))
    assert affordable([offer("a"), offer("b", 2 * HOUR)], facts(rental("z"), provider_purse=purse), LIMITS) == (offer("a"),)


def test_what_is_missing_is_opened_in_the_wishs_order_and_never_one_machine_twice() -> None:
    wish = Wanted("j", 3, (offer("a"), offer("b"), offer("c")))
    turn = decide(facts(rental("a"), wishes={"j": wish}), LIMITS)
    assert [(job, one.id) for job, one in turn.opened] == [("j", "b"), ("j", "c")]
    assert turn.rows == ()
    short = decide(facts(rental("a"), wishes={"j": replace(wish, count=5)}), LIMITS)
    assert short.notes == ("job j: 2 of 5 machines cannot be had now",)
    pool = Wanted("j", 3, (offer("x", machine=""),))  # a card of a pool is not one machine
    assert [one.id for _, one in decide(facts(wishes={"j": pool}), LIMITS).opened] == ["x", "x", "x"]
    assert decide(facts(wishes={"j": replace(wish, count=1)}), LIMITS).opened == (("j", offer("a")),)


def test_an_offer_that_failed_lately_is_left_alone_and_one_that_was_not_needed_is_not() -> None:
    def gone(why: str, at: float) -> Rental:
        return rental("a", state=RentalState.GONE, ending=why, ending_since=at)

    wish = {"j": Wanted("j", 1, (offer("a"),))}
    assert decide(facts(recent=(gone("slow_start: x", 0.0),), wishes=wish, now=899.0), LIMITS).opened == ()
    assert decide(facts(recent=(gone("slow_start: x", 0.0),), wishes=wish, now=900.0), LIMITS).opened != ()
    assert decide(facts(recent=(gone("unwanted: x", 0.0),), wishes=wish, now=10.0), LIMITS).opened != ()
    assert decide(facts(recent=(gone("no_balance: x", 0.0),), wishes=wish, now=10.0), LIMITS).opened != ()


def test_a_machine_that_failed_is_not_rented_under_another_offer() -> None:
    failed = rental("a", state=RentalState.GONE, ending="slow_start: x", ending_since=0.0)
    again, other = offer("b", machine="ma"), offer("c")
    assert usable([again, other], [failed], 10.0, LIMITS) == [other]
    of_a_pool = replace(failed, machine="")  # a card of a pool says nothing of the pool's other cards
    assert usable([offer("x", machine="")], [of_a_pool], 10.0, LIMITS) == [offer("x", machine="")]


def test_an_old_offer_says_nothing_of_todays_price() -> None:
    """It was found at 0."""
    assert usable([offer("a")], [], LIMITS.offer_s, LIMITS) == [offer("a")]
    assert usable([offer("a")], [], LIMITS.offer_s + 1.0, LIMITS) == []


def test_too_many_machines_end_those_that_do_least_first() -> None:
    starting = rental("s", state=RentalState.STARTING)
    asked = rental("r", state=RentalState.REQUESTED, instance_id=None)
    dear = rental("d", price=2 * HOUR)
    rows = (rental("a"), starting, asked, dear)
    for count, left in ((3, {"a", "d", "s"}), (2, {"a", "d"}), (1, {"a"}), (0, set())):
        turn = decide(facts(*rows, wishes={"j": Wanted("j", count)}), LIMITS)
        assert {row.id for row in rows} - {row.id for row in turn.rows} == left
        assert all(row.ending == "unwanted: its job needs it no more" for row in turn.rows)
    assert decide(facts(*rows), LIMITS).rows == ()  # nobody has said anything yet


def test_what_is_overdue_ends_for_that_reason_and_is_replaced() -> None:
    paused = rental("p", state=RentalState.PAUSED)
    turn = decide(facts(paused, wishes={"j": Wanted("j", 1, (offer("p"), offer("n")))}), LIMITS)
    assert turn.rows[0].ending.startswith("paused: ")
    assert turn.opened == (("j", offer("n")),)


def test_both_purses_must_bear_a_machine() -> None:
    """What a turn opens counts at once."""
    wish = {"j": Wanted("j", 2, (offer("a"), offer("b")))}
    job_purse = {"j": Purse("j", 2_000_000)}
    turn = decide(facts(wishes=wish, purses=job_purse), LIMITS)
    assert [one.id for _, one in turn.opened] == ["a"]
    assert turn.notes[0].startswith("job j: 1 of 2 machines cannot be had now; j: 2000000 uUSD are allowed")
    of_another = rental("z", job_id="k")
    assert len(decide(facts(of_another, wishes=wish, purses=job_purse), LIMITS).opened) == 1
    assert decide(facts(wishes=wish, provider_purse=Purse("vast", 10)), LIMITS).opened == ()


def test_without_a_look_only_money_ends_machines() -> None:
    late = rental("a", state=RentalState.PAUSED)
    assert decide_blind(facts(late), LIMITS).rows == ()
    turn = decide_blind(facts(late, purses={"j": Purse("j", 1_000)}), LIMITS)
    assert turn.rows[0].ending == "budget: j would be passed before it could be stopped"
    assert turn.opened == ()
