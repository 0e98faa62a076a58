"""Planted faults: the simulator finds each within its budget, and finds nothing in the code as it is."""

from __future__ import annotations

import pytest

from simulator.faults.mutations import MUTANTS, Mutant
from simulator.faults.patching import Patch, planted
from simulator.faults.world import run
from simulator.mutants import SEEDS, hunt, table


def test_there_are_enough_and_each_has_its_own_name() -> None:
    assert len(MUTANTS) >= 20
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {law for mutant in MUTANTS for law in mutant.law.split()} >= {"1", "2", "3", "5", "6", "7"}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found(mutant: Mutant) -> None:
    found = hunt(mutant)
    assert found is not None, f"{mutant.what}: not found"
    print(table([(mutant, found)]))


def test_the_code_as_it_is_passes_the_same_seeds() -> None:
    for seed in sorted({seed for seeds in SEEDS.values() for seed in seeds}):
        run(seed)


def test_a_patch_leaves_nothing_behind() -> None:
    from coordinator.domain import grant
    from coordinator.service import leasing

    before = grant.grantable

    def instead(**_: object) -> None:
        """Never called."""

    def plant(patch: Patch) -> None:
        patch.function(before, instead)

    with planted(plant):
        assert leasing.grantable is instead
        assert grant.grantable is instead
    assert leasing.grantable is before
    assert grant.grantable is before
