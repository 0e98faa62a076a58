"""Confirms a version by its canary (law 3): from here on the worker may take leases for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from coordinator.domain import canary
from coordinator.domain.model import Holding, Job, Lease, LeaseState, Metric, Publication, PublicationState, Worker, WorkerState
from coordinator.domain.paying import PAYABLE_ENDS
from coordinator.domain.staleness import last_step
from coordinator.domain.states import WORKER, move
from coordinator.service.deps import QUOTES, Deps
from coordinator.service.market import welcome
from coordinator.service.ports import Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.service.worker_faults import RefusedWork, record, strike
from coordinator.wire.messages import Confirm, ConfirmReply

HOLDINGS_KEPT = 8  # a worker and job: later ones than any live lease needs are kept for the measured broadcast times


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the worker is told, and which topics changed."""

    accepted: bool
    reason: str
    wake: frozenset[str] = frozenset()


async def confirm(deps: Deps, worker: Worker, message: Confirm) -> ConfirmReply:
    """Judge a canary against the published bits; a wrong one is the worker's fault."""
    answer = await deps.store.write(lambda tx: _confirm(tx, deps, worker, message))
    deps.reach("confirm.rows_written")
    if answer.accepted:
        deps.presence.has_fetched(worker.id, message.job_id, message.version)
    for topic in answer.wake:
        deps.wake.notify(topic)
    return ConfirmReply(accepted=answer.accepted, reason=answer.reason)


async def _confirm(tx: Tx, deps: Deps, worker: Worker, message: Confirm) -> _Answer:
    now = deps.clock.now()
    row, job = await tx.get(Worker, worker.id), await tx.get(Job, message.job_id)
    if row is None or row.session_epoch != worker.session_epoch:
        return _Answer(False, "old_session: a newer session with this key is active")
    if job is None:
        return _Answer(False, f"unknown_job: job {message.job_id} does not exist")
    if row.state is WorkerState.QUARANTINED:
        return _Answer(False, f"quarantined: {row.reason}")
    published = await tx.get(Publication, job.id, message.version, message.digest)
    if published is None or published.state is not PublicationState.PUBLISHED:
        return _Answer(False, await _not_public(tx, message, published))
    fits, words = await _judge(tx, row, published, message)
    if not fits:
        return await _wrong(tx, deps, row, message, words, now=now)
    await tx.put(_holding(row, message, now=now))
    await _trim(tx, row, job.id, now=now)
    await _record_figures(tx, published, message, worker_id=row.id, now=now)
    usable = job.committed_steps <= last_step(message.version, job.config.staleness.max)
    if row.state is WorkerState.STANDBY and usable:
        await tx.put(replace(row, state=move(WORKER, row.state, "version_confirmed"), reason="", state_since=now))
    if usable:
        await welcome(tx, job, row, now=now)
    return _Answer(True, words, frozenset({"workers", QUOTES, job.id}))


async def _not_public(tx: Tx, message: Confirm, published: Publication | None) -> str:
    if published is not None and published.state is PublicationState.ROLLED_BACK:
        return f"policy_rolled_back: version {message.version} was published anew with other weights; fetch its manifest again"
    newest = await tx.highest(Publication, "version", job_id=message.job_id, state=PublicationState.PUBLISHED)
    state = "unknown" if published is None else published.state.value
    return f"not_published: version {message.version} with digest {message.digest[:12]} is {state}; the newest version is {newest}"


async def _judge(tx: Tx, worker: Worker, published: Publication, message: Confirm) -> tuple[bool, str]:
    """Compare with the published bits and with the same engine's answer before the swap."""
    before = await tx.select(Holding, worker_id=worker.id, job_id=message.job_id, order_by="-confirmed_at", limit=1)
    previous = before[0] if before else None
    expected: Sequence[float] = published.canary_logprobs
    tolerance = canary.TOLERANCE.get(str(worker.engine.get("dtype")), min(canary.TOLERANCE.values()))
    if worker.engine.get("kind") == "scripted":
        expected = canary.scripted(published.digest, len(published.canary_logprobs))
    return canary.judge(
        message.canary_logprobs,
        expected,
        previous=previous.canary_logprobs if previous is not None else None,
        digest_changed=previous is not None and previous.digest != message.digest,
        tolerance=tolerance,
    )


async def _wrong(tx: Tx, deps: Deps, worker: Worker, message: Confirm, words: str, *, now: float) -> _Answer:
    """Put the refusal on record and count the fault."""
    code, _, _ = words.partition(":")
    work = RefusedWork(0, code, f"version {message.version}: {words}", "worker", False, 0)
    await record(tx, worker.id, None, "", [work], now=now)
    jobs = await strike(tx, worker.id, words, limit=deps.settings.strikes_to_quarantine, now=now)
    return _Answer(False, words, jobs | {"workers"})


def _holding(worker: Worker, message: Confirm, *, now: float) -> Holding:
    return Holding(
        worker_id=worker.id,
        job_id=message.job_id,
        version=message.version,
        digest=message.digest,
        canary_logprobs=message.canary_logprobs,
        confirmed_at=now,
        fetched_bytes=message.fetched_bytes,
        fetched_from_peers_bytes=message.fetched_from_peers_bytes,
        fetch_s=message.fetch_s,
        apply_s=message.apply_s,
    )


async def _record_figures(tx: Tx, published: Publication, message: Confirm, *, worker_id: str, now: float) -> None:
    """What the version cost until its newest receiver; the largest of each, over the receivers so far."""
    job_id, version = published.job_id, published.version
    slowest = {
        "publish/transfer_s": message.fetch_s,
        "publish/apply_s": message.assemble_s + message.apply_s,
        "publish/to_last_worker_s": max(now - published.published_at, 0.0),
    }
    figures = {}
    for name, value in slowest.items():
        known = await tx.get(Metric, job_id, name, version)
        figures[name] = max(value, known.value if known is not None else 0.0)
    receivers = {"job_id": job_id, "version": version, "digest": published.digest}
    fetched = await tx.total(Holding, "fetched_bytes", **receivers)
    full = await tx.get(Metric, job_id, "publish/bytes_full", version)
    if full is not None:
        count = await tx.count(Holding, **receivers, fetched_bytes__gt=0)
        figures["publish/bytes_saved"] = count * full.value - fetched
    figures["publish/bytes_fetched"] = float(fetched)
    await record_metrics(tx, job_id, version, figures, now=now)
    if message.skipped:
        told = {"worker": worker_id, "version": version, "count": message.skipped}
        await record_event(tx, job_id, "versions_skipped", told, now=now)


async def _trim(tx: Tx, worker: Worker, job_id: str, *, now: float) -> None:
    """Forget old holdings that no token can name whose lease is live, or ended by the coordinator and still paid."""
    holdings = await tx.select(Holding, worker_id=worker.id, job_id=job_id, order_by="-version")
    if len(holdings) <= HOLDINGS_KEPT:
        return
    leases = await tx.select(Lease, worker_id=worker.id, job_id=job_id, state=[LeaseState.LIVE, *PAYABLE_ENDS], deadline__ge=now)
    needed = min((lease.version for lease in leases), default=holdings[0].version)
    for holding in holdings[HOLDINGS_KEPT:]:
        if holding.version < needed:
            await tx.delete(Holding, worker_id=worker.id, job_id=job_id, version=holding.version, digest=holding.digest)
