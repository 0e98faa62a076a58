"""The pool as operators see and steer it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.domain.model import Holding, Lease, LeaseState, Rollout, Worker, WorkerSession, WorkerState
from coordinator.domain.states import WORKER, IllegalMove, move
from coordinator.service.accounting import accepted_tokens
from coordinator.service.ledger import earned_uusd, paid_out_uusd
from coordinator.service.operator_done import Done, said
from coordinator.service.operator_errors import conflict, unknown
from coordinator.service.operator_figures import active_s
from coordinator.service.operator_views import ACCEPTED, refused_by_code
from coordinator.service.ports import Reader, Tx
from coordinator.service.tokens import Caller
from coordinator.service.worker_faults import release_work
from coordinator.service.worker_sessions import close_session
from coordinator.wire.rest import HoldingView, SessionView, WorkerList, WorkersQuery, WorkerSummary, WorkerView

SESSIONS_SHOWN = 50
HOLDINGS_SHOWN = 100


async def listed(reader: Reader, query: WorkersQuery) -> WorkerList:
    """Workers, those seen last first."""
    filters: dict[str, object] = {} if query.state is None else {"state": WorkerState(query.state)}
    rows = await reader.select(Worker, order_by="-last_seen_at", limit=query.limit, **filters)
    return WorkerList(workers=tuple([WorkerSummary(**await _line(reader, row)) for row in rows]))


async def one(reader: Reader, worker_id: str) -> WorkerView:
    """A whole worker."""
    row = await _worker(reader, worker_id)
    sessions = await reader.select(WorkerSession, worker_id=row.id, order_by="-epoch")
    holdings = await reader.select(Holding, worker_id=row.id, order_by="-confirmed_at", limit=HOLDINGS_SHOWN)
    return WorkerView(
        **await _line(reader, row),
        public_key=row.public_key,
        session_epoch=row.session_epoch,
        accepted_tokens=await accepted_tokens(reader, worker_id=row.id),
        refused=await refused_by_code(reader, worker_id=row.id),
        active_s=active_s(sessions),
        earned_uusd=await earned_uusd(reader, row.id),
        paid_out_uusd=await paid_out_uusd(reader, row.id),
        sessions=tuple(_session(session) for session in sessions[:SESSIONS_SHOWN]),
        holdings=tuple(_holding(holding) for holding in holdings),
    )


async def _worker(reader: Reader, worker_id: str) -> Worker:
    row = await reader.get(Worker, worker_id)
    if row is None:
        raise unknown("worker", worker_id)
    return row


async def _newest_confirmed(reader: Reader, worker_id: str) -> int | None:
    """The version it confirmed last, of whichever job it serves now."""
    last = await reader.select(Holding, worker_id=worker_id, order_by="-confirmed_at", limit=1)
    return last[0].version if last else None


async def _line(reader: Reader, row: Worker) -> dict[str, Any]:
    shown = ("id", "name", "owner", "reason", "state_since", "joined_at", "last_seen_at", "engine", "price_uusd_per_hour")
    more = ("max_slots", "tokens_per_s", "activity", "strikes")
    return {
        **{name: getattr(row, name) for name in (*shown, *more)},
        "state": row.state.value,
        "version": await _newest_confirmed(reader, row.id),
        "live_leases": await reader.count(Lease, worker_id=row.id, state=LeaseState.LIVE),
        "accepted_rollouts": await reader.count(Rollout, worker_id=row.id, state=ACCEPTED),
    }


def _session(row: WorkerSession) -> SessionView:
    return SessionView(
        epoch=row.epoch,
        started_at=row.started_at,
        last_seen_at=row.last_seen_at,
        ended_at=row.ended_at,
        price_uusd_per_hour=row.price_uusd_per_hour,
    )


def _holding(row: Holding) -> HoldingView:
    return HoldingView(
        job_id=row.job_id,
        version=row.version,
        digest=row.digest,
        confirmed_at=row.confirmed_at,
        fetched_bytes=row.fetched_bytes,
        fetched_from_peers_bytes=row.fetched_from_peers_bytes,
        fetch_s=row.fetch_s,
        apply_s=row.apply_s,
    )


async def drain(tx: Tx, caller: Caller, worker_id: str, reason: str, *, now: float) -> Done:
    """No new leases; it finishes what it has and leaves (the order rides on its next heartbeat)."""
    row = _moved(await _worker(tx, worker_id), "drain_ordered", "drained")
    return await _save(tx, replace(row, reason=said("drained", caller, reason), state_since=now))


async def quarantine(tx: Tx, caller: Caller, worker_id: str, reason: str, *, now: float) -> Done:
    """No leases until it is released or its time is served; its live leases end, so that others get the slots at once."""
    row = _moved(await _worker(tx, worker_id), "quarantined", "quarantined")
    words = said("quarantined", caller, reason)
    jobs = await release_work(tx, worker_id, f"worker {words}", now=now)
    await close_session(tx, row, now=now)
    return await _save(tx, replace(row, reason=words, state_since=now), jobs)


async def release(tx: Tx, caller: Caller, worker_id: str, reason: str, *, now: float) -> Done:
    """Ends a drain or a quarantine, and forgets its strikes. After a quarantine it joins again by itself, in a new session."""
    row = _moved(await _worker(tx, worker_id), "released", "released")
    return await _save(tx, replace(row, reason=said("released", caller, reason), state_since=now, strikes=0))


async def _save(tx: Tx, row: Worker, jobs: frozenset[str] = frozenset()) -> Done:
    await tx.put(row)
    return Done(await one(tx, row.id), frozenset({"workers", *jobs}))


def _moved(row: Worker, event: str, verb: str) -> Worker:
    try:
        return replace(row, state=move(WORKER, row.state, event))
    except IllegalMove as error:
        raise conflict(
            "illegal_state",
            f"worker {row.id} is {row.state.value} and cannot be {verb}",
            field="worker_id",
            fix=f"look at the worker's state: echo2 worker show {row.id}, or GET /api/v1/workers/{row.id}",
        ) from error
