"""The comparison of kappa's default with every other kappa, on a few fleets."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coordinator.domain.rehearsal import Rehearsed
from simulator.capacity import Case
from simulator.kappa_table import RULES, Compared, cases, compared, report

CASE = Case("idle", "cv 0.5", 4, 1, 0.5, 0.4)


def made(default: int, lines: dict[int, int]) -> Compared:
    """Busy for 0.7, 0.9 and 0.8 of the time."""
    one = Rehearsed(0.7, 0.0, {}, steps=1, completions=1, seconds=1.0, whole=True)
    return Compared(CASE, default, {1: one, 2: replace(one, utilisation=0.9), 3: replace(one, utilisation=0.8)}, lines)


@pytest.mark.parametrize(
    ("default", "lines", "chosen"),
    [
        (3, {1: 3, 2: 4, 3: 5}, (3, 3, 1, 2, 1)),
        (3, {1: 5, 2: 5, 3: 6}, (3, 3, 1, 3, 2)),
        (2, {1: 3, 2: 4, 3: 4}, (2, 3, 1, 2, 1)),
    ],
)
def test_what_each_rule_chooses(default: int, lines: dict[int, int], chosen: tuple[int, ...]) -> None:
    """S = 4: inside the line where that asks for 4 at most."""
    one = made(default, lines)
    assert tuple(rule(one) for rule in RULES.values()) == chosen
    assert [round(one.lost(kappa), 9) for kappa in (1, 2, 3)] == [0.2, 0.0, 0.1]


def test_the_table() -> None:
    """The default loses 0.1 on both, and that is far."""
    text = report([made(3, {1: 3, 2: 4, 3: 5})] * 2)
    assert "| the default (5 % of pauses, at most S - 1) | 0.100 | 2 | 0.100 | 0.000 |" in text


def test_a_fleet_is_rehearsed_at_every_kappa() -> None:
    """It idles for half a step at each publication: at kappa 1 the learner waits, and the default is the largest."""
    one = compared(CASE)
    assert (sorted(one.found), one.default) == ([1, 2, 3], 3)
    assert one.found[1].utilisation < one.found[3].utilisation - 0.03
    assert one.lines[3] > one.lines[1]


def test_the_fleets_have_a_choice() -> None:
    """Every mix that pauses is there."""
    assert {case.mix for case in cases()} == {"idle", "blend", "abort", "slow apply"}
