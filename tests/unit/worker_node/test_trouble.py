"""Why a worker has no newer version is part of what it says about itself, until it has one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from worker_node.domain import events as ev
from worker_node.domain import instructions as do
from worker_node.domain.report import activity

NOTHING: dict[str, Any] = {"generating": 0, "fetching": "", "swapping": "", "confirming": ""}


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"generating": 3}, "generating 3 completions; not fetched: version 2: no room"),
        ({"fetching": "version 2"}, "fetching version 2; not fetched: version 2: no room"),
        ({"swapping": "version 2"}, "loading version 2 into the engine"),
        ({}, "no work; not fetched: version 2: no room"),
    ],
)
def test_trouble_is_named_beside_what_is_done(state: dict[str, Any], words: str) -> None:
    assert activity(**{**NOTHING, **state}, waiting_for="no work", trouble="version 2: no room")[1] == words


def test_the_next_beats_say_why_a_fetch_failed_until_one_succeeds(
    drive: Callable[..., Any], make_version: Callable[..., Any]
) -> None:
    d = drive()
    d.hold(make_version(0))
    d.beat(make_version(1))
    d.tell(ev.ManifestArrived(make_version(1)))
    d.tell(ev.FetchFailed(make_version(1), "No space left on device"))
    d.wake(10.0)
    assert "No space left on device" in d.only(do.SendBeat).activity
    assert d.session.report().loaded == str(make_version(0))
    d.beat(make_version(1))
    while not d.ordered(do.FetchManifest):
        d.wake_when_due()
    d.fetch(make_version(1))
    d.beat(make_version(1))
    d.wake(10.0)
    assert "No space left" not in d.only(do.SendBeat).activity
