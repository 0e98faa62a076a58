"""Routes on jobs and what they produce."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

from aiohttp import web

from coordinator.api.rest_events import stream
from coordinator.api.rest_table import Call, Route, Write
from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.row_checks import check_first_row
from coordinator.service import operator_data, operator_jobs, operator_views
from coordinator.service.operator_done import Done
from coordinator.service.operator_errors import invalid
from coordinator.service.ports import Reader, Tx
from coordinator.service.tokens import Caller
from coordinator.wire import rest
from coordinator.wire.job import JobConfig, JobPatch

JOBS = "/api/v1/jobs"
JOB = JOBS + "/{job_id}"


class StateCommand(Protocol):
    """pause, resume or cancel."""

    def __call__(self, tx: Tx, caller: Caller, job_id: str, reason: str, *, now: float) -> Awaitable[Done]: ...


async def submit(call: Call) -> Write:
    """POST /jobs."""
    config = call.body_as(JobConfig)
    model = await asyncio.to_thread(_checked, config, call)
    return Write(lambda tx: operator_jobs.submit(tx, call.caller, config, model=model, now=call.now))


def _checked(config: JobConfig, call: Call) -> Path:
    """Everything that can be said of a new job without rows or its author's code; the model's directory. Raises RequestRefused."""
    settings = call.deps.settings
    model = operator_jobs.check_config(config, call.caller, settings)
    for named in config.environment.files():
        if named.kind == "dataset":
            try:
                check_first_row(config.environment, named, operator_jobs.file_of(named, settings))
            except EnvironmentBroken as error:
                raise invalid("wrong_rows", str(error), field=named.field, fix="correct the file, and upload it again") from error
    return model


async def listed(call: Call) -> rest.JobList:
    """GET /jobs."""
    query = call.query_as(rest.JobsQuery)
    return await call.deps.store.read(lambda reader: operator_views.listed(reader, call.caller, query))


async def one(call: Call) -> rest.JobView:
    """GET /jobs/{job_id}."""

    async def load(reader: Reader) -> rest.JobView:
        job = await operator_views.owned(reader, call.caller, call.path["job_id"])
        return await operator_views.job_view(reader, job, now=call.now)

    return await call.deps.store.read(load)


async def change(call: Call) -> Write:
    """PATCH /jobs/{job_id}."""
    patch = call.body_as(JobPatch)
    return Write(lambda tx: operator_jobs.change(tx, call.caller, call.path["job_id"], patch, now=call.now))


def state_command(command: StateCommand) -> Callable[[Call], Awaitable[Write]]:
    """POST /jobs/{job_id}/{pause,resume,cancel}."""

    async def handler(call: Call) -> Write:
        reason = call.body_as(rest.Reason).reason
        return Write(lambda tx: command(tx, call.caller, call.path["job_id"], reason, now=call.now))

    return handler


async def metrics(call: Call) -> rest.MetricsView:
    """GET /jobs/{job_id}/metrics."""
    query = call.query_as(rest.MetricsQuery)
    return await call.deps.store.read(lambda reader: operator_data.metrics(reader, call.caller, call.path["job_id"], query))


async def rollouts(call: Call) -> rest.RolloutList:
    """GET /jobs/{job_id}/rollouts."""
    return await operator_data.rollouts(call.deps, call.caller, call.path["job_id"], call.query_as(rest.RolloutsQuery))


async def checkpoints(call: Call) -> rest.CheckpointList:
    """GET /jobs/{job_id}/checkpoints."""
    return await operator_data.checkpoints(call.deps, call.caller, call.path["job_id"])


async def checkpoint_file(call: Call) -> web.StreamResponse:
    """GET /jobs/{job_id}/checkpoints/{version}/{file}: ranges are served, so that a broken download goes on."""
    version, name = int(call.path["version"]), call.path["file"]
    path = await operator_data.checkpoint_file(call.deps, call.caller, call.path["job_id"], version, name)
    headers = {"Content-Type": "application/octet-stream", "Content-Disposition": f'attachment; filename="{name}"'}
    return web.FileResponse(path, headers=headers)


async def audit(call: Call) -> rest.AuditView:
    """GET /jobs/{job_id}/audit."""
    return await operator_views.audit_view(call.deps.store, call.caller, call.path["job_id"])


def _state_route(verb: str, summary: str, command: StateCommand) -> Route:
    return Route(
        "POST",
        f"{JOB}/{verb}",
        "author",
        "jobs",
        summary,
        state_command(command),
        rest.JobView,
        body=rest.Reason,
        body_kind="optional_json",
    )


ROUTES = (
    Route("POST", JOBS, "author", "jobs", "Submit a job", submit, rest.JobView, JobConfig, "json", status=201),
    Route("GET", JOBS, "viewer", "jobs", "List jobs, newest first", listed, rest.JobList, query=rest.JobsQuery),
    Route("GET", JOB, "viewer", "jobs", "One job with its measured figures", one, rest.JobView),
    Route("PATCH", JOB, "author", "jobs", "Change S, kappa or budget at the next seal", change, rest.JobView, JobPatch, "json"),
    _state_route("pause", "Pause a job", operator_jobs.pause),
    _state_route("resume", "Resume a paused job", operator_jobs.resume),
    _state_route("cancel", "Cancel a job: every group settles", operator_jobs.cancel),
    Route(
        "GET",
        JOB + "/events",
        "viewer",
        "jobs",
        "Server-sent events, resumable by Last-Event-ID",
        stream,
        None,
        media="text/event-stream",
    ),
    Route("GET", JOB + "/metrics", "viewer", "jobs", "Time series of a metric", metrics, rest.MetricsView, query=rest.MetricsQuery),
    Route(
        "GET",
        JOB + "/rollouts",
        "viewer",
        "jobs",
        "Prompts, completions, rewards, versions, workers",
        rollouts,
        rest.RolloutList,
        query=rest.RolloutsQuery,
    ),
    Route("GET", JOB + "/checkpoints", "viewer", "jobs", "Versions that can be downloaded", checkpoints, rest.CheckpointList),
    Route(
        "GET",
        JOB + "/checkpoints/{version}/{file}",
        "viewer",
        "jobs",
        "One file of a Hugging Face directory",
        checkpoint_file,
        None,
        media="application/octet-stream",
    ),
    Route("GET", JOB + "/audit", "viewer", "jobs", "Laws 1 and 2, proved from the rows", audit, rest.AuditView),
)
