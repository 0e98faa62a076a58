"""Hearing of a version makes the next beat come at once, a bounded number of times."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.hearsay import GAP_S, TRIES, Hearsay
from worker_node.domain.weights import Version

Drive = Callable[..., Any]
Make = Callable[..., Any]
OLD, NEW, NEWER = Version("job", 1, "a" * 64), Version("job", 2, "b" * 64), Version("job", 3, "c" * 64)
REPLAYED = Version("job", 2, "d" * 64)


def test_nothing_heard_hurries_nothing() -> None:
    hearsay = Hearsay()
    assert not hearsay.wants_beat((), 0.0)
    assert hearsay.next_deadline((), 0.0) == inf


def test_what_a_beat_has_named_or_passed_is_no_news() -> None:
    hearsay = Hearsay()
    hearsay.take(NEW)
    assert hearsay.wants_beat((OLD,), 0.0)
    assert hearsay.wants_beat((), 0.0), "its job was not named yet"
    assert hearsay.wants_beat((Version("other", 9, "e" * 64),), 0.0)
    assert hearsay.wants_beat((REPLAYED,), 0.0), "another digest is another version"
    assert not hearsay.wants_beat((NEW,), 0.0)
    assert not hearsay.wants_beat((OLD, NEWER), 0.0)


def test_an_answer_that_does_not_name_it_is_asked_for_again_but_not_for_ever() -> None:
    """TRIES beats, GAP_S apart, whatever is repeated meanwhile."""
    hearsay, now, sent = Hearsay(), 0.0, []
    for _ in range(10 * TRIES):
        hearsay.take(NEW)
        if hearsay.wants_beat((OLD,), now):
            sent.append(now)
            hearsay.beat_sent(now)
            assert not hearsay.wants_beat((OLD,), now + GAP_S / 2)
            assert hearsay.next_deadline((OLD,), now) in {now + GAP_S, inf}
        now += GAP_S / 2
    assert sent == [0.0, GAP_S, 2 * GAP_S]
    assert hearsay.next_deadline((OLD,), now) == inf
    hearsay.take(NEWER)
    assert hearsay.wants_beat((OLD,), now), "other news is news"


def test_a_busy_worker_beats_at_once_when_it_hears_of_a_version(drive: Drive, make_version: Make) -> None:
    """With the next beat ten seconds away; what the beat's answer says is done, not what was heard."""
    d = drive()
    d.join()
    d.beat(make_version(1), heartbeat_s=10.0)
    d.wake(1.0)
    assert d.ordered(do.SendBeat) == []
    d.tell(ev.HeardOf(make_version(2)))
    assert len(d.ordered(do.SendBeat)) == 1
    assert d.ordered(do.FetchManifest) == [], "an announcement is no order"
    d.tell(ev.HeardOf(make_version(2)))
    assert d.ordered(do.SendBeat) == [], "one at a time"
    d.beat(make_version(1), heartbeat_s=10.0)
    assert d.session.next_deadline() <= d.now + GAP_S
    d.wake(GAP_S)
    assert len(d.ordered(do.SendBeat)) == 1, "the answer came from before it"
    d.beat(make_version(2), heartbeat_s=10.0)
    d.wake(GAP_S)
    assert d.ordered(do.SendBeat) == []


def test_a_coordinator_that_fails_is_not_pressed(drive: Drive, make_version: Make) -> None:
    """News does not shorten a back-off."""
    d = drive()
    d.join()
    d.fail(ev.Call.BEAT, retry_after_s=5.0)
    d.tell(ev.HeardOf(make_version(2)))
    assert d.ordered(do.SendBeat) == []
    d.wake(5.0)
    d.wake(30.0)
    assert len(d.ordered(do.SendBeat)) <= 1
