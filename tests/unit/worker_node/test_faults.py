"""Faults of other systems that the worker's session rules out; the numbers are those of docs/faults.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.session import EXIT_ENGINE

Make = Callable[..., Any]


def test_fault_06_a_weight_update_that_never_ends_ends_the_session(drive: Make, make_version: Make) -> None:
    """No answer, no failure: the machine is due by itself, names what it waited for, and leaves, so that its owner restarts it."""
    d = drive(swap_s=300.0, drain_s=20.0)
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    assert d.only(do.SwapWeights).version == make_version(1)
    begun, stops = d.now, []
    for _ in range(500):
        if stops:
            break
        due = d.session.next_deadline()
        assert due is not None
        assert due < begun + 1000.0, "it waits for nobody for ever"
        d.wake_when_due()
        if d.ordered(do.SendBeat):
            d.beat(make_version(1))
        stops += d.ordered(do.Stop)
    assert "engine_failed" in d.codes()
    assert stops[0].exit_code == EXIT_ENGINE
    assert "a weight update took more than 300 s" in stops[0].reason


def test_fault_06_a_fetch_without_an_answer_is_tried_again(drive: Make, make_version: Make) -> None:
    """The old version serves meanwhile."""
    d = drive(silence_s=60.0)
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    assert d.only(do.FetchManifest).version == make_version(1)
    asked = 0
    for _ in range(40):
        d.wake_when_due()
        asked += len(d.ordered(do.FetchManifest))
        if d.ordered(do.SendBeat):
            d.beat(make_version(1))
            asked += len(d.ordered(do.FetchManifest))
    assert asked >= 1
    assert "no_report" in d.codes()
    assert d.session.report().loaded == str(make_version(0))


def test_fault_08_only_what_nobody_reads_is_dropped(drive: Make, make_version: Make) -> None:
    """Version 1 is confirmed and serves, version 2 is on disk and goes into the engine next: version 0 goes, and nothing else."""
    d = drive()
    d.hold(make_version(0))
    d.wake(10.0)
    d.beat(make_version(1))
    d.fetch(make_version(1))
    d.wake(10.0)
    d.beat(make_version(2))
    d.tell(ev.SwapFinished(make_version(1), (-1.0,), 0.1))
    d.fetch(make_version(2))
    d.tell(ev.ConfirmAnswered(make_version(1), accepted=True, reason=""))
    assert d.only(do.SwapWeights).version == make_version(2)
    assert d.only(do.DropVersions).versions == {make_version(0)}
