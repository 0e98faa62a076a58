"""kappa, when to publish, what to retire."""

from __future__ import annotations

import pytest

from coordinator.domain.publication import is_due, kappa, retired


def auto(bound: int, train_s=10.0, bcast=0.0, pause=0.0) -> int:
    return kappa("auto", bound=bound, train_s=train_s, bcast_p95_s=bcast, pause_s=pause)


@pytest.mark.parametrize(
    ("bcast", "pause", "expected"),
    [
        (10.0, 0.0, 1),
        (10.1, 0.0, 2),
        (25.0, 0.0, 3),
        (0.0, 0.5, 1),
        (0.0, 0.6, 2),
        (25.0, 2.0, 4),
        (1e9, 0.0, 5),
    ],
)
def test_auto_is_the_smallest_that_fits(bcast: float, pause: float, expected: int) -> None:
    """k * 10 s must cover the broadcast, and the pause must be at most 5 % of it; at most S - 1 = 5."""
    assert auto(6, bcast=bcast, pause=pause) == expected


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_small_bounds_publish_every_step(bound: int) -> None:
    """max(1, S - 1) is 1."""
    assert auto(bound, bcast=1e9) == 1


@pytest.mark.parametrize("train_s", [None, 0.0])
def test_nothing_measured_publishes_every_step(train_s) -> None:
    """Before the first step there is no ground to skip versions."""
    assert kappa("auto", bound=8, train_s=train_s, bcast_p95_s=50.0, pause_s=1.0) == 1
    assert kappa("auto", bound=8, train_s=10.0, bcast_p95_s=None, pause_s=None) == 1


@pytest.mark.parametrize(("setting", "bound", "expected"), [(3, 6, 3), (9, 4, 5), (2, 0, 1), (1, 0, 1)])
def test_a_setting_is_kept_below_the_deadlock(setting: int, bound: int, expected: int) -> None:
    """With kappa above S + 1 the learner would reach a step that no published version serves."""
    assert kappa(setting, bound=bound, train_s=1.0, bcast_p95_s=1.0, pause_s=1.0) == expected


@pytest.mark.parametrize(
    ("committed", "published", "due"),
    [(0, None, True), (4, 4, False), (5, 4, False), (7, 4, True), (9, 12, False), (10, 9, True)],
)
def test_is_due(committed: int, published: int | None, due: bool) -> None:
    """First, every third, and the last of ten; never again what is public, also after a step back."""
    assert is_due(committed_steps=committed, published=published, kappa=3, planned_steps=10) is due


def test_retired() -> None:
    """Older than the newest and needed by nobody."""
    assert retired([5, 1, 2, 3, 4], held_or_leased={2, 4}, newest=4) == [1, 3]
