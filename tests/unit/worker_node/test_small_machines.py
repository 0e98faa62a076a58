"""Back-off, lanes, the choice of versions, and the words of a report."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker_node.app import SteadyClock
from worker_node.domain.backoff import Backoff
from worker_node.domain.events import FetchFinished
from worker_node.domain.lane import Lane
from worker_node.domain.report import activity
from worker_node.domain.weights import Shelf, Version, choose, may_keep, to_drop, to_fetch, to_set_aside, to_swap


@given(seed=st.integers(0, 1000), failures=st.integers(1, 80), asked=st.floats(0, 1000))
@settings(max_examples=60, deadline=None)
def test_back_off_lies_between_what_the_server_asked_and_the_doubled_ceiling(seed: int, failures: int, asked: float) -> None:
    """Full jitter: uniform in [0, min(most, first * 2^n)], on top of Retry-After."""
    backoff = Backoff(first_s=0.5, most_s=30.0, rng=Random(seed))
    for n in range(failures):
        wait = backoff.failed(asked)
        assert asked <= wait <= asked + min(30.0, 0.5 * 2.0**n)
    backoff.succeeded()
    assert backoff.failures == 0
    assert backoff.failed() <= 0.5


def test_back_off_of_a_seed_is_reproducible_and_negative_retry_times_count_as_none() -> None:
    """The same generator gives the same waits."""
    one, two = (Backoff(first_s=1.0, most_s=8.0, rng=Random(3)) for _ in range(2))
    assert [one.failed() for _ in range(5)] == [two.failed(-4.0) for _ in range(5)]


@pytest.mark.parametrize(("first_s", "most_s"), [(0.0, 1.0), (2.0, 1.0), (-1.0, 1.0)])
def test_back_off_refuses_impossible_limits(first_s: float, most_s: float) -> None:
    """The message names the values."""
    with pytest.raises(ValueError, match=f"first_s={first_s}"):
        Backoff(first_s=first_s, most_s=most_s, rng=Random(0))


def test_a_lane_holds_one_call() -> None:
    """Not ready while in flight; after an answer ready at the named time; silence is noticed."""
    lane = Lane(silence_s=60.0, first_s=1.0, most_s=8.0, rng=Random(0))
    assert lane.is_ready(0.0)
    assert lane.next_deadline(0.0) == inf
    lane.started(0.0)
    assert lane.in_flight
    assert not lane.is_ready(1.0)
    assert not lane.is_silent(59.9)
    assert lane.is_silent(60.0)
    assert lane.next_deadline(1.0) == 60.0
    lane.answered(10.0, next_in_s=5.0)
    assert not lane.in_flight
    assert not lane.is_ready(14.9)
    assert lane.is_ready(15.0)
    assert lane.next_deadline(10.0) == 15.0
    lane.hurry(11.0)
    assert lane.is_ready(11.0)
    lane.failed(11.0, retry_after_s=9.0)
    lane.hurry(12.0)
    assert not lane.is_ready(12.0)


A, B, OTHER = Version("job", 1, "a" * 64), Version("job", 2, "b" * 64), Version("other", 1, "c" * 64)


def test_a_worker_stays_with_its_job_while_that_is_named() -> None:
    """It takes another job only with empty hands."""
    assert choose((OTHER, B), current_job="job", busy=False) == B
    assert choose((OTHER, B), current_job=None, busy=False) == OTHER
    assert choose((OTHER,), current_job="job", busy=True) is None
    assert choose((OTHER,), current_job="job", busy=False) == OTHER
    assert choose((), current_job="job", busy=False) is None


def test_only_the_target_is_fetched_and_one_at_a_time() -> None:
    """Not what is here, what was given up, or while a fetch runs."""
    assert to_fetch(Shelf(frozenset({A}), A), B, given_up=frozenset()) == B
    assert to_fetch(Shelf(frozenset({A}), A), None, given_up=frozenset()) is None
    assert to_fetch(Shelf(frozenset({A}), A, fetching=OTHER), B, given_up=frozenset()) is None
    assert to_fetch(Shelf(frozenset({B}), A), B, given_up=frozenset()) is None
    assert to_fetch(Shelf(), B, given_up=frozenset({B})) is None


def test_only_a_stored_target_is_swapped_in_once() -> None:
    """Never the one that is loaded already."""
    assert to_swap(Shelf(frozenset({A, B}), A), B) == B
    assert to_swap(Shelf(frozenset({A, B}), B), B) is None
    assert to_swap(Shelf(frozenset({A}), A), B) is None
    assert to_swap(Shelf(), None) is None


def test_what_nothing_needs_is_dropped() -> None:
    """The loaded version (the next delta's base), the target and those in use stay."""
    stored = frozenset({A, B, OTHER})
    assert to_drop(Shelf(stored, A), B) == {OTHER}
    assert to_drop(Shelf(stored, A), None, in_use=(OTHER,)) == {B}


def test_a_base_is_kept_while_something_newer_of_its_job_is_here() -> None:
    assert to_set_aside({A, OTHER}, [A], left=[B]) == {A}
    assert to_set_aside({A, OTHER}, [A, OTHER], left=[B]) == {A}, "of the other job nothing is left"
    assert to_set_aside({A}, [], left=[B]) == frozenset(), "no edges begin at it"
    assert to_set_aside({A}, [A], left=[A]) == frozenset(), "it is all there is: the session's to decide about"
    assert to_set_aside({B}, [B], left=[A]) == frozenset(), "only something older is here"


def test_two_models_must_still_fit_beside_a_base() -> None:
    assert may_keep(nbytes=100, free=200)
    assert not may_keep(nbytes=100, free=199)


@pytest.mark.parametrize(
    ("state", "words", "working"),
    [
        ({"generating": 3, "fetching": "version 2"}, "generating 3 completions, fetching version 2", True),
        ({"generating": 3}, "generating 3 completions", True),
        ({"swapping": "version 2", "fetching": "version 3"}, "loading version 2 into the engine", False),
        ({"confirming": "version 2"}, "waiting for the coordinator to confirm version 2", False),
        ({"fetching": "version 2"}, "fetching version 2", False),
        ({}, "no work", False),
    ],
)
def test_the_most_telling_activity_is_named(state: dict[str, Any], words: str, working: bool) -> None:
    """Working, or not working because."""
    full: dict[str, Any] = {"generating": 0, "fetching": "", "swapping": "", "confirming": "", **state}
    assert activity(**full, waiting_for="no work") == (working, words)


def test_a_completion_knows_its_versions(make_completion: Callable[..., Any]) -> None:
    """Spans never decrease, so the first token's version is the oldest."""
    done = make_completion((2, 2, 4))
    assert (done.length, done.oldest_version, done.version_numbers()) == (3, 2, {2, 4})


def test_a_step_of_the_machines_clock_moves_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's wall clock goes at the rate of the monotonic one: a lease's end is computed from it."""
    monkeypatch.setattr("worker_node.app.time.time", lambda: 1000.0)
    monkeypatch.setattr("worker_node.app.time.monotonic", lambda: 5.0)
    clock = SteadyClock()
    assert clock() == 1000.0
    monkeypatch.setattr("worker_node.app.time.time", lambda: 1000.0 + 7200.0)
    monkeypatch.setattr("worker_node.app.time.monotonic", lambda: 8.0)
    assert clock() == 1003.0


def test_a_version_costs_what_was_brought_for_its_sake_too() -> None:
    base = FetchFinished(Version("j", 0, "a"), 100, 40, 3.0, 1.0)
    edge = FetchFinished(Version("j", 5, "b"), 10, 5, 0.5, 0.25)
    assert edge.since(base) == FetchFinished(Version("j", 5, "b"), 110, 45, 3.5, 1.25)
