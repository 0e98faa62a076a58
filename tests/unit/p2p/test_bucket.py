"""Rates that change, bytes a month, and the measured uplink."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2p.domain.bucket import MonthlyCap, TokenBucket, month_of
from p2p.domain.uplink import KEPT_S, UplinkMeter


def test_a_burst_is_free_and_the_rest_waits_for_the_rate() -> None:
    bucket = TokenBucket(100, 50, now=0)
    assert bucket.take(50, 0) == 0
    assert bucket.take(100, 0) == 1.0
    assert bucket.wait(0.5) == 0.5
    assert bucket.wait(1.0) == 0
    assert bucket.take(10, 1.0) == pytest.approx(0.1)


def test_a_rate_of_none_holds_nothing_back() -> None:
    bucket = TokenBucket(None, 1, now=0)
    assert bucket.take(10**12, 0) == 0
    assert bucket.rate is None


def test_a_debt_is_paid_at_the_new_rate() -> None:
    bucket = TokenBucket(100, 0, now=0)
    assert bucket.take(1000, 0) == 10.0
    bucket.set_rate(1000, 0, 0)
    assert bucket.wait(0) == 1.0
    bucket.set_rate(None, 5, 0)
    assert bucket.wait(0) == 0
    bucket.set_rate(10, 5, 0)  # what unbounded forgave stays forgiven; the burst is there
    assert bucket.take(5, 0) == 0
    assert bucket.take(10, 0) == 1.0


def test_a_clock_that_jumps_back_refills_nothing() -> None:
    bucket = TokenBucket(100, 0, now=10)
    assert bucket.take(100, 10) == 1.0
    assert bucket.wait(5) == 1.0
    assert bucket.wait(11) == 0


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 1000)), max_size=40), st.floats(1, 1000))
def test_no_more_than_rate_and_burst_goes_through(steps: list[tuple[float, int]], rate: float) -> None:
    bucket, now, sent, largest = TokenBucket(rate, 64, now=0), 0.0, 0, 0
    for pause, amount in steps:
        now += pause
        if bucket.wait(now) == 0:
            bucket.take(amount, now)
            sent, largest = sent + amount, max(largest, amount)
    assert sent <= rate * now + 64 + largest + 1e-6


NOVEMBER = datetime(2026, 11, 30, 23, 59, 59, tzinfo=UTC).timestamp()


def test_months_are_calendar_months_of_utc() -> None:
    assert month_of(NOVEMBER) == "2026-11"
    assert month_of(NOVEMBER + 1) == "2026-12"


def test_a_cap_holds_until_the_month_is_over() -> None:
    cap = MonthlyCap(100)
    assert not cap.is_spent(NOVEMBER)
    cap.spend(100, NOVEMBER)
    assert cap.is_spent(NOVEMBER)
    assert not cap.is_spent(NOVEMBER + 1)
    assert (cap.month, cap.used) == ("2026-12", 0)
    cap.spend(40, NOVEMBER + 2)
    cap.set_cap(40)
    assert cap.is_spent(NOVEMBER + 3)
    cap.set_cap(None)
    assert not cap.is_spent(NOVEMBER + 3)


def test_a_counter_that_was_kept_goes_on() -> None:
    assert MonthlyCap(100, month="2026-11", used=100).is_spent(NOVEMBER)
    assert not MonthlyCap(100, month="2026-10", used=100).is_spent(NOVEMBER)


def test_a_clock_that_jumps_back_opens_no_new_month() -> None:
    cap = MonthlyCap(100)
    cap.spend(100, NOVEMBER + 1)
    assert cap.is_spent(NOVEMBER - 40 * 86400)


def meter(*samples: tuple[float, int, bool]) -> UplinkMeter:
    made = UplinkMeter(5.0)
    for now, delivered, is_busy in samples:
        made.sample(delivered, is_busy, now)
    return made


def test_the_guess_holds_until_half_a_second_was_busy() -> None:
    assert meter((0, 0, True), (0.4, 40, True)).rate(0.4) == 5.0
    assert meter((0, 0, True), (0.5, 40, True)).rate(0.5) == 80.0


def test_what_left_while_idle_says_nothing() -> None:
    made = meter((0, 0, True), (0.4, 400, True), (0.5, 400, False), (0.9, 420, True), (1.0, 430, True))
    assert made.rate(1.0) == pytest.approx(30 / 0.5)


def test_the_best_of_twenty_seconds_counts_and_then_fades() -> None:
    made = meter((0, 0, True), (1, 100, True), (2, 150, True), (3, 160, True))
    assert made.rate(3) == 100.0
    assert made.rate(1 + KEPT_S) == 100.0
    assert made.rate(1.5 + KEPT_S) == 50.0
    assert made.rate(1000) == 10.0  # the last that is known


def test_a_better_rate_replaces_what_was_worse() -> None:
    made = meter((0, 0, True), (1, 100, True), (2, 300, True), (30, 2990, True))
    assert made.rate(30) == pytest.approx(2690 / 28)


def test_samples_at_one_moment_and_counters_that_shrink_do_no_harm() -> None:
    made = meter((0, 100, True), (0, 200, True), (1, 150, True))
    assert made.rate(1) == 0.0
