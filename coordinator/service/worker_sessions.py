"""Sessions: the stays of workers that active time and cost derive from."""

from __future__ import annotations

from dataclasses import replace

from coordinator.domain.model import Worker, WorkerSession
from coordinator.service.ports import Tx


async def close_session(tx: Tx, worker: Worker, *, now: float, last_seen_at: float | None = None) -> None:
    """End the worker's newest session: active time stops at `last_seen_at`, by default now."""
    session = await tx.get(WorkerSession, worker.id, worker.session_epoch)
    if session is None or session.ended_at is not None:
        return
    seen = now if last_seen_at is None else max(session.last_seen_at, last_seen_at)
    await tx.put(replace(session, last_seen_at=seen, ended_at=seen))
