"""Announces policy versions: snapshot directory, encoded pieces, signed manifest, then the row that makes it public.

The identity of a version is (number, digest). When a replay after a learner crash gives a published version other bits, the
old digest is rolled back: its leases end, its queued rollouts are rejected as `policy_rolled_back` and paid.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from coordinator.domain import publication as rules
from coordinator.domain.model import (
    Batch,
    BatchState,
    CheckpointRow,
    Group,
    GroupState,
    Holding,
    Job,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Refusal,
    Rollout,
)
from coordinator.domain.seeds import derive
from coordinator.domain.states import GROUP, LEASE, PUBLICATION, move
from coordinator.service.deps import Deps
from coordinator.service.job_ports import Publisher, SignedManifest
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.wire.learner_link import Snapshotted

RECENT = 20  # steps and refreshes that the measured inputs of kappa look back on


def snapshot_directory(deps: Deps, job: Job, version: int) -> Path:
    """Where the learner writes a version; the fence keeps a replay from overwriting what an older learner wrote."""
    return deps.settings.data_dir / "snapshots" / job.id / f"v{version:08d}-{job.learner_fence}"


async def published(reader: Reader, job_id: str) -> list[Publication]:
    """Publications that workers may hold, oldest version first."""
    return await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED, order_by="version")


async def announce(deps: Deps, publisher: Publisher, job: Job, shot: Snapshotted, canary_ids: Sequence[int]) -> None:
    """Encode and publish; an identical digest that is already public changes nothing."""
    signed = await publisher.publish(Path(shot.directory), job_id=job.id, version=shot.version, canary_ids=canary_ids)
    deps.reach("publish.pieces_written")
    fresh = await deps.store.write(lambda tx: _save(tx, job, shot, signed, now=deps.clock.now()))
    deps.reach("publish.rows_written")
    if not fresh:
        shutil.rmtree(shot.directory, ignore_errors=True)
    deps.wake.notify(job.id)


async def _save(tx: Tx, job: Job, shot: Snapshotted, signed: SignedManifest, *, now: float) -> bool:
    """Write the publication's row; False when this very digest is public already."""
    same = await tx.select(Publication, job_id=job.id, version=shot.version, state=PublicationState.PUBLISHED)
    if any(p.digest == signed.digest for p in same):
        return False
    for lost in same:
        await roll_back(tx, lost, now=now)
    await tx.put(
        Publication(
            job_id=job.id,
            version=shot.version,
            digest=signed.digest,
            state=PublicationState.PUBLISHED,
            manifest=signed.text,
            signature=signed.signature,
            directory=shot.directory,
            canary_logprobs=shot.canary_logprobs,
            published_at=now,
            encode_s=signed.encode_s,
        )
    )
    await record_event(tx, job.id, "version_published", {"version": shot.version, "digest": signed.digest}, now=now)
    figures = {"publish/snapshot_s": shot.seconds, "publish/encode_s": signed.encode_s}
    await record_metrics(tx, job.id, shot.version, figures, now=now)
    return True


async def roll_back(tx: Tx, lost: Publication, *, now: float) -> None:
    """A replay gave the version other bits: nothing made by the lost ones is trained any more."""
    await tx.put(replace(lost, state=move(PUBLICATION, lost.state, "rolled_back")))
    await tx.delete(Holding, job_id=lost.job_id, digest=lost.digest)
    reason = f"policy_rolled_back: version {lost.version} has other bits after the learner's replay"
    for lease in await tx.select(Lease, job_id=lost.job_id, digest=lost.digest, state=LeaseState.LIVE):
        await tx.put(replace(lease, state=move(LEASE, lease.state, "died"), reason=reason, closed_at=now))
    live = await tx.select(Group, job_id=lost.job_id, state=[GroupState.ISSUED, GroupState.READY])
    rollouts = await tx.select(Rollout, group_id=[g.id for g in live]) if live else []
    stained = [r for r in rollouts if lost.digest in r.digests.values()]
    ids = {r.group_id for r in stained}
    for group in live:
        if group.id in ids:
            await tx.put(replace(group, state=move(GROUP, group.state, "rejected"), reason=reason, settled_at=now))
    for rollout in stained:
        await tx.put(_paid_refusal(rollout, reason, now=now))
    await record_event(
        tx, lost.job_id, "policy_rolled_back", {"version": lost.version, "digest": lost.digest, "groups": len(ids)}, now=now
    )


def _paid_refusal(rollout: Rollout, reason: str, *, now: float) -> Refusal:
    return Refusal(
        id=f"{rollout.group_id}/s{rollout.slot}/{derive(0, rollout.lease_id or '', rollout.slot):x}",
        worker_id=rollout.worker_id or "",
        job_id=rollout.job_id,
        lease_id=rollout.lease_id or "",
        group_id=rollout.group_id,
        slot=rollout.slot,
        code="policy_rolled_back",
        reason=reason,
        blame="coordinator",
        paid=True,
        tokens=rollout.length,
        at=now,
    )


async def measured_kappa(reader: Reader, job: Job) -> int:
    """Kappa of DESIGN 5 from what was measured: training seconds, p95 of publication to confirmation, and pauses."""
    steps = await reader.select(Batch, job_id=job.id, state=BatchState.COMMITTED, order_by="-step", limit=RECENT)
    held = await reader.select(Holding, job_id=job.id, order_by="-confirmed_at", limit=RECENT)
    public = {
        (p.version, p.digest): p.published_at
        for p in await reader.select(Publication, job_id=job.id, order_by="-version", limit=RECENT)
    }
    delays = sorted(h.confirmed_at - public[h.version, h.digest] for h in held if (h.version, h.digest) in public)
    return rules.kappa(
        job.config.staleness.publish_every,
        bound=job.config.staleness.max,
        train_s=sum(b.train_s for b in steps) / len(steps) if steps else 0.0,
        bcast_p95_s=delays[min(len(delays) - 1, int(0.95 * len(delays)))] if delays else 0.0,
        pause_s=max((h.apply_s for h in held), default=0.0),
    )


async def retire(deps: Deps, publisher: Publisher, job: Job) -> None:
    """Drop versions that no worker holds as its newest and no live lease names, with their pieces and directories."""
    kept, gone = await deps.store.write(lambda tx: _retire_rows(tx, job))
    if not gone:
        return
    await publisher.remove_pieces([p.manifest for p in gone], kept=[p.manifest for p in kept])
    checkpoints = await deps.store.read(lambda r: r.select(CheckpointRow, job_id=job.id))
    needed = {c.step for c in checkpoints}
    for publication in gone:
        if publication.version not in needed:
            shutil.rmtree(publication.directory, ignore_errors=True)


async def _retire_rows(tx: Tx, job: Job) -> tuple[list[Publication], list[Publication]]:
    current = await published(tx, job.id)
    if not current:
        return [], []
    newest_held: dict[str, int] = {}
    for holding in await tx.select(Holding, job_id=job.id):
        newest_held[holding.worker_id] = max(holding.version, newest_held.get(holding.worker_id, 0))
    leased = {lease.version for lease in await tx.select(Lease, job_id=job.id, state=LeaseState.LIVE)}
    # The one before the newest stays: workers may be fetching it, or need it as the base of what comes.
    needed = frozenset(newest_held.values()) | leased | {p.version for p in current[-2:]}
    versions = rules.retired([p.version for p in current], held_or_leased=needed, newest=current[-1].version)
    gone = [p for p in current if p.version in set(versions)]
    for publication in gone:
        await tx.put(replace(publication, state=move(PUBLICATION, publication.state, "retired")))
    return [p for p in current if p not in gone], gone
