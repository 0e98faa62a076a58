"""The life of a rental: what looks, replies and time make of it, and what it costs by the provider's clock."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pricing.feeds.contract import Failed, Handle, RentalOffer, Shown, Trouble
from pricing.rentals import (
    TABLE,
    TIMERS,
    Create,
    Destroy,
    Limits,
    Rental,
    RentalState,
    absorb,
    accrued,
    answered,
    called,
    ended,
    move,
    order,
    overdue,
    projected,
    requested,
    span_uusd,
    stray,
)

LIMITS = Limits(appear_s=100.0, gone_looks=3, start_s=600.0, join_s=300.0, silent_s=200.0, unknown_s=150.0)
OFFER = RentalOffer("vast", "77", "RTX 4090", 3_600_000, machine="9")  # 1000 uUSD a second


def fresh() -> Rental:
    return requested(OFFER, key="k", job_id="j", label="echo2-x-k", now=0.0)


def sent(**changes: Any) -> Rental:
    """A create was sent at 10 by both clocks; the list before it was seen at 9."""
    return replace(called(fresh(), at=10.0, looked_at=9.0, invite_id="i"), **changes)


def handle(state: Shown = Shown.RUNNING, **changes: Any) -> Handle:
    return replace(Handle("5", "echo2-x-k", state), **changes)


def look(rental: Rental, seen: Handle | None, at: float) -> Rental:
    return absorb(rental, seen, at=at, now=at, limits=LIMITS)


def test_every_state_has_a_row_and_every_open_one_a_timer_and_a_way_out() -> None:
    """Law 5."""
    assert set(TABLE) == set(RentalState)
    assert set(TIMERS) == set(RentalState) - {RentalState.GONE}
    assert all("absent" in TABLE[state] for state in TIMERS)
    with pytest.raises(KeyError):
        move(sent(state=RentalState.GONE), "seen_running", "", 0.0)


def test_a_wish_is_sent_once_and_not_again_before_it_was_looked_for() -> None:
    assert order(fresh(), at=0.0, limits=LIMITS) == Create(fresh())
    rental = sent()
    for at in (20.0, 60.0, 111.0):
        assert order(rental, at=at, limits=LIMITS) is None
        rental = look(rental, None, at)
    assert rental.state is RentalState.REQUESTED
    assert isinstance(order(rental, at=111.0, limits=LIMITS), Create)  # three looks, 101 s
    assert order(replace(rental, absent_looks=2), at=111.0, limits=LIMITS) is None
    assert order(rental, at=109.0, limits=LIMITS) is None


def test_after_enough_tries_it_is_given_up_and_cost_nothing() -> None:
    rental = sent(tries=3, absent_looks=2, reason="unknown: lost")
    gone = look(rental, None, 200.0)
    assert (gone.state, gone.cost_uusd) == (RentalState.GONE, 0)
    assert gone.ending == "not_created: 3 creates brought no machine; the last: unknown: lost"
    assert order(gone, at=200.0, limits=LIMITS) is None


def test_what_was_made_although_the_reply_was_lost_is_found_by_its_label() -> None:
    seen = look(answered(sent(), Failed(Trouble.UNKNOWN, "no answer"), now=40.0), handle(Shown.STARTING), 50.0)
    assert (seen.state, seen.instance_id, seen.tries) == (RentalState.STARTING, "5", 1)
    assert order(seen, at=50.0, limits=LIMITS) is None


def test_replies_to_a_create() -> None:
    """A refusal ends the wish, and the machine is looked for all the same; a lost reply leaves it open."""
    made = answered(sent(), handle(Shown.STARTING), now=11.0)
    assert (made.state, made.instance_id) == (RentalState.STARTING, "5")
    for trouble in (Trouble.RETRY_AFTER, Trouble.UNKNOWN, Trouble.MALFORMED):
        assert answered(sent(), Failed(trouble, "w"), now=11.0).is_wanted
        assert not answered(sent(), Failed(trouble, "w", instance_id="5"), now=11.0).is_wanted
    for trouble in (Trouble.GONE, Trouble.NO_CAPACITY, Trouble.NO_BALANCE, Trouble.REFUSED):
        refused = answered(sent(), Failed(trouble, "w"), now=11.0)
        assert (refused.is_open, refused.ending) == (True, f"{trouble.value}: w")
        assert order(refused, at=11.0, limits=LIMITS) is None  # nothing to destroy is known yet
        found = look(refused, handle(Shown.PAUSED), 30.0)
        assert order(found, at=30.0, limits=LIMITS) == Destroy(found, "5")


def test_an_end_is_ordered_until_looks_do_not_show_it() -> None:
    rental = ended(look(sent(), handle(), 20.0), "unwanted: x", 20.0)
    for at in (20.0, 50.0, 80.0):
        assert order(rental, at=at, limits=LIMITS) == Destroy(rental, "5")
        rental = replace(look(rental, handle(), at), destroys=rental.destroys + 1)
    for at in (110.0, 140.0):
        rental = look(rental, None, at)
        assert (rental.state, order(rental, at=at, limits=LIMITS)) == (RentalState.UNKNOWN, None)
    rental = look(rental, None, 170.0)
    assert (rental.state, rental.reason) == (RentalState.GONE, "unwanted: x")
    assert look(rental, None, 200.0) == rental


def test_a_destroy_is_sent_at_least_once_even_if_the_list_never_showed_it() -> None:
    rental = ended(answered(sent(), handle(Shown.STARTING), now=11.0), "budget: x", 12.0)
    hidden = look(rental, None, 20.0)
    assert isinstance(order(hidden, at=20.0, limits=LIMITS), Destroy)
    assert order(replace(hidden, destroys=1), at=20.0, limits=LIMITS) is None


def test_a_machine_that_vanishes_is_gone_after_several_looks_and_costs_until_the_first() -> None:
    """3.6 USD/h are 1000 uUSD a second: from 9 (the look before the create) to 40."""
    rental = look(sent(), handle(), 20.0)
    for at in (40.0, 70.0, 120.0):
        rental = look(rental, None, at)
    assert (rental.state, rental.ending) == (RentalState.GONE, "vanished: the provider lists it no more")
    assert rental.cost_uusd == pytest.approx(31_000, abs=3)


def test_what_is_shown_again_costs_for_the_time_between_too() -> None:
    rental = look(look(sent(), handle(), 20.0), None, 40.0)
    again = look(rental, handle(), 60.0)
    assert (again.state, again.absent_looks) == (RentalState.RUNNING, 0)
    assert again.cost_uusd == pytest.approx(51_000, abs=3)


def test_what_is_shown_after_it_was_gone_is_opened_again_and_ends() -> None:
    rental = look(sent(), handle(), 20.0)
    for at in (40.0, 70.0, 120.0):
        rental = look(rental, None, at)
    back = look(rental, handle(), 500.0)
    assert (back.is_open, back.ending, back.destroys) == (True, "orphan: shown again after it was gone", 0)
    assert isinstance(order(back, at=500.0, limits=LIMITS), Destroy)
    assert back.cost_uusd == pytest.approx(491_000, abs=3)


def test_a_machine_that_appears_late_costs_from_its_start() -> None:
    """No sign until it was given up; then it is there, since 12 by the provider's word."""
    rental = ended(sent(), "no_capacity: x", 11.0)
    for at in (40.0, 70.0, 120.0):
        rental = look(rental, None, at)
    late = look(rental, handle(started_at=12.0), 130.0)
    assert not late.is_wanted
    assert late.cost_uusd == pytest.approx(118_000, abs=3)


def test_the_bill_starts_when_the_provider_says_if_that_can_be() -> None:
    assert look(sent(), handle(started_at=15.0), 20.0).cost_uusd == pytest.approx(5_000, abs=2)
    for impossible in (3.0, 900.0, None):
        assert look(sent(), handle(started_at=impossible), 20.0).cost_uusd == pytest.approx(11_000, abs=2)


def test_the_higher_price_counts_the_agreed_or_the_shown() -> None:
    """A rise seen at 30 counts from the look before; a machine that shows 0 while stopped costs what was agreed."""
    rental = look(look(sent(), handle(uusd_per_hour=3_600_000), 20.0), handle(uusd_per_hour=7_200_000), 30.0)
    assert rental.cost_uusd == pytest.approx(11_000 + 20_000, abs=3)
    stopped = look(rental, handle(Shown.PAUSED, uusd_per_hour=0), 40.0)
    assert stopped.cost_uusd == pytest.approx(51_000, abs=8)  # the rise still counted for the time before
    assert stopped.price == 3_600_000


def test_a_clock_that_steps_back_adds_nothing_and_takes_nothing() -> None:
    rental = look(sent(), handle(), 20.0)
    back = look(rental, handle(), 15.0)
    assert (back.cost_uusd, back.paid_until) == (rental.cost_uusd, rental.paid_until)
    assert projected(fresh(), at=1e9) == 0
    assert accrued(fresh(), at=5.0) == fresh()


@given(st.integers(0, 10**9), st.floats(0, 1e6), st.floats(0, 1e6))
def test_spans_cover_what_they_are_for(price: int, one: float, other: float) -> None:
    """Rounded up, never less than the exact product, and parts never less than the whole."""
    assert span_uusd(price, one) >= price * one / 3600 - 1e-6 * price
    assert span_uusd(price, one) + span_uusd(price, other) >= span_uusd(price, one + other) - price * 2 // 3_600_000 - 2
    assert span_uusd(price, -one) == 0 or one == 0


@pytest.mark.parametrize(
    ("changes", "at", "code"),
    [
        ({"state": RentalState.REQUESTED, "tries": 0}, 901.0, "not_sent"),
        ({"state": RentalState.STARTING}, 601.0, "slow_start"),
        ({"state": RentalState.RUNNING}, 301.0, "no_worker"),
        ({"state": RentalState.RUNNING, "worker_seen_at": 400.0}, 601.0, "silent"),
        ({"state": RentalState.PAUSED}, 0.0, "paused"),
        ({"state": RentalState.UNKNOWN}, 151.0, "unknown"),
        ({"state": RentalState.RUNNING, "shown_uusd_per_hour": 4_500_001}, 0.0, "dearer"),
    ],
)
def test_no_state_is_stayed_in_for_ever(changes: dict[str, Any], at: float, code: str) -> None:
    """At the limit it may stay, beyond it the code says why not."""
    rental = sent(**{"state_since": 0.0, **changes})
    words = overdue(rental, now=at, limits=LIMITS)
    assert words is not None
    assert words.startswith(f"{code}: ")


@pytest.mark.parametrize(
    ("changes", "at"),
    [
        ({"state": RentalState.REQUESTED}, 1e6),
        ({"state": RentalState.REQUESTED, "tries": 0}, 900.0),
        ({"state": RentalState.STARTING}, 600.0),
        ({"state": RentalState.RUNNING}, 300.0),
        ({"state": RentalState.RUNNING, "worker_seen_at": 400.0}, 600.0),
        ({"state": RentalState.UNKNOWN}, 150.0),
        ({"state": RentalState.RUNNING, "shown_uusd_per_hour": 4_500_000}, 0.0),
    ],
)
def test_what_is_in_time_stays(changes: dict[str, Any], at: float) -> None:
    assert overdue(sent(**{"state_since": 0.0, **changes}), now=at, limits=LIMITS) is None


@pytest.mark.parametrize(("seen_at", "code"), [(400.0, "silent"), (None, "no_worker")])
def test_a_worker_that_could_not_be_heard_has_all_its_time_after_our_start(seen_at: float | None, code: str) -> None:
    """The coordinator was down from 500 to 5000; silent_s is 200 and join_s 300."""
    rental = sent(state=RentalState.RUNNING, state_since=390.0, worker_seen_at=seen_at)
    assert overdue(rental, now=5199.0, limits=LIMITS, up_since=5000.0) is None
    words = overdue(rental, now=5301.0, limits=LIMITS, up_since=5000.0)
    assert words is not None
    assert words.startswith(f"{code}: ")


def test_a_create_is_not_sent_again_for_an_old_offer() -> None:
    rental = sent()
    for at in (40.0, 70.0, 911.0):
        rental = look(rental, None, at)
    assert rental.state is RentalState.GONE
    assert rental.ending.startswith("not_created: 1 creates")


def test_ending_keeps_its_first_reason_and_what_was_never_sent_is_gone_at_once() -> None:
    unsent = ended(fresh(), "unwanted: x", 5.0)
    assert (unsent.state, unsent.cost_uusd, unsent.ending_since) == (RentalState.GONE, 0, 5.0)
    twice = ended(ended(sent(), "a: 1", 5.0), "b: 2", 6.0)
    assert (twice.ending, twice.ending_since) == ("a: 1", 5.0)


def test_a_row_that_was_never_sent_is_not_touched_by_a_look() -> None:
    assert look(fresh(), None, 50.0) == fresh()
    assert order(look(sent(), handle(), 20.0), at=20.0, limits=LIMITS) is None


def test_a_stray_costs_from_its_start_and_is_destroyed() -> None:
    found = stray(handle(uusd_per_hour=3_600_000, started_at=40.0), provider="vast", at=100.0, now=100.0)
    assert order(found, at=100.0, limits=LIMITS) == Destroy(found, "5")
    assert projected(found, at=100.0) == pytest.approx(60_000, abs=2)
    unsaid = stray(handle(), provider="vast", at=100.0, now=100.0)
    assert projected(unsaid, at=200.0) == 0  # neither start nor price were stated
    assert not found.is_wanted
