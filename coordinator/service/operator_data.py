"""What a job produced: metrics, rollouts, and the Hugging Face directories of its versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from coordinator.domain.model import CheckpointRow, Group, Job, Metric, Publication, PublicationState, Rollout
from coordinator.service.deps import Deps
from coordinator.service.edges import GONE
from coordinator.service.model_tar import is_model_file
from coordinator.service.operator_errors import RequestRefused, unknown
from coordinator.service.operator_figures import figure, finite
from coordinator.service.operator_views import distinct, newest_metric, owned
from coordinator.service.ports import Reader
from coordinator.service.tokens import Caller
from coordinator.wire.rest import (
    CheckpointFile,
    CheckpointList,
    CheckpointView,
    MetricPoint,
    MetricsQuery,
    MetricsView,
    RolloutList,
    RolloutsQuery,
    RolloutView,
)
from p2p.codec import peft_files

VERSIONS_SHOWN = 200
Place = tuple[int, Literal["publication", "checkpoint"], str | None, float, str]  # version, source, digest, at, directory


async def metrics(reader: Reader, caller: Caller, job_id: str, query: MetricsQuery) -> MetricsView:
    """The names with their newest value, or the newest points of one name in order of step."""
    job = await owned(reader, caller, job_id)
    if query.name is None:
        found = [await newest_metric(reader, job.id, name) for name in await distinct(reader, Metric, "name", job_id=job.id)]
        return MetricsView(names=tuple(shown for shown in map(figure, found) if shown is not None))
    filters: dict[str, object] = {} if query.since is None else {"at__gt": query.since}
    rows = await reader.select(Metric, job_id=job.id, name=query.name, order_by="-step", limit=query.limit, **filters)
    points = tuple(MetricPoint(step=row.step, at=row.at, value=finite(row.value)) for row in reversed(rows))
    return MetricsView(name=query.name, points=points)


async def rollouts(deps: Deps, caller: Caller, job_id: str, query: RolloutsQuery) -> RolloutList:
    """Rollouts of a step, or the newest accepted ones, with their prompts."""

    async def load(reader: Reader) -> tuple[list[Rollout], dict[int, Group]]:
        job = await owned(reader, caller, job_id)
        rows = await _of_step(reader, job, query) if query.step is not None else await _newest(reader, job, query.limit)
        numbers = sorted({row.group_number for row in rows})
        found = await reader.select(Group, job_id=job.id, number=numbers) if numbers else []
        return rows, {group.number: group for group in found}

    rows, groups = await deps.store.read(load)
    shown = [_rollout(row, groups[row.group_number]) for row in rows if row.group_number in groups]
    return RolloutList(rollouts=tuple(shown))


async def _of_step(reader: Reader, job: Job, query: RolloutsQuery) -> list[Rollout]:
    per_group = job.config.algorithm.group_size
    most = -(-query.limit // per_group)
    groups = await reader.select(Group, job_id=job.id, step=query.step, order_by="number", limit=most)
    if not groups:
        return []
    rows = await reader.select(Rollout, group_id=[group.id for group in groups])
    return sorted(rows, key=lambda row: (row.group_number, row.slot))[: query.limit]


async def _newest(reader: Reader, job: Job, limit: int) -> list[Rollout]:
    return await reader.select(Rollout, job_id=job.id, accepted_at__gt=0.0, order_by="-accepted_at", limit=limit)


def _rollout(row: Rollout, group: Group) -> RolloutView:
    return RolloutView(
        group_number=row.group_number,
        slot=row.slot,
        step=group.step,
        state=row.state.value,
        outcome=f"{group.state.value}: {group.reason}" if group.reason else group.state.value,
        prompt=group.prompt_text,
        prompt_ids=group.prompt_ids,
        completion=row.text,
        length=row.length,
        turns=row.turn + 1,
        reward=None if row.reward is None else finite(row.reward),
        detail=row.detail,
        oldest_version=row.oldest_version,
        newest_version=row.newest_version,
        worker_id=row.worker_id,
        stop_reason=row.stop_reason,
        generate_s=row.generate_s,
        accepted_at=row.accepted_at,
    )


async def checkpoints(deps: Deps, caller: Caller, job_id: str) -> CheckpointList:
    """Versions whose directory is still there, newest first."""
    places = await deps.store.read(lambda reader: _places(reader, caller, job_id))
    return CheckpointList(checkpoints=await asyncio.to_thread(_present, places))


async def checkpoint_file(deps: Deps, caller: Caller, job_id: str, version: int, name: str) -> Path:
    """The path of one downloadable file. Raises RequestRefused."""
    places = await deps.store.read(lambda reader: _places(reader, caller, job_id))
    directories = [Path(place[4]) for place in places if place[0] == version]
    candidates = [folder / name for directory in directories for folder in (directory, directory / peft_files.FOLDER)]
    found = await asyncio.to_thread(_first_file, candidates, name)
    if found is None:
        raise _no_file(version, name)
    return found


def _first_file(candidates: Sequence[Path], name: str) -> Path | None:
    if not is_model_file(name):
        return None
    return next((path for path in candidates if path.is_file() and not path.is_symlink()), None)


def _no_file(version: int, name: str) -> RequestRefused:
    refusal = unknown("file", f"{version}/{name}"[:200])
    refusal.fix = "list what can be downloaded: echo2 job checkpoints JOB, or GET /api/v1/jobs/{job_id}/checkpoints"
    return refusal


async def _places(reader: Reader, caller: Caller, job_id: str) -> list[Place]:
    job = await owned(reader, caller, job_id)
    states = [PublicationState.PUBLISHED, PublicationState.RETIRED]
    published = await reader.select(
        Publication, job_id=job.id, state=states, directory__gt=GONE, order_by="-version", limit=VERSIONS_SHOWN
    )
    saved = await reader.select(CheckpointRow, job_id=job.id, order_by="-step", limit=VERSIONS_SHOWN)
    places: list[Place] = [(p.version, "publication", p.digest, p.published_at, p.directory) for p in published]
    places += [(row.step, "checkpoint", None, row.durable_at, row.directory) for row in saved]
    return sorted(places, key=lambda place: (-place[0], place[1] == "checkpoint"))


def _present(places: Sequence[Place]) -> tuple[CheckpointView, ...]:
    views = []
    for version, source, digest, at, directory in places:
        files = _files(Path(directory))
        if files:
            adapter = _files(Path(directory) / peft_files.FOLDER)
            views.append(CheckpointView(version=version, source=source, digest=digest, at=at, files=files, adapter=adapter))
    return tuple(views)


def _files(directory: Path) -> tuple[CheckpointFile, ...]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return ()
    plain = [path for path in entries if is_model_file(path.name) and path.is_file() and not path.is_symlink()]
    return tuple(CheckpointFile(name=path.name, bytes=path.stat().st_size) for path in plain)
