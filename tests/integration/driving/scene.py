"""What the driver's tests share: a job, pretend workers beside a driver, and the audit."""

from __future__ import annotations

import asyncio

from coordinator.domain.audit import audit
from coordinator.domain.model import Batch, Group, Job, JobState, Lease, Publication, Refusal, Rollout
from coordinator.service.deps import Deps
from coordinator.service.driving import JobDriver, Tools
from coordinator.wire.job import JobConfig
from tests.integration.driving.pretend import PretendLearners, PretendPlane, PretendPublisher, pretend_workers

STEPS = 12


def config(**sections) -> JobConfig:
    """Two groups of two a step, checkpoint every five."""
    job = {
        "name": "driven",
        "model": "m",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 2, "groups_per_step": 2, "truncated": "keep"},
        "staleness": {"max": 2},
        "sampling": {"max_new_tokens": 4},
        "checkpoints": {"every_steps": 5, "eval_prompts": 3, "eval_every_steps": 6},
        "budget": {"steps": STEPS},
    }
    return JobConfig.model_validate({**job, **{name: {**job[name], **values} for name, values in sections.items()}})


async def submit(deps: Deps, job_config: JobConfig) -> str:
    """A queued job."""
    now = deps.clock.now()
    job = Job("j1", "driven", "t", job_config, JobState.QUEUED, "", now, now, "m")
    await deps.store.write(lambda tx: tx.put(job))
    return job.id


async def drive(deps: Deps, job_id: str, learners: PretendLearners, plane: PretendPlane | None = None, within_s: float = 8) -> Job:
    """Run the driver with pretend workers until it returns."""
    plane = plane or PretendPlane()
    workers = asyncio.create_task(pretend_workers(deps, job_id))
    try:
        async with asyncio.timeout(within_s):
            await JobDriver(deps, Tools(learners, PretendPublisher(), plane), job_id).run()
    finally:
        workers.cancel()
    return await row(deps, job_id)


async def row(deps: Deps, job_id: str) -> Job:
    """The job's row."""
    job = await deps.store.read(lambda r: r.get(Job, job_id))
    assert job is not None
    return job


async def check(deps: Deps, job: Job) -> None:
    """The audit, from rows."""
    kinds = (Group, Rollout, Lease, Batch, Publication, Refusal)
    found = [await deps.store.read(lambda r, kind=kind: r.select(kind, job_id=job.id)) for kind in kinds]
    result = audit(job, *found)
    assert result.ok, result.findings
