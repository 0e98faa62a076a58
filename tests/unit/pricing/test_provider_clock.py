"""The provider's time between its replies, whatever our own clock does."""

from __future__ import annotations

from pricing.provider_clock import MOST_APART_S, ProviderClock


def test_it_runs_on_with_our_clock_from_what_the_provider_said() -> None:
    clock = ProviderClock()
    assert clock.now(ours=50.0) == 50.0  # nothing is known
    assert clock.said(1000.0, ours=60.0) == 1000.0
    assert clock.now(ours=75.0) == 1015.0


def test_a_step_of_ours_back_loses_only_the_time_since_the_last_reading() -> None:
    clock = ProviderClock()
    clock.said(1000.0, ours=60.0)
    assert clock.now(ours=70.0) == 1010.0
    assert clock.now(ours=-5000.0) == 1010.0
    assert clock.now(ours=-4970.0) == 1040.0


def test_a_date_that_cannot_be_is_not_believed() -> None:
    clock = ProviderClock()
    assert clock.said(100.0 + MOST_APART_S + 1.0, ours=100.0) == 100.0
    assert clock.said(None, ours=130.0) == 130.0


def test_a_reply_without_a_date_changes_nothing() -> None:
    clock = ProviderClock()
    clock.said(1000.0, ours=60.0)
    assert clock.said(None, ours=90.0) == 1030.0


def test_after_a_start_it_is_no_earlier_than_what_was_billed() -> None:
    clock = ProviderClock()
    clock.resume(5000.0, ours=100.0)
    assert clock.now(ours=130.0) == 5030.0
    clock.resume(9000.0, ours=130.0)  # it is known by now
    assert clock.now(ours=130.0) == 5030.0
    ahead = ProviderClock()
    ahead.resume(0.0, ours=100.0)
    assert ahead.now(ours=100.0) == 100.0
