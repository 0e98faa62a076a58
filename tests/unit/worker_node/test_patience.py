"""How long peers are waited for, as the rule says."""

from __future__ import annotations

import pytest

from worker_node.domain.patience import ASKED_S, DIALLED_S, SIGN_S, STALL_S, Patience, first_wait_s


@pytest.mark.parametrize(
    ("links", "dialled", "met_s_ago", "seconds"),
    [
        (1, 0, None, SIGN_S),
        (2, 3, 100.0, SIGN_S),
        (0, 0, None, ASKED_S),
        (0, 3, 0.5, DIALLED_S - 0.5),
        (0, 3, 100.0, 0.0),
        (0, 0, 0.0, 0.0),
    ],
    ids=["connected", "long connected", "not asked yet", "being dialled", "none answers", "nobody there"],
)
def test_the_first_wait_is_as_long_as_there_is_hope(links: int, dialled: int, met_s_ago: float | None, seconds: float) -> None:
    assert first_wait_s(links=links, dialled=dialled, met_s_ago=met_s_ago) == seconds


def test_progress_prolongs_and_never_shortens() -> None:
    patience = Patience(100.0, 3.0)
    assert patience.deadline == 103.0
    patience.progress(102.0)
    assert patience.deadline == 102.0 + STALL_S
    patience.progress(50.0)
    assert patience.deadline == 102.0 + STALL_S


def test_only_the_first_connection_prolongs() -> None:
    patience = Patience(100.0, 1.0)
    patience.opened(100.5)
    assert patience.deadline == 100.5 + SIGN_S
    patience.opened(103.0)
    assert patience.deadline == 100.5 + SIGN_S
