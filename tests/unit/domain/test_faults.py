"""Faults of other systems that the decisions rule out; the numbers are those of docs/faults.md."""

from __future__ import annotations

from itertools import permutations

from coordinator.domain.publication import is_due, retired
from coordinator.domain.seal import ReadyGroup, choose

SIGNAL = (0.0, 1.0)


def sealed(groups, step):
    return choose(groups, step=step, bound=2, groups_per_step=2, max_replacements=2, replaced=0)


def test_fault_02_time_in_the_queue_is_staleness() -> None:
    """Fresh when it was finished, the same group is 2 old in step 6 and 3 old in step 7: counted when it is used."""
    waiting = ReadyGroup(11, 4, SIGNAL)
    others = [ReadyGroup(12, 7, SIGNAL), ReadyGroup(13, 7, SIGNAL)]
    assert sealed([waiting, ReadyGroup(12, 6, SIGNAL)], 6).staleness == {0: 1, 2: 1}
    late = sealed([waiting, *others], 7)
    assert late.groups == (12, 13)
    assert late.staleness == {0: 2}
    assert late.rejected == ((11, "stale: oldest version 4 has staleness 3 in step 7, the bound is 2"),)


def test_fault_04_a_slow_group_goes_before_quick_ones_that_came_first() -> None:
    """By issue number, whatever the order of arrival: what is slow is trained while it still may be, not dropped for new groups."""
    for arrival in permutations([3, 4, 5, 6]):
        assert sealed([ReadyGroup(number, 3, SIGNAL) for number in arrival], 5).groups == (3, 4)


def test_fault_08_what_somebody_reads_stays_and_the_first_version_always_comes() -> None:
    """Version 1 is being fetched while 2 to 4 came out. After a resume nothing is published yet: the version is due at once, so
    nobody waits for the other side."""
    assert retired(range(5), held_or_leased={1, 3}, newest=4) == [0, 2]
    assert is_due(committed_steps=7, published=None, kappa=50, planned_steps=100)
