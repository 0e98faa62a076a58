"""No orphan, no machine rented twice for one request, no budget passed: whatever the provider does and wherever the coordinator dies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pricing.rental_plan import match
from tests.integration.renting.scene import CRASHES, LIMITS
from tests.integration.renting.sequences import HastyProvider, run_sequences
from tests.standin.faults import AFTER, BEFORE, ONLY

FAULTS = {*BEFORE, *AFTER, *(name for names in ONLY.values() for name in names), "storm of 5xx and 429"}
FATES = {"slow start", "outbid", "machine died", "price rise", "stuck terminating", "destroy without effect", "listed late"}


async def test_random_fault_sequences_leave_no_orphan_rent_nothing_twice_and_pass_no_budget(stores, capsys):
    """32 seeds; every fault, every fate and a crash after every step really happened."""
    tally = await run_sequences(range(32), stores)
    with capsys.disabled():
        print(f"\n{tally.table()}")
    assert not tally.failures, "\n".join(tally.failures)
    assert set(tally.fired) >= FAULTS | FATES
    assert set(tally.crashes) == set(CRASHES)
    assert tally.busy >= 24  # a coordinator that rents nothing keeps every law


@pytest.mark.long
async def test_500_random_fault_sequences(stores, capsys):
    tally = await run_sequences(range(1000, 1500), stores)
    with capsys.disabled():
        print(f"\n{tally.table()}")
    assert not tally.failures, "\n".join(tally.failures)


async def test_when_a_create_is_sent_again_without_looking_machines_are_rented_twice(stores):
    """The sequences can fail: the list is not looked at before a create is sent again."""
    tally = await run_sequences(range(1, 13, 2), stores, caller=HastyProvider)
    assert any("at once" in words for words in tally.failures)


async def test_when_nothing_is_reserved_for_stopping_budgets_are_passed(stores):
    """The sequences can fail: the reserve does not cover the time until a machine is stopped."""
    tally = await run_sequences(range(5), stores, limits=replace(LIMITS, blind_s=0.0, stop_s=0.0))
    assert any("spent" in words for words in tally.failures)


async def test_when_orphans_are_not_swept_they_are_found(stores, monkeypatch):
    """The sequences can fail: machines with our label that no row explains are left alone."""
    monkeypatch.setattr("coordinator.service.renting.match", lambda rows, handles: replace(match(rows, handles), strays=()))
    tally = await run_sequences(range(5), stores)
    assert any("orphan" in words for words in tally.failures)
