"""Which jobs a worker may serve."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.model import Job, Worker


def may_serve(job: Job, worker: Worker, invited_to: Sequence[str]) -> tuple[bool, str]:
    """Whether the worker may serve the job, and why not. `invited_to` is empty when its invite names no jobs."""
    wanted = job.config.workers
    if invited_to and job.id not in invited_to and job.name not in invited_to:
        return False, f"your invite does not name job {job.name}"
    kind = worker.engine.get("kind")
    if kind not in wanted.engines:
        return False, f"job {job.name} takes engines {', '.join(wanted.engines)} (workers.engines), yours is {kind}"
    if wanted.names and worker.name not in wanted.names:
        return False, f"job {job.name} takes named workers only (workers.names), and {worker.name} is not among them"
    if wanted.trust != "any" and worker.name not in wanted.names:
        return False, f"job {job.name} asks for trust {wanted.trust!r} (workers.trust), which this worker does not have"
    return True, f"serves job {job.name}"
