"""How long a lease lives, what ends it, and how much work one request gets.

Reasons start with a stable code and a colon: ``lease_expired: ...``.
"""

from __future__ import annotations

from dataclasses import dataclass

from coordinator.domain.model import Lease, LeaseState
from coordinator.domain.staleness import last_step

MARGIN = 3.0  # a worker may be this many times slower than it measured before its lease ends


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Bounds on a lease's wall time."""

    min_s: float
    max_s: float
    slowest_tokens_per_s: float  # assumed when nothing is measured, and never less


def wall_deadline(now: float, *, slots: int, max_new_tokens: int, tokens_per_s: float, limits: LeaseLimits) -> float:
    """When the lease ends by the wall, Unix seconds.

    `slots` counts all slots that the worker will be generating at once, this lease's included: they share its rate.
    `tokens_per_s` is the worker's measured rate over all slots; 0 when it is not known.
    """
    rate = max(tokens_per_s, limits.slowest_tokens_per_s)
    needed_s = MARGIN * slots * max_new_tokens / rate
    return now + min(max(needed_s, limits.min_s), limits.max_s)


def ending(
    lease: Lease, *, now: float, committed_steps: int, bound: int | None = None, worker_alive: bool, rolled_back: frozenset[str]
) -> tuple[LeaseState, str] | None:
    """What ends a LIVE lease now, and why; None while it lives, or when it ended before.

    `bound` is S now: lowered since the grant, it ends a lease early; raised, it changes nothing (None: as at the grant).
    The wall comes before the version: only work that is in time by the wall is the coordinator's to pay for.
    """
    if lease.state is not LeaseState.LIVE:
        return None
    if not worker_alive:
        return LeaseState.ABANDONED, f"worker_gone: worker {lease.worker_id} left, was lost or is quarantined"
    if now > lease.deadline:
        return LeaseState.EXPIRED, f"lease_expired: its wall deadline passed {now - lease.deadline:.1f} s ago"
    if lease.digest in rolled_back:
        return LeaseState.DEAD, f"policy_rolled_back: version {lease.version} was published anew with other weights"
    latest = lease.last_step if bound is None else min(lease.last_step, last_step(lease.version, bound))
    if committed_steps > latest:
        return LeaseState.DEAD, (
            f"lease_dead_by_version: version {lease.version} serves steps up to {latest}; {committed_steps} steps are committed"
        )
    return None


def moved_deadline(lease: Lease, *, now: float, grace_s: float) -> float:
    """The deadline after a coordinator restart: nobody could submit while it was down."""
    return max(lease.deadline, now + grace_s)


def groups_for(free_slots: int, *, group_size: int, grantable: int) -> int:
    """Whole groups for a worker with `free_slots`; one, done in turns, when it has fewer slots than a group."""
    if free_slots <= 0:
        return 0
    return min(max(free_slots // group_size, 1), max(grantable, 0))
