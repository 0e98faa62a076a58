"""Rates from work: right values follow from how the completions were laid out."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.domain.market_rates import (
    HOUR_S,
    Made,
    admitted,
    claimed,
    most_turns,
    percentile,
    quoted_rate,
    reliability,
    throughput,
    work_rate,
)
from coordinator.domain.model import QuoteRow, WorkerSession
from pricing.throughput import Throughput


def steady(count: int, *, slots: int, seconds: float, loaded: int, since: float = 0.0) -> list[Made]:
    """`loaded` slots that always make one completion after the other, each in `seconds`."""
    return [
        Made(since + turn * seconds, since + (turn + 1) * seconds, tokens=10)
        for turn in range(count // loaded)
        for _ in range(loaded)
    ]


def rated(per_million: int | None, price: int, made_at: float = 0.0) -> QuoteRow:
    return QuoteRow("q", "j", "w", 1, "active", per_million, price, made_at, made_at + 60, "")


@pytest.mark.parametrize("loaded", [8, 4, 1])
def test_a_worker_is_rated_as_if_all_its_slots_were_busy(loaded: int) -> None:
    """Eight slots, two seconds a completion: four a second, however many of the slots have work."""
    made = steady(480, slots=8, seconds=2.0, loaded=loaded)
    found = throughput(made, slots=8, start=Throughput(3.0, 0.0), tokens=10.0)
    assert found.done / found.seconds == pytest.approx(4.0, rel=0.02)
    assert found.rate(made[-1].accepted_at) == pytest.approx(4.0, rel=0.1)


def test_leases_beyond_the_slots_wait_and_do_not_raise_the_rate() -> None:
    """Sixteen leased at once on eight slots that make four a second: each takes four seconds."""
    found = throughput(steady(480, slots=8, seconds=4.0, loaded=16), slots=8, start=Throughput(0.5, 0.0), tokens=10.0)
    assert found.done / found.seconds == pytest.approx(4.0, rel=0.02)


def test_time_without_work_does_not_count() -> None:
    made = steady(160, slots=8, seconds=2.0, loaded=8) + steady(160, slots=8, seconds=2.0, loaded=8, since=1000.0)
    found = throughput(made, slots=8, start=Throughput(0.5, 0.0, half_life_s=1e9), tokens=10.0)
    assert found.done == pytest.approx(320)
    assert found.done / found.seconds == pytest.approx(4.0, rel=0.02)


def test_a_rate_is_counted_in_completions_of_todays_length() -> None:
    """Forty tokens a second are four completions of ten tokens, or two of twenty, whatever they were when they were made."""
    made = steady(480, slots=8, seconds=2.0, loaded=8)
    found = throughput(made, slots=8, start=Throughput(0.5, 0.0), tokens=20.0)
    assert found.done / found.seconds == pytest.approx(2.0, rel=0.02)


def test_nothing_made_is_the_start_itself() -> None:
    start = Throughput(0.5, 0.0)
    assert throughput([], slots=8, start=start) is start
    assert throughput([Made(5.0, 5.0)], slots=8, start=start) == start  # an instant is no time


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0.01, 50)), min_size=1, max_size=60), st.integers(1, 64))
def test_every_completion_is_counted_once(spans: list[tuple[float, float]], slots: int) -> None:
    made = [Made(begin, begin + length) for begin, length in spans]
    found = throughput(made, slots=slots, start=Throughput(1.0, 0.0, half_life_s=1e15))
    assert found.done <= len(made) + 1e-6
    union = sum(length for _, length in spans)
    assert found.seconds <= union + 1e-6


def test_the_work_rate_counts_tokens_over_the_time_with_work() -> None:
    assert work_rate([Made(0, 2, 10), Made(1, 3, 20), Made(10, 11, 30)], slots=1) == pytest.approx(60 / 4)
    assert work_rate([], slots=1) == 0.0
    assert work_rate([Made(5.0, 5.0)], slots=1) == 0.0


@pytest.mark.parametrize("loaded", [8, 4, 1])
def test_the_work_rate_is_that_of_all_slots(loaded: int) -> None:
    """Eight slots, ten tokens each two seconds: forty a second, however many had work. One of eight is not paid eight times as much."""
    assert work_rate(steady(480, slots=8, seconds=2.0, loaded=loaded), slots=8) == pytest.approx(40.0)


def test_a_worker_that_was_slow_is_rated_by_its_newest_pace_and_one_that_becomes_slow_is_not() -> None:
    """560 s at a tenth of the pace do not hide the last 16 s of 40 tokens a second; nor do 16 slow seconds the 64 s of it."""
    slow = steady(224, slots=8, seconds=20.0, loaded=8)
    assert work_rate(slow + steady(64, slots=8, seconds=2.0, loaded=8, since=560.0), slots=8) == pytest.approx(40.0)
    fast = steady(256, slots=8, seconds=2.0, loaded=8)
    assert work_rate(fast + steady(8, slots=8, seconds=16.0, loaded=8, since=64.0), slots=8) == pytest.approx(264 * 10 / 80)


def test_a_quote_remembers_the_rate_that_it_was_made_from() -> None:
    """0.36 USD an hour at 100 tokens/s are 1 USD per million."""
    assert quoted_rate(rated(1_000_000, 360_000)) == pytest.approx(100.0)
    assert quoted_rate(rated(None, 360_000)) is None
    assert quoted_rate(rated(0, 0)) is None
    assert quoted_rate(None) is None


def test_what_is_claimed_is_believed_until_something_better_is_known() -> None:
    assert claimed(50.0, tokens=10.0, quote=None, now=0.0).rate(0.0) == pytest.approx(5.0)
    assert claimed(0.0, tokens=10.0, quote=None, now=0.0).rate(0.0) == pytest.approx(1.0)
    found = claimed(50.0, tokens=10.0, quote=rated(1_000_000, 360_000), now=0.0)
    assert 5.0 < found.rate(0.0) <= 10.0
    assert found.seconds == pytest.approx(60.0)


def test_the_admitted_share_starts_from_the_jobs_and_follows_the_worker() -> None:
    assert admitted(0, 0).value == 1.0
    assert admitted(0, 0, usual=0.8).value == pytest.approx(0.8)
    much = admitted(5000, 5000, usual=1.0)
    assert much.value == pytest.approx(0.5, abs=0.01)
    assert much.sd < admitted(5, 5).sd


def test_a_worker_that_ends_often_is_less_reliable() -> None:
    def stays(count: int, hours: float) -> list[WorkerSession]:
        return [WorkerSession("w", n, n * 1e5, n * 1e5 + hours * HOUR_S, 0, n * 1e5 + hours * HOUR_S) for n in range(count)]

    now = 1e6
    assert reliability([], now) == pytest.approx(0.9)
    assert (
        reliability(stays(5, 0.5), now) < reliability(stays(1, 2.5), now) < reliability([WorkerSession("w", 1, 0.0, 9e4, 0)], now)
    )


def test_percentiles_by_nearest_rank() -> None:
    assert percentile([], 0.95) == 0.0
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([float(n) for n in range(1, 101)], 0.95) == 95.0
    assert not math.isnan(percentile([1.0, 2.0], 1.0))


@pytest.mark.parametrize(("new_tokens", "expected"), [(1, 4096), (256, 4096), (1024, 1024), (131_072, 64)])
def test_turns_are_looked_at_by_what_their_rows_hold(new_tokens: int, expected: int) -> None:
    assert most_turns(new_tokens, 4096) == expected
