"""Standing, faults, silence."""

from __future__ import annotations

import pytest

from coordinator.domain.model import WorkerState
from coordinator.domain.workers import after_fault, is_lost, is_served, standing


@pytest.mark.parametrize(
    ("state", "holds", "may", "words"),
    [
        (WorkerState.ACTIVE, True, True, "active"),
        (WorkerState.ACTIVE, False, False, "waiting for weights"),
        (WorkerState.STANDBY, True, False, "standby"),
        (WorkerState.DRAINING, True, False, "draining"),
        (WorkerState.QUARANTINED, True, False, "quarantined"),
        (WorkerState.GONE, True, False, "gone"),
    ],
)
def test_only_active_workers_with_usable_weights_take_leases(make_worker, state, holds, may, words) -> None:
    """And every other one is told why not."""
    allowed, reason = standing(make_worker(state=state), holds_newest_usable=holds)
    assert allowed is may
    assert reason.startswith(words)


def test_the_stored_reason_is_passed_on(make_worker) -> None:
    """An owner reads why the worker was quarantined."""
    worker = make_worker(state=WorkerState.QUARANTINED, reason="wrong canary")
    assert standing(worker, holds_newest_usable=True)[1] == "quarantined: wrong canary"


@pytest.mark.parametrize("state", [state for state in WorkerState if state is not WorkerState.ACTIVE])
def test_every_state_has_words(make_worker, state) -> None:
    """Even a row without a reason tells why there is no work."""
    words = standing(make_worker(state=state), holds_newest_usable=True)[1]
    assert words.startswith(f"{state.value}: ")
    assert len(words) > len(state.value) + 2


def test_faults_in_a_row_quarantine(make_worker) -> None:
    """The limit-th fault does it."""
    assert after_fault(make_worker(strikes=3), limit=5) == (4, WorkerState.ACTIVE, "")
    strikes, state, reason = after_fault(make_worker(strikes=4), limit=5)
    assert (strikes, state) == (5, WorkerState.QUARANTINED)
    assert "5 faults" in reason


def test_a_quarantined_worker_keeps_its_first_reason(make_worker) -> None:
    """Later faults only count."""
    worker = make_worker(strikes=9, state=WorkerState.QUARANTINED, reason="wrong canary")
    assert after_fault(worker, limit=5) == (10, WorkerState.QUARANTINED, "wrong canary")


def test_silence(make_worker) -> None:
    """Lost only after more than the limit."""
    assert not is_lost(10.0, now=45.0, lost_after_s=35.0)
    assert is_lost(10.0, now=45.1, lost_after_s=35.0)


def test_quarantine_is_served(make_worker) -> None:
    """Its timer counts from its beginning; other states have none."""
    worker = make_worker(state=WorkerState.QUARANTINED, state_since=100.0)
    assert not is_served(worker, now=159.0, quarantine_s=60.0)
    assert is_served(worker, now=160.0, quarantine_s=60.0)
    assert not is_served(make_worker(), now=1e9, quarantine_s=60.0)
