"""Checkpoints and what they let us forget: batch files and older checkpoints, once a newer checkpoint is durable."""

from __future__ import annotations

from pathlib import Path

from coordinator.domain.model import CheckpointRow, Job, Publication, PublicationState
from coordinator.service.deps import Deps
from coordinator.service.ports import Tx
from coordinator.service.publishing import remove_directories
from coordinator.service.recording import record_event
from coordinator.service.sealing import batch_path


def checkpoint_directory(deps: Deps, job: Job) -> Path:
    """Where the learner writes its state; the fence keeps a replay from renaming over an older one."""
    return deps.settings.data_dir / "checkpoints" / job.id / f"step{job.committed_steps:08d}-{job.learner_fence}"


async def record_checkpoint(deps: Deps, job: Job, directory: Path) -> None:
    """The checkpoint is durable: from here on a restart resumes from it."""

    async def save(tx: Tx) -> None:
        now = deps.clock.now()
        await tx.put(CheckpointRow(job.id, job.committed_steps, str(directory), now))
        await record_event(tx, job.id, "checkpointed", {"step": job.committed_steps}, now=now)

    await deps.store.write(save)


async def forget_before(deps: Deps, job: Job) -> None:
    """Remove checkpoints beyond the kept number with the retired versions that stayed for them, and batch files that no kept checkpoint would replay."""

    async def save(tx: Tx) -> tuple[list[str], int]:
        rows = await tx.select(CheckpointRow, job_id=job.id, order_by="-step")
        kept, old = rows[: job.config.checkpoints.keep], rows[job.config.checkpoints.keep :]
        for row in old:
            await tx.delete(CheckpointRow, job_id=job.id, step=row.step)
        steps, retired = [row.step for row in old], PublicationState.RETIRED
        weights = await tx.select(Publication, job_id=job.id, version=steps, state=retired) if steps else []
        return [*(row.directory for row in old), *(row.directory for row in weights)], min(row.step for row in kept)

    directories, first_needed = await deps.store.write(save)
    await remove_directories(directories)
    directory = batch_path(deps, job.id, 0).parent
    for path in directory.glob("*.safetensors"):
        if int(path.stem) < first_needed:
            path.unlink(missing_ok=True)
