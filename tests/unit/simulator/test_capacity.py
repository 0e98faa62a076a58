"""The capacity model keeps its promises over the grid, and its rehearsal agrees with the spine, which runs on rows."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random
from statistics import mean

import pytest

from coordinator.domain.capacity import assess
from coordinator.domain.rehearsal import Player, Rehearsal, rehearse
from simulator import spine
from simulator.capacity import CAP, LOADS, Case, capped_mean, drawn, grid, inputs_of, measure
from simulator.capacity_table import broken, describe, report
from simulator.scenario import MAX_TOKENS, MEAN_TOKENS, Scenario, WorkerModel

EVERY = 66  # cases of the quick sample


def test_the_grid_covers_what_it_says() -> None:
    """All S, both tails, all mixes, T_bcast and T_gen on both sides of T_train, two T_train, three R."""
    cases = grid()
    assert {case.bound for case in cases} == {0, 1, 2, 3, 6, 11}
    assert {case.tail for case in cases} == {"cv 0.5", "heavy"}
    assert len({case.mix for case in cases}) == 6
    assert len({(case.bcast, case.generation) for case in cases}) == 12
    assert len({case.train_s for case in cases}) == 2
    assert len({case.group_size * case.groups_per_step for case in cases}) == 3
    assert len(set(cases)) == len(cases)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("mix", ["one", "mixed", "many", "blend"])
def test_a_fleet_is_made_for_its_load(mix: str, load: float) -> None:
    """Offered over required is the load, whole slots or not."""
    inputs, reachable = inputs_of(Case(mix, "heavy", 6, 2, 0.5, 0.4), load)
    assert reachable
    assert assess(inputs).headroom == pytest.approx(load, rel=1e-6)


@pytest.mark.parametrize("tail", ["cv 0.5", "heavy"])
def test_drawn_lengths_have_mean_one(tail: str) -> None:
    """The cap takes mass away; dividing by what is left gives it back."""
    draw, rng = drawn(tail), Random(0)
    assert mean(draw(rng) for _ in range(100_000)) == pytest.approx(1.0, abs=0.01)
    assert capped_mean(0.05) == pytest.approx(1.0)
    assert capped_mean(3.0) < 1.0 < CAP


def _judge(cases: list[Case]) -> None:
    results = [measure(case, load) for case in cases for load in LOADS]
    faults = [f"{broken(one)}: {describe(one)}" for one in results if broken(one)]
    assert not faults, "\n".join(faults)
    assert sum(one.inside for one in results) > len(results) // 8  # the promises inside the line were looked at
    assert "promises broken: 0" in report(results)


def test_a_sample_of_the_grid_keeps_its_promises() -> None:
    """Utilisation, discards and forecast, within the limits of `simulator.capacity_table`."""
    _judge(grid()[::EVERY])


@pytest.mark.long
def test_the_whole_grid_keeps_its_promises() -> None:
    _judge(grid())


FLEET = (WorkerModel(4, 8.0), WorkerModel(8, 16.0), WorkerModel(4, 16.0), WorkerModel(2, 4.0))
FLAT = (WorkerModel(16, 8.0),) * 4


def _both(fleet: tuple[WorkerModel, ...], bound: int, kappa: int, bcast: float, load: float, tail: float, seeds: int):
    """Utilisation and discards of the spine and of the rehearsal, for the same job of 60 steps from start to end."""
    scenario = Scenario(fleet, steps=60, groups_per_step=16, bound=bound, publish_every=kappa, tail=tail, load=load, beat_s=0.5)
    scenario = replace(scenario, bcast_s=bcast * scenario.train_s)
    players = tuple(Player(one.slots, MEAN_TOKENS / one.tokens_per_s, scenario.bcast_s) for one in fleet)
    job = Rehearsal(
        players, 4, 16, bound, kappa, scenario.train_s, scenario.grade_s, steps=60, warm_up=0, planned_steps=scenario.steps
    )

    def draw(rng: Random) -> float:
        tokens = MEAN_TOKENS * math.exp(tail * rng.gauss(0.0, 1.0) - tail**2 / 2)
        return min(max(round(tokens), 1), MAX_TOKENS) / MEAN_TOKENS

    rows = [spine.run(replace(scenario, seed=seed)) for seed in range(seeds)]
    quick = [rehearse(job, draw, seed) for seed in range(4 * seeds)]
    return [(mean(one.utilisation for one in found), mean(one.discards for one in found)) for found in (rows, quick)]


@pytest.mark.parametrize(
    ("fleet", "bound", "kappa", "bcast", "load"),
    [
        (FLEET, 1, 1, 0.3, 1.15),
        (FLEET, 3, 2, 0.5, 0.9),
        (FLAT, 2, 1, 0.2, 1.15),
    ],
)
def test_the_rehearsal_agrees_with_the_spine(fleet, bound: int, kappa: int, bcast: float, load: float) -> None:
    """Leases, admission, groups and seal on rows, events in another loop: the same figures, outside the line and inside."""
    rows, quick = _both(fleet, bound, kappa, bcast, load, 0.5, seeds=1)
    assert quick == pytest.approx(rows, abs=0.03)


@pytest.mark.long
@pytest.mark.parametrize("tail", [0.5, 1.0])
@pytest.mark.parametrize("load", [0.9, 1.15])
@pytest.mark.parametrize(
    ("bound", "kappa", "bcast"), [(0, 1, 0.3), (1, 1, 0.3), (2, 1, 0.2), (3, 2, 0.5), (6, 2, 0.5), (6, 5, 0.8)]
)
@pytest.mark.parametrize("fleet", [FLEET, FLAT])
def test_the_rehearsal_agrees_with_the_spine_everywhere(fleet, bound, kappa, bcast, load, tail) -> None:
    """With heavy tails the last groups of a job count too."""
    rows, quick = _both(fleet, bound, kappa, bcast, load, tail, seeds=4)
    assert quick == pytest.approx(rows, abs=0.03)
