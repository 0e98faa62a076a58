"""When a job uses the pool, from its events, and how its time is shared."""

from __future__ import annotations

from math import inf

import pytest

from coordinator.domain.model import Event
from coordinator.domain.spans import Share, shares, spans


def events(*kinds: tuple[float, str] | tuple[float, str, dict[str, str]]) -> list[Event]:
    return [Event("j", seq, one[0], one[1], one[2] if len(one) > 2 else {}) for seq, one in enumerate(kinds)]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([], ()),
        ([(1.0, "learner_starting")], ((1.0, inf),)),
        ([(1.0, "learner_starting"), (2.0, "learner_starting"), (3.0, "job_failed")], ((1.0, 3.0),)),
        (
            [(1.0, "learner_starting"), (2.0, "paused"), (5.0, "resumed", {"state": "running"}), (6.0, "job_completed")],
            ((1.0, 2.0), (5.0, 6.0)),
        ),
        ([(1.0, "paused"), (2.0, "resumed", {"state": "queued"}), (9.0, "learner_starting")], ((9.0, inf),)),
        ([(1.0, "learner_starting"), (2.0, "paused"), (3.0, "job_cancelled")], ((1.0, 2.0),)),
    ],
)
def test_queued_and_paused_time_is_not_used(changes, expected) -> None:
    assert spans(events(*changes)) == expected


def test_shared_time_is_cut_where_others_begin_and_end() -> None:
    own, others = [(0.0, 10.0), (20.0, inf)], [[(5.0, 25.0)], [(8.0, 9.0)]]
    assert shares(own, others) == (
        Share(0.0, 5.0, 1),
        Share(5.0, 8.0, 2),
        Share(8.0, 9.0, 3),
        Share(9.0, 10.0, 2),
        Share(20.0, 25.0, 2),
        Share(25.0, inf, 1),
    )
    assert shares([], others) == ()
