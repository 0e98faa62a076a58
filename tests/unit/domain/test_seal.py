"""The batch of a step: order, staleness, replacements, zero weight."""

from __future__ import annotations

import pytest

from coordinator.domain.seal import ReadyGroup, choose, teaches_nothing
from coordinator.domain.staleness import StalenessError

GOOD, DULL = (0.0, 1.0), (1.0, 1.0)


def ready(*numbers: int, version: int = 4, rewards: tuple[float | None, ...] = GOOD) -> list[ReadyGroup]:
    return [ReadyGroup(number, version, rewards) for number in numbers]


def sealed(groups, *, step=5, bound=2, per_step=2, replacements=2, replaced=0):
    return choose(
        groups,
        step=step,
        bound=bound,
        groups_per_step=per_step,
        max_replacements=replacements,
        replaced=replaced,
    )


def test_lowest_numbers_first_whatever_the_order_of_arrival() -> None:
    """B groups by issue number; staleness is counted exactly."""
    seal = sealed(ready(9, 3) + ready(7, version=5))
    assert seal.groups == (3, 7)
    assert seal.staleness == {0: 1, 1: 1}
    assert (seal.no_signal, seal.zero_weight, seal.rejected) == (False, (), ())
    assert seal.reason == "sealed 2 groups for step 5"


def test_too_few_groups_seal_nothing() -> None:
    """The reason says how many are ready."""
    seal = sealed(ready(3))
    assert seal.groups is None
    assert seal.staleness == {}
    assert seal.reason == "1 of 2 groups are ready for step 5"


def test_stale_groups_are_rejected_even_when_nothing_is_sealed() -> None:
    """Staleness 2 passes with S = 2, staleness 3 does not."""
    seal = sealed(ready(1, version=2) + ready(2, version=3))
    assert seal.groups is None
    assert [number for number, _ in seal.rejected] == [1]
    assert seal.rejected[0][1].startswith("stale: oldest version 2 has staleness 3 in step 5")


def test_a_version_from_the_future_raises() -> None:
    """Law 1: negative staleness is an error, never a pass."""
    with pytest.raises(StalenessError):
        sealed(ready(1, version=6))


def test_dull_groups_are_replaced_while_replacements_are_left() -> None:
    """Rejected as no_signal, so that others are issued; the step waits."""
    seal = sealed(ready(1, 2, rewards=DULL) + ready(3))
    assert seal.groups is None
    assert [reason.split(":")[0] for _, reason in seal.rejected] == ["no_signal", "no_signal"]


def test_dull_groups_behind_a_full_step_are_left_alone() -> None:
    """A later step has its own replacements."""
    seal = sealed(ready(1, 2) + ready(3, rewards=DULL))
    assert seal.groups == (1, 2)
    assert seal.rejected == ()


def test_after_the_replacements_dull_groups_fill_the_step_at_zero_weight() -> None:
    """The batch is marked no_signal."""
    seal = sealed(ready(1, 2, rewards=DULL) + ready(3), replaced=2)
    assert seal.groups == (1, 3)
    assert seal.zero_weight == (1,)
    assert seal.no_signal
    assert "1 of them at zero weight" in seal.reason


def test_signal_goes_before_zero_weight() -> None:
    """Groups with signal fill the step even when dull ones have lower numbers."""
    seal = sealed(ready(1, 2, rewards=DULL) + ready(3, 4), replaced=2)
    assert seal.groups == (3, 4)
    assert not seal.no_signal
    assert seal.rejected == ()


def test_replacements_are_counted_over_the_whole_step() -> None:
    """One was replaced before, one is left: the second dull group stays."""
    seal = sealed(ready(1, 2, 3, rewards=DULL), replaced=1)
    assert [number for number, _ in seal.rejected] == [1]
    assert seal.groups == (2, 3)
    assert seal.zero_weight == (2, 3)


def test_more_replaced_than_allowed_now() -> None:
    """The limit may have been lowered meanwhile."""
    assert sealed(ready(1, 2, rewards=DULL), replacements=0, replaced=3).zero_weight == (1, 2)


@pytest.mark.parametrize(
    ("groups", "nothing"),
    [
        ([DULL, DULL], True),
        ([DULL, GOOD], False),
        ([GOOD], False),
        ([(1.0,), (None, 2.0), (0.5, 0.5 + 1e-7)], True),  # alone, alone, alike
        ([(None, 0.0, 1.0)], False),
    ],
)
def test_a_step_teaches_by_any_group_whose_scores_differ(groups: list[tuple[float | None, ...]], nothing: bool) -> None:
    assert teaches_nothing(groups) is nothing
