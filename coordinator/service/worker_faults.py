"""Refusals on record, strikes, and what they lead to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from uuid import uuid4

from coordinator.domain.model import Holding, Lease, Refusal, Worker, WorkerState
from coordinator.domain.states import WORKER, move
from coordinator.domain.workers import after_fault
from coordinator.service.ports import Tx
from coordinator.service.worker_leases import abandon
from coordinator.service.worker_sessions import close_session

REFUSALS_PER_MINUTE = 120  # rows kept a worker and minute; what exceeds it is answered but not recorded


@dataclass(frozen=True, slots=True)
class RefusedWork:
    """One thing a worker did not get, in words."""

    slot: int
    code: str
    reason: str
    blame: str
    paid: bool
    tokens: int


async def record(tx: Tx, worker_id: str, lease: Lease | None, lease_id: str, refused: Sequence[RefusedWork], *, now: float) -> None:
    """Write refusal rows, at most REFUSALS_PER_MINUTE a worker. Paid ones always (they are money), and once a slot of a lease."""
    recent = await tx.count(Refusal, worker_id=worker_id, at__ge=now - 60.0)
    room = max(REFUSALS_PER_MINUTE - recent, 0)
    unpaid = [work for work in refused if not work.paid][:room]
    rows = [
        Refusal(
            id=f"paid/{lease_id[:200]}/{work.slot}" if work.paid else uuid4().hex,
            worker_id=worker_id,
            job_id=lease.job_id if lease else "",
            lease_id=lease_id[:200],
            group_id=lease.group_id if lease else "",
            slot=work.slot,
            code=work.code,
            reason=work.reason,
            blame=work.blame,
            paid=work.paid,
            tokens=work.tokens,
            at=now,
            quote_id=lease.quote_id if lease and work.paid else None,
        )
        for work in (*unpaid, *(work for work in refused if work.paid))
    ]
    unpaid_rows = [row for row in rows if not row.paid]
    if unpaid_rows:
        await tx.put(*unpaid_rows)
    for row in rows[len(unpaid_rows) :]:
        await tx.insert(row)  # sent again: the first one stands


async def strike(tx: Tx, worker_id: str, reason: str, *, limit: int, now: float) -> frozenset[str]:
    """Count one fault of the worker's own; in quarantine its leases go to others and its session ends. The ids of the jobs concerned."""
    worker = await tx.get(Worker, worker_id)
    if worker is None:
        return frozenset()
    strikes, state, words = after_fault(worker, limit=limit)
    if state is worker.state:
        await tx.put(replace(worker, strikes=strikes))
        return frozenset()
    state = move(WORKER, worker.state, "quarantined")
    full = f"{words}; the last one: {reason}"
    await tx.put(replace(worker, strikes=strikes, state=state, reason=full, state_since=now))
    await close_session(tx, worker, now=now)
    return await release_work(tx, worker_id, f"worker quarantined: {full}", now=now)


async def release_work(tx: Tx, worker_id: str, reason: str, *, now: float) -> frozenset[str]:
    """The worker will not work now: leases go to others, and it must prove its weights again."""
    await tx.delete(Holding, worker_id=worker_id)
    return await abandon(tx, worker_id, reason, now=now)


def is_present(worker: Worker) -> bool:
    """Whether silence of the worker is still watched."""
    return worker.state in (WorkerState.STANDBY, WorkerState.ACTIVE, WorkerState.DRAINING)
