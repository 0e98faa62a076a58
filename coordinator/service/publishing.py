"""Announces policy versions: snapshot directory, encoded pieces, signed manifest, then the row that makes it public.

The identity of a version is (number, digest). When a replay after a learner crash gives a published version other bits, the
old digest is rolled back: its leases end, its queued rollouts are rejected as `policy_rolled_back` and paid.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from coordinator.domain import publication as rules
from coordinator.domain.model import (
    CheckpointRow,
    EdgeRow,
    Group,
    GroupState,
    Holding,
    Job,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Refusal,
    Rollout,
)
from coordinator.domain.seeds import derive
from coordinator.domain.states import GROUP, PUBLICATION, TERMINAL, move
from coordinator.service import forthcoming
from coordinator.service.deps import NEWS, VERSIONS, Deps
from coordinator.service.edges import GONE, drop_unneeded, edge_row, held_rivals, needed_directories, read_lineage
from coordinator.service.job_ports import Publisher, PublishFailed, SignedHop, SignedManifest
from coordinator.service.lowrank import base_for, kept_versions
from coordinator.service.plan_model import model_facts
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event, record_metrics
from coordinator.service.timings import FORECAST
from coordinator.service.worker_leases import end_leases
from coordinator.service.worker_presence import FETCH_PATIENCE_S
from coordinator.wire.learner_link import Snapshotted

log = structlog.get_logger()


def snapshot_directory(deps: Deps, job: Job, version: int) -> Path:
    """Where the learner writes a version; the fence keeps a replay from overwriting what an older learner wrote."""
    return deps.settings.data_dir / "snapshots" / job.id / f"v{version:08d}-{job.learner_fence}"


async def published(reader: Reader, job_id: str) -> list[Publication]:
    """Publications that workers may hold, oldest version first."""
    return await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED, order_by="version")


async def announce(deps: Deps, publisher: Publisher, job: Job, shot: Snapshotted, canary_ids: Sequence[int]) -> None:
    """Encode and publish; an identical digest that is known already changes nothing, nor does a job that has ended."""
    async with deps.pieces:
        try:
            base = await deps.store.read(lambda r: base_for(r, job, shot.version, link=deps.presence.median_uplink()))
            signed = await publisher.publish(
                Path(shot.directory), job_id=job.id, version=shot.version, canary_ids=canary_ids, base=base
            )
            forecast = await asyncio.to_thread(_forecast, job, shot) if base is None else {}
            bridges = await _bridges(deps, publisher, job, shot, signed)
            deps.reach("publish.pieces_written")
            saved = await deps.store.write(lambda tx: _save(tx, job, shot, signed, bridges, forecast, now=deps.clock.now()))
        finally:
            forthcoming.close(deps, job.id)
        for topic in (VERSIONS, NEWS):
            deps.wake.notify(topic)
        deps.reach("publish.rows_written")
        unused = [] if saved.is_new else [signed.text, *(hop.text for hop in bridges)]
        await _remove_pieces(deps, publisher, [*unused, *(lost.manifest for lost in saved.lost)])
    directories = [lost.directory for lost in saved.lost] + ([] if saved.is_new else [shot.directory])
    await remove_directories(directories)
    deps.wake.notify(job.id)


async def _bridges(deps: Deps, publisher: Publisher, job: Job, shot: Snapshotted, signed: SignedManifest) -> tuple[SignedHop, ...]:
    """Edges from the bits that this version replaces, for workers that hold them: each would fetch a whole snapshot otherwise."""
    link = deps.presence.median_uplink()
    bases = await deps.store.read(lambda r: held_rivals(r, job.id, shot.version, signed.digest, link=link))
    if not bases:
        return ()
    try:
        return await publisher.add_edges(Path(shot.directory), manifest=signed.text, bases=bases, keyframe=False)
    except PublishFailed as error:
        log.warning("edges_not_made", job=job.id, version=shot.version, reason=str(error))
        return ()


def _forecast(job: Job, shot: Snapshotted) -> dict[str, float]:
    """What the next version's delta will weigh, from the bits of this one, which goes out whole. Not of adapters, which stay as they are in size."""
    found = {} if job.config.lora is not None else model_facts(Path(shot.directory), job.config.algorithm.learning_rate)
    return {FORECAST: found["delta_bytes"].value} if "delta_bytes" in found else {}


@dataclass(frozen=True, slots=True)
class _Saved:
    """Whether the version was made public just now, and the publications that it replaced."""

    is_new: bool
    lost: tuple[Publication, ...] = ()


async def _save(
    tx: Tx,
    job: Job,
    shot: Snapshotted,
    signed: SignedManifest,
    bridges: Sequence[SignedHop],
    forecast: Mapping[str, float],
    *,
    now: float,
) -> _Saved:
    """Write the publication's row, unless this very digest is known or the job has ended.

    Edges over a digest that it replaces stay for now (`drop_unneeded`): the replay may not have come to the newest version yet.
    """
    row = await tx.get(Job, job.id)
    if row is None or row.state in TERMINAL[JobState]:
        return _Saved(False)
    known = await tx.select(Publication, job_id=job.id, version=shot.version)
    current = [p for p in known if p.state is not PublicationState.ROLLED_BACK]
    if any(p.digest == signed.digest for p in current):
        return _Saved(False)
    for lost in current:
        await roll_back(tx, lost, now=now)
    edges = [edge_row(hop) for hop in signed.hops]
    await tx.put(
        *edges,
        *(edge_row(hop) for hop in bridges),
        Publication(
            job_id=job.id,
            version=shot.version,
            digest=signed.digest,
            state=_published_again([p for p in known if p.digest == signed.digest]),
            manifest=signed.text,
            signature=signed.signature,
            directory=shot.directory,
            canary_logprobs=shot.canary_logprobs,
            published_at=now,
            encode_s=signed.encode_s,
        ),
    )
    await record_event(tx, job.id, "version_published", {"version": shot.version, "digest": signed.digest}, now=now)
    figures = {
        "publish/snapshot_s": shot.seconds,
        "publish/encode_s": signed.encode_s,
        "publish/first_piece_s": signed.first_piece_s,
    }
    if edges:
        figures |= {"publish/bytes": float(min(row.nbytes for row in edges)), "publish/bytes_full": float(signed.full_bytes)}
    await record_metrics(tx, job.id, shot.version, {**figures, **forecast}, now=now)
    return _Saved(True, tuple(current))


def _published_again(earlier: Sequence[Publication]) -> PublicationState:
    """A second replay may bring back bits that a first one had replaced: they are public again."""
    return move(PUBLICATION, earlier[0].state, "published_again") if earlier else PublicationState.PUBLISHED


async def versions_at_stake(reader: Reader, job_id: str) -> set[int]:
    """Versions whose bits still matter: the public ones, and those that tokens outside any batch carry, retired or not."""
    public = {publication.version for publication in await published(reader, job_id)}
    waiting = await reader.select(Group, job_id=job_id, state=[GroupState.ISSUED, GroupState.READY])
    rollouts = await reader.select(Rollout, group_id=[group.id for group in waiting]) if waiting else []
    return public | {int(version) for rollout in rollouts for version in rollout.digests}


async def roll_back(tx: Tx, lost: Publication, *, now: float) -> None:
    """A replay gave the version other bits: nothing made by the lost ones is trained any more."""
    await tx.put(replace(lost, state=move(PUBLICATION, lost.state, "rolled_back")))
    await tx.delete(Holding, job_id=lost.job_id, digest=lost.digest)
    reason = f"policy_rolled_back: version {lost.version} has other bits after the learner's replay"
    leases = await tx.select(Lease, job_id=lost.job_id, digest=lost.digest, state=LeaseState.LIVE)
    await end_leases(tx, [(lease, LeaseState.DEAD, reason) for lease in leases], now=now)
    live = await tx.select(Group, job_id=lost.job_id, state=[GroupState.ISSUED, GroupState.READY])
    rollouts = await tx.select(Rollout, group_id=[g.id for g in live]) if live else []
    stained = [r for r in rollouts if lost.digest in r.digests.values()]
    ids = {r.group_id for r in stained}
    for group in live:
        if group.id in ids:
            await tx.put(replace(group, state=move(GROUP, group.state, "rejected"), reason=reason, settled_at=now))
    # Other slots of these groups may be leased for other versions: nobody needs them any more.
    others = await tx.select(Lease, group_id=sorted(ids), state=LeaseState.LIVE) if ids else []
    await end_leases(tx, [(lease, LeaseState.DEAD, reason) for lease in others], now=now)
    for rollout in stained:
        if rollout.blob is not None:  # else its turns before this one are what is paid
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


async def retire(deps: Deps, publisher: Publisher, job: Job) -> None:
    """Drop versions that no worker holds as its newest or fetches and no live lease names, and what no path needs any more.

    A retired version may live on as lineage: its edges stay while a path leads over them, its directory while edges are made from it.
    """
    since = deps.clock.now() - FETCH_PATIENCE_S
    fetched, in_use = deps.presence.being_fetched(job.id, since=since), deps.presence.edges_in_use(job.id, since=since)
    async with deps.pieces:
        gone, edges = await deps.store.write(lambda tx: _retire_rows(tx, job, fetched, in_use))
        await _remove_pieces(deps, publisher, [*(publication.manifest for publication in gone), *(row.document for row in edges)])
    await _remove_unneeded(deps, job.id)


async def _retire_rows(tx: Tx, job: Job, fetched: Set[int], in_use: frozenset[str]) -> tuple[list[Publication], list[EdgeRow]]:
    """The publications (as they were) and edges that went."""
    current = await published(tx, job.id)
    if not current:
        return [], []
    newest_held: dict[str, int] = {}
    for holding in await tx.select(Holding, job_id=job.id):
        newest_held[holding.worker_id] = max(holding.version, newest_held.get(holding.worker_id, 0))
    leased = {lease.version for lease in await tx.select(Lease, job_id=job.id, state=LeaseState.LIVE)}
    # The one before the newest stays: workers may be about to fetch it, or need it as the base of what comes.
    needed = frozenset(newest_held.values()) | leased | fetched | {p.version for p in current[-2:]} | kept_versions(job)
    versions = rules.retired([p.version for p in current], held_or_leased=needed, newest=current[-1].version)
    gone = [p for p in current if p.version in set(versions)]
    for publication in gone:
        state = move(PUBLICATION, publication.state, "retired")
        await tx.put(replace(publication, state=state, manifest="", signature=""))
    return gone, await drop_unneeded(tx, job.id, in_use=in_use)


async def _remove_unneeded(deps: Deps, job_id: str) -> None:
    """Remove directories of retired versions that are no checkpoint's and that no edge will be made from; their rows then say so."""
    unneeded = await deps.store.read(lambda r: _unneeded(r, job_id))
    if unneeded:
        await remove_directories([publication.directory for publication in unneeded])
        await deps.store.write(lambda tx: _forget_directories(tx, unneeded))


async def _unneeded(reader: Reader, job_id: str) -> list[Publication]:
    known = await read_lineage(reader, job_id)
    steps = {row.step for row in await reader.select(CheckpointRow, job_id=job_id)}
    kept = {GONE, *needed_directories(known)}
    retired = PublicationState.RETIRED
    return [p for p in known.publications if p.state is retired and p.version not in steps and p.directory not in kept]


async def _forget_directories(tx: Tx, removed: Sequence[Publication]) -> None:
    """Unless a replay made the version public again meanwhile, from another directory."""
    for publication in removed:
        row = await tx.get(Publication, publication.job_id, publication.version, publication.digest)
        if row == publication:
            await tx.put(replace(row, directory=GONE))


async def _remove_pieces(deps: Deps, publisher: Publisher, texts: Sequence[str]) -> None:
    """Pieces are shared between versions and between jobs: only what no public version and no edge of any job names goes."""
    texts = [text for text in texts if text]
    if texts:
        await publisher.remove_pieces(texts, kept=await deps.store.read(lambda r: served_texts(r, since=deps.clock.now())))


async def served_texts(reader: Reader, *, since: float) -> list[str]:
    """Manifests of the public versions, and hops, of every job that lives or ended after `since`."""
    jobs = await reader.select(Job, state=[state for state in JobState if state not in TERMINAL[JobState]])
    jobs += await reader.select(Job, state=list(TERMINAL[JobState]), state_since__gt=since)
    ids = [job.id for job in jobs]
    public = await reader.select(Publication, job_id=ids, state=PublicationState.PUBLISHED) if ids else []
    edges = await reader.select(EdgeRow, job_id=ids) if ids else []
    return [*(publication.manifest for publication in public), *(row.document for row in edges)]


async def remove_directories(directories: Sequence[str]) -> None:
    """Remove them if they are there."""
    doomed = [Path(directory) for directory in directories if directory != GONE]
    if doomed:
        await asyncio.to_thread(_remove_trees, doomed)


def _remove_trees(paths: Sequence[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
