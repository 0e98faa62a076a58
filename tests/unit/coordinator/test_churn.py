"""The demo's churn: everyone dies, everyone returns in time, and enough stay."""

from __future__ import annotations

import pytest

from coordinator.demo.churn import LAST_RETURN, LONG_ABSENCE, STAY, churn, longest_absence, one_kill


@pytest.mark.parametrize("workers", [3, 6, 12])
@pytest.mark.parametrize("steps", [20, 150])
def test_a_killed_worker_always_returns_and_enough_stay(workers: int, steps: int) -> None:
    away: set[int] = set()
    killed: set[int] = set()
    for change in churn(workers, steps, seed=3):
        assert 1 <= change.step <= LAST_RETURN * steps
        if change.kind == "kill":
            assert change.place not in away
            away.add(change.place)
            killed.add(change.place)
        else:
            away.remove(change.place)
        assert workers - len(away) >= STAY
    assert away == set()
    assert len(killed) > 1 or (workers, steps) == (3, 20)  # too short for a second one beside the long absence


def test_one_worker_misses_thirty_versions() -> None:
    changes = churn(6, 150, seed=0)
    first = [change for change in changes if change.place == 0][:2]
    assert [change.kind for change in first] == ["kill", "join"]
    assert first[1].step - first[0].step == LONG_ABSENCE
    assert longest_absence(changes) == LONG_ABSENCE


def test_the_schedule_is_the_seeds() -> None:
    assert churn(6, 150, seed=1) == churn(6, 150, seed=1) != churn(6, 150, seed=2)


def test_two_workers_are_left_alone() -> None:
    assert churn(2, 150, seed=0) == []


def test_one_kill_has_no_return() -> None:
    (only,) = one_kill(9)
    assert (only.step, only.place, only.kind) == (3, 0, "kill")
    assert longest_absence([only]) == 0
