"""How leases are sized and ended."""

from __future__ import annotations

import pytest

from coordinator.domain.leases import LeaseLimits, ending, groups_for, moved_deadline, wall_deadline
from coordinator.domain.model import LeaseState

LIMITS = LeaseLimits(min_s=30.0, max_s=3600.0, slowest_tokens_per_s=2.0)


def seconds(*, slots: int = 4, tokens_per_s: float = 8.0, max_new_tokens: int = 100) -> float:
    deadline = wall_deadline(1000.0, slots=slots, max_new_tokens=max_new_tokens, tokens_per_s=tokens_per_s, limits=LIMITS)
    return deadline - 1000.0


def test_the_wall_gives_three_times_the_measured_time() -> None:
    """4 slots of 100 tokens at 8 tokens/s take 50 s; the lease lives 150 s."""
    assert seconds() == pytest.approx(150.0)


def test_the_wall_assumes_the_slowest_rate_when_nothing_is_measured() -> None:
    """400 tokens at 2 tokens/s, three times."""
    assert seconds(tokens_per_s=0.0) == pytest.approx(600.0)


def test_the_wall_has_bounds() -> None:
    """Neither hopelessly short nor for ever."""
    assert seconds(tokens_per_s=1e6) == 30.0
    assert seconds(slots=4096) == 3600.0


def end(lease, *, now=50.0, steps=7, alive=True, lost=frozenset()):
    return ending(lease, now=now, committed_steps=steps, worker_alive=alive, rolled_back=lost)


def test_a_lease_lives_until_its_last_step_and_its_deadline(make_lease) -> None:
    """Committed steps equal to x + S, and the very second of the deadline, still count."""
    assert end(make_lease(), now=100.0, steps=7) is None


@pytest.mark.parametrize(
    ("case", "state", "code"),
    [
        ({"alive": False}, LeaseState.ABANDONED, "worker_gone"),
        ({"now": 100.5}, LeaseState.EXPIRED, "lease_expired"),
        ({"lost": frozenset({"d5"})}, LeaseState.DEAD, "policy_rolled_back"),
        ({"steps": 8}, LeaseState.DEAD, "lease_dead_by_version"),
        ({"steps": 8, "now": 101.0}, LeaseState.EXPIRED, "lease_expired"),
    ],
)
def test_endings(make_lease, case, state, code) -> None:
    """Each end has its state and code; late by the wall goes before dead by version."""
    ended = end(make_lease(), **case)
    assert ended is not None
    assert ended[0] is state
    assert ended[1].startswith(code + ":")


def test_an_ended_lease_does_not_end_again(make_lease) -> None:
    """Only LIVE leases end."""
    assert end(make_lease(state=LeaseState.DONE), alive=False) is None


def test_a_restart_moves_deadlines_forward_only(make_lease) -> None:
    """At least now + grace; a later deadline stays."""
    assert moved_deadline(make_lease(), now=80.0, grace_s=60.0) == 140.0
    assert moved_deadline(make_lease(), now=20.0, grace_s=60.0) == 100.0


@pytest.mark.parametrize(
    ("free", "grantable", "groups"),
    [(0, 5, 0), (-1, 5, 0), (3, 5, 1), (3, 0, 0), (3, -2, 0), (8, 5, 2), (11, 5, 2), (100, 5, 5)],
)
def test_groups_for(free: int, grantable: int, groups: int) -> None:
    """Whole groups of four that fit, at least one when something is free, never more than the rule grants."""
    assert groups_for(free, group_size=4, grantable=grantable) == groups


def test_a_lowered_bound_ends_a_lease_early_and_a_raised_one_changes_nothing(make_lease) -> None:
    lease = make_lease(version=3, last_step=7)
    alive = {"now": lease.issued_at, "worker_alive": True, "rolled_back": frozenset()}
    assert ending(lease, committed_steps=5, bound=4, **alive) is None
    assert ending(lease, committed_steps=5, bound=2, **alive) is None
    state, reason = ending(lease, committed_steps=5, bound=1, **alive)
    assert (state, reason.split(":")[0]) == (LeaseState.DEAD, "lease_dead_by_version")
    assert ending(lease, committed_steps=8, bound=9, **alive)[0] is LeaseState.DEAD
