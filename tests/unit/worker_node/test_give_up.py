"""The dead-man switch of a rented machine: without a coordinator its worker ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker_node import config
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.session import EXIT_FAILED
from worker_node.errors import ConfigError

Drive = Callable[..., Any]
Make = Callable[..., Any]


def _silent(d: Any, seconds: float) -> None:
    """Every call fails until the time has passed or the session ended."""
    until = d.now + seconds
    while d.session.next_deadline() is not None and d.session.next_deadline() <= until:
        d.wake_when_due()
        if d.ordered(do.Stop):
            return
        for call, kind in ((ev.Call.JOIN, do.SendJoin), (ev.Call.BEAT, do.SendBeat), (ev.Call.LEASE, do.AskLease)):
            if d.ordered(kind):
                d.fail(call, epoch=0 if call is ev.Call.JOIN else 1)


def test_a_worker_that_never_reaches_its_coordinator_gives_up(drive: Drive) -> None:
    """The time runs from the start; the reason names the option."""
    d = drive(give_up_s=600.0)
    d.wake()
    d.fail(ev.Call.JOIN)
    _silent(d, 700.0)
    assert d.now == pytest.approx(1600.0)
    stop = d.only(do.Stop)
    assert stop.exit_code == EXIT_FAILED
    assert "not heard for 600 s (--give-up-after-min)" in stop.reason
    assert d.session.next_deadline() is None


def test_each_word_of_the_coordinator_starts_the_time_anew(drive: Drive, make_version: Make) -> None:
    """A beat answered at 590 s keeps it until 1190 s."""
    d = drive(give_up_s=600.0)
    d.hold(make_version())
    began = d.now
    d.wake(590.0)
    d.beat(make_version())
    assert not d.ordered(do.Stop)
    _silent(d, 1000.0)
    assert d.now - began == pytest.approx(1190.0)
    assert d.only(do.Stop).exit_code == EXIT_FAILED


def test_without_the_option_a_worker_waits_for_ever(drive: Drive) -> None:
    """A volunteer's machine costs nobody anything."""
    d = drive()
    d.wake()
    d.fail(ev.Call.JOIN)
    _silent(d, 100_000.0)
    assert not d.ordered(do.Stop)


@pytest.mark.parametrize(("minutes", "seconds"), [(0.0, None), (1.0, 60.0), (30.0, 1800.0)])
def test_minutes_are_seconds(minutes: float, seconds: float | None) -> None:
    assert config.give_up_s(minutes) == seconds


@pytest.mark.parametrize("minutes", [-1.0, 0.5, 1e6, float("nan")])
def test_an_impossible_patience_is_refused_by_name(minutes: float) -> None:
    with pytest.raises(ConfigError, match="--give-up-after-min"):
        config.give_up_s(minutes)
