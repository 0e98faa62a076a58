"""Ends leases: the lease closes with its reason, and the slots it did not settle are open again for others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from coordinator.domain.model import Lease, LeaseState, Rollout, RolloutState
from coordinator.domain.states import LEASE, ROLLOUT, move
from coordinator.service.ports import Tx

EVENTS = {
    LeaseState.DONE: "all_settled",
    LeaseState.EXPIRED: "expired",
    LeaseState.DEAD: "died",
    LeaseState.CANCELLED: "cancelled",
    LeaseState.ABANDONED: "abandoned",
}


def closed(lease: Lease, end: LeaseState, reason: str, *, now: float) -> Lease:
    """The lease, ended."""
    return replace(lease, state=move(LEASE, lease.state, EVENTS[end]), reason=reason, closed_at=now)


def reopened(rollout: Rollout) -> Rollout:
    """A leased slot, open again. `worker_id` stays: another worker is preferred for the next attempt."""
    return replace(rollout, state=move(ROLLOUT, rollout.state, "released"), lease_id=None, attempts=rollout.attempts + 1)


async def end_leases(tx: Tx, ends: Sequence[tuple[Lease, LeaseState, str]], *, now: float) -> frozenset[str]:
    """Close LIVE leases and reopen their unsettled slots; the ids of the jobs concerned."""
    if not ends:
        return frozenset()
    await tx.put(*(closed(lease, end, reason, now=now) for lease, end, reason in ends))
    await reopen_slots(tx, [lease.id for lease, _, _ in ends])
    return frozenset(lease.job_id for lease, _, _ in ends)


async def reopen_slots(tx: Tx, lease_ids: Sequence[str]) -> None:
    """Open again what these leases hold unsettled."""
    held = await tx.select(Rollout, lease_id=list(lease_ids), state=RolloutState.LEASED)
    if held:
        await tx.put(*map(reopened, held))


async def abandon(tx: Tx, worker_id: str, reason: str, *, now: float) -> frozenset[str]:
    """End every live lease of a worker; the ids of the jobs concerned."""
    leases = await tx.select(Lease, worker_id=worker_id, state=LeaseState.LIVE)
    return await end_leases(tx, [(lease, LeaseState.ABANDONED, reason) for lease in leases], now=now)
