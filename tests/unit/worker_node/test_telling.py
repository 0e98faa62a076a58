"""An owner hears of each trouble once, seldom again, and when it is over; and of long loads since when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker_node import cli, config
from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.events import Call, CallFailed, Outcome
from worker_node.domain.report import lasting
from worker_node.domain.telling import REPEAT_S, Telling, ends_session

GONE = "http://127.0.0.1:9 cannot be reached: Connection refused"


def failed(call: Call = Call.JOIN, outcome: Outcome = Outcome.TRY_AGAIN, reason: str = GONE) -> CallFailed:
    return CallFailed(call, outcome, "unreachable", reason)


def test_the_first_failure_says_that_it_goes_on_and_what_to_check() -> None:
    line = Telling().failed(failed(), 5.0)
    assert line == f"{GONE}; it is tried again until it answers: is the address right, and does `echo2 serve` run there?"


def test_the_same_words_come_once_a_minute_whichever_call_they_are_of() -> None:
    telling = Telling()
    assert telling.failed(failed(), 0.0)
    assert telling.failed(failed(), 1.0) is None
    assert telling.failed(failed(Call.BEAT), REPEAT_S - 0.001) is None
    assert telling.failed(failed(Call.BEAT), REPEAT_S) == f"{GONE}; it is tried again until it answers"
    assert telling.failed(failed(), REPEAT_S + 1.0) is None


def test_another_time_in_the_same_words_is_no_news_and_other_words_are() -> None:
    telling = Telling()
    assert telling.failed(failed(reason="its own time is 1700000000"), 0.0)
    assert telling.failed(failed(reason="its own time is 1700000031"), 31.0) is None
    assert telling.failed(failed(reason="it does not speak TLS"), 32.0)


@pytest.mark.parametrize(
    ("call", "outcome", "line"),
    [
        (Call.BEAT, Outcome.REJOIN, "no such session; joining again"),
        (Call.SUBMIT, Outcome.REFUSED, "no such session"),
        (Call.LEASE, Outcome.TRY_AGAIN, "no such session; it is tried again until it answers"),
        (Call.JOIN, Outcome.REFUSED, None),
        (Call.LEAVE, Outcome.TRY_AGAIN, None),
        (Call.BEAT, Outcome.FENCED, None),
        (Call.LEASE, Outcome.FATAL, None),
    ],
)
def test_a_failure_says_what_comes_next_and_one_that_ends_the_worker_is_left_to_its_end(
    call: Call, outcome: Outcome, line: str | None
) -> None:
    assert Telling().failed(failed(call, outcome, "no such session"), 0.0) == line


@given(st.sampled_from(Call), st.sampled_from(Outcome))
def test_what_is_left_to_the_end_is_what_the_session_ends_for(call: Call, outcome: Outcome) -> None:
    """Else a failure would be told twice, or never."""
    from random import Random

    from worker_node.domain.session import Session, SessionSettings

    session = Session(SessionSettings(slots=1), rng=Random(1))
    session.handle(ev.Woke(), 0.0)
    if call is not Call.JOIN:
        session.handle(ev.Joined("w", 1, 10.0), 0.0)
    if call is Call.LEAVE:
        return  # the worker goes already
    orders = session.handle(failed(call, outcome), 1.0)
    assert any(isinstance(one, do.Stop) for one in orders) == ends_session(failed(call, outcome))


def test_the_end_of_a_trouble_is_told_once() -> None:
    telling = Telling()
    assert telling.answered(Call.JOIN, 0.0) is None
    telling.failed(failed(), 10.0)
    telling.failed(failed(), 40.0)
    assert telling.answered(Call.JOIN, 52.0) == "the coordinator answers now, after 42 s"
    assert telling.answered(Call.JOIN, 53.0) is None


def test_a_trouble_that_was_told_of_another_call_ends_with_the_heartbeat() -> None:
    """The long poll breaks first; the heartbeat's own failure has the same words and is not told."""
    telling = Telling()
    telling.failed(failed(Call.LEASE), 0.0)
    assert telling.failed(failed(Call.BEAT), 2.0) is None
    assert telling.answered(Call.BEAT, 182.0) == "the coordinator answers now, after 3 min"
    assert telling.answered(Call.LEASE, 183.0) is None


def test_a_single_call_that_was_told_ends_by_itself_and_an_untold_one_silently() -> None:
    telling = Telling()
    telling.failed(failed(Call.LEASE), 0.0)
    telling.failed(failed(Call.SUBMIT), 1.0)
    assert telling.answered(Call.SUBMIT, 2.0) is None
    assert telling.answered(Call.LEASE, 3.0) == "the coordinator answers now, after 3 s"


def test_a_trouble_of_a_call_that_is_not_made_any_more_ends_with_the_next_heartbeat() -> None:
    """Else a manifest asked for tomorrow would say that the coordinator was gone for a day."""
    telling = Telling()
    telling.failed(failed(Call.MANIFEST), 0.0)
    assert telling.answered(Call.BEAT, 1.0) is None
    assert telling.answered(Call.MANIFEST, 86_400.0) is None


@given(st.lists(st.tuples(st.sampled_from([Call.JOIN, Call.BEAT, Call.LEASE]), st.booleans(), st.floats(0.0, 50.0)), max_size=60))
def test_no_words_are_said_twice_in_a_minute_and_every_end_had_a_beginning(turns: list[tuple[Call, bool, float]]) -> None:
    """Whatever fails and answers in whatever order."""
    telling, now, told_at = Telling(), 0.0, -REPEAT_S
    troubles = ends = 0
    for call, fails, seconds in turns:
        now += seconds
        if not fails:
            ends += telling.answered(call, now) is not None
        elif telling.failed(failed(call), now) is not None:
            assert now - told_at >= REPEAT_S
            told_at, troubles = now, troubles + 1
        assert ends <= troubles


@pytest.mark.parametrize(("seconds", "words"), [(-1.0, "0 s"), (119.0, "119 s"), (120.0, "2 min"), (7200.0, "2.0 h")])
def test_durations_are_for_people(seconds: float, words: str) -> None:
    assert lasting(seconds) == words


def test_a_load_of_minutes_says_since_when(drive: Callable[..., Any], make_version: Callable[..., Any]) -> None:
    """vLLM may load for minutes; beats go on meanwhile, and the words change once a minute."""
    d, wanted = drive(), make_version()
    d.join()
    d.beat(wanted)
    d.fetch(wanted)
    assert d.only(do.SwapWeights).version == wanted
    d.wake(59.0)
    assert d.session.report().because == f"loading {wanted} into the engine"
    d.wake(125.0)
    assert d.session.report().because == f"loading {wanted} into the engine (since 3 min)"
    assert not d.session.report().working


def test_the_hint_to_back_the_key_up_names_the_state_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it must be typed: another directory's key is another account."""
    cli._announce(tmp_path / "my rig" / "identity.pem")
    assert f"`echo2-worker identity export FILE --state-dir '{tmp_path}/my rig'`" in capsys.readouterr().err
    cli._announce(config.default_state_dir() / "identity.pem")
    assert "`echo2-worker identity export FILE`" in capsys.readouterr().err
