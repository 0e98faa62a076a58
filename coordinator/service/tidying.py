"""Removes what is on disk and needed no more: what killed processes left, and token arrays of groups that settled long ago.

Level-triggered like the rest: everything on disk that rows do not ask for goes, whoever left it. Directories of jobs that have no
row here are another store's and stay.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Set
from pathlib import Path

import structlog

from coordinator.domain.model import (
    Batch,
    CheckpointRow,
    EdgeRow,
    Group,
    GroupState,
    Job,
    JobState,
    PublicationState,
    Rollout,
    RolloutState,
    Turn,
)
from coordinator.domain.retention import first_kept
from coordinator.domain.states import TERMINAL
from coordinator.service.deps import Deps
from coordinator.service.edges import GONE, needed_directories, read_lineage
from coordinator.service.job_ports import Publisher
from coordinator.service.ports import Reader
from coordinator.service.publishing import served_texts
from p2p.adapters.durable import TEMPORARY_SUFFIX

log = structlog.get_logger()
BLOB_AGE_S = 3600.0  # no submission takes so long between its blob and its rows
PIECES_KEPT_S = 3600.0  # after a job's end, for workers that still fetch
GROUPS_AT_ONCE = 256
UNSETTLED = [GroupState.ISSUED, GroupState.READY, GroupState.SEALED]


async def keep_tidy(deps: Deps, publisher: Publisher, scratch: Callable[[], int]) -> None:
    """Tidy at once and then every `tidy_s`. A failed round is logged and repeated. Waits for the clock only."""
    while True:
        try:
            await tidy(deps, publisher)
            await asyncio.to_thread(scratch)
        except ConnectionError:
            raise  # the store has ended
        except Exception:
            log.exception("tidy_failed")
        await asyncio.sleep(deps.settings.tidy_s)


async def tidy(deps: Deps, publisher: Publisher) -> None:
    """One round: directories of ended jobs, pieces, token arrays. Directories of live jobs are their drivers' (`tidy_job`)."""
    jobs = await deps.store.read(lambda r: r.select(Job))
    for job in jobs:
        if job.state in TERMINAL[JobState] and job.id not in deps.live:
            await tidy_job(deps, job)
            await _drop_edges(deps, job)
    if not jobs:
        return  # a new store beside old files: nothing says what they are
    async with deps.pieces:
        kept = await deps.store.read(lambda r: served_texts(r, since=deps.clock.now() - PIECES_KEPT_S))
        pieces = await publisher.keep_pieces(kept)
    before = deps.clock.now() - BLOB_AGE_S
    swept = await deps.blobs.sweep(await needed_blobs(deps), before=before)
    if pieces or swept.files:
        log.info("tidied", pieces=pieces, blobs=swept.files, blob_bytes=swept.bytes)


async def _drop_edges(deps: Deps, job: Job) -> None:
    """Nobody comes to an ended job's versions by its edges once its pieces may go; its snapshots are directories."""
    if job.state_since >= deps.clock.now() - PIECES_KEPT_S:
        return
    if await deps.store.read(lambda r: r.count(EdgeRow, job_id=job.id)):
        await deps.store.write(lambda tx: tx.delete(EdgeRow, job_id=job.id))


async def needed_blobs(deps: Deps) -> Set[str]:
    """Digests of the submissions whose token arrays may still be read, over all jobs."""
    needed: set[str] = set()
    for job in await deps.store.read(lambda r: r.select(Job)):
        needed |= await deps.store.read(lambda r, job=job: _ungraded(r, job))  # type: ignore[misc]
        first, last = await deps.store.read(lambda r, job=job: _kept_groups(r, job))  # type: ignore[misc]
        for number in range(first, last + 1, GROUPS_AT_ONCE):
            needed |= await deps.store.read(lambda r, job=job, number=number: _blobs_of(r, job, number))  # type: ignore[misc]
    return needed


async def _ungraded(reader: Reader, job: Job) -> set[str]:
    waiting = await reader.select(Rollout, job_id=job.id, state=RolloutState.ACCEPTED)
    return {rollout.blob for rollout in waiting if rollout.blob is not None}


async def _kept_groups(reader: Reader, job: Job) -> tuple[int, int]:
    """The lowest and the highest group number whose token arrays are kept."""
    keep = job.config.checkpoints.keep_rollout_steps
    newest = await reader.select(Batch, job_id=job.id, order_by="-step", limit=keep + 1)
    unsettled = await reader.select(Group, job_id=job.id, state=UNSETTLED, order_by="number", limit=1)
    highest = await reader.highest(Group, "number", job_id=job.id)
    first = first_kept(
        [batch.groups for batch in newest],
        keep=keep,
        lowest_unsettled=unsettled[0].number if unsettled else None,
        highest=-1 if highest is None else highest,
    )
    return first, -1 if highest is None else highest


async def _blobs_of(reader: Reader, job: Job, number: int) -> set[str]:
    rows = await reader.select(Rollout, job_id=job.id, group_number__ge=number, group_number__lt=number + GROUPS_AT_ONCE)
    played = sorted({rollout.group_id for rollout in rows if rollout.turn})
    turns = await reader.select(Turn, group_id=played) if played else []
    return {rollout.blob for rollout in rows if rollout.blob is not None} | {turn.blob for turn in turns}


async def tidy_job(deps: Deps, job: Job) -> None:
    """Remove snapshots and checkpoints of a job that no row names. Only while no learner of the job runs."""

    async def read(reader: Reader) -> tuple[frozenset[str], frozenset[str]]:
        checkpoints = await reader.select(CheckpointRow, job_id=job.id)
        steps = {row.step for row in checkpoints}
        known = await read_lineage(reader, job.id)
        needed = frozenset() if job.state in TERMINAL[JobState] else needed_directories(known)
        publications = [
            p for p in known.publications if p.state is PublicationState.PUBLISHED or p.version in steps or p.directory in needed
        ]
        return _names(p.directory for p in publications), _names(row.directory for row in checkpoints)

    snapshots, checkpoints = await deps.store.read(read)
    home = deps.settings.data_dir
    removed = await asyncio.to_thread(_keep_only, home / "snapshots" / job.id, snapshots)
    removed += await asyncio.to_thread(_keep_only, home / "checkpoints" / job.id, checkpoints)
    removed += await asyncio.to_thread(_remove_cut_off, home / "batches" / job.id)
    if removed:
        log.info("leftovers_removed", job=job.id, count=removed)


def _names(directories: Iterable[str]) -> frozenset[str]:
    """Bare names: the data directory itself may have been moved since the row was written."""
    return frozenset(Path(directory).name for directory in directories if directory != GONE)


def _keep_only(parent: Path, names: Set[str]) -> int:
    doomed = [path for path in parent.iterdir() if path.name not in names] if parent.is_dir() else []
    for path in doomed:
        shutil.rmtree(path, ignore_errors=True)
    return len(doomed)


def _remove_cut_off(parent: Path) -> int:
    """Batch files that were not whole when their writer died."""
    doomed = list(parent.glob(f".*{TEMPORARY_SUFFIX}"))
    for path in doomed:
        path.unlink(missing_ok=True)
    return len(doomed)
