"""Announces versions in a task beside the training, one at a time.

An encoder that died or a disk that refused is no verdict on the version: it is tried again, and after TRIES the driver is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from coordinator.domain.model import Job
from coordinator.service import lowrank
from coordinator.service.deps import Deps
from coordinator.service.edges import extend
from coordinator.service.job_ports import Publisher, PublishInterrupted
from coordinator.service.publishing import announce, retire
from coordinator.wire.learner_link import Snapshotted

log = structlog.get_logger()
TRIES = 3
PAUSE_S = 1.0  # doubled with each try


class Announcer:
    """One job's announcement under way. Raises what the announcement raised where it is looked at or waited for."""

    def __init__(self, deps: Deps, publisher: Publisher) -> None:
        self._deps = deps
        self._publisher = publisher
        self._task: asyncio.Task[None] | None = None
        self._version = -1

    def begin(self, job: Job, shot: Snapshotted, canary: Sequence[int]) -> None:
        """Encode and announce; the one before must be finished."""
        if self._task is not None:
            raise RuntimeError(f"version {self._version} is still being announced: wait for it first")
        self._version = shot.version
        self._task = asyncio.create_task(self._announce(job, shot, canary), name=f"announce-{job.id}-{shot.version}")

    def is_under_way(self, version: int) -> bool:
        """Whether that version is being announced now."""
        return self._task is not None and not self._task.done() and self._version == version

    def raise_if_failed(self) -> None:
        """Nobody waits for it: look whether it failed meanwhile."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def finished(self) -> None:
        """Wait for the one under way."""
        task, self._task = self._task, None
        if task is not None:
            await task

    async def stop(self) -> None:
        """Give up the one under way; nothing of it runs when this returns."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _announce(self, job: Job, shot: Snapshotted, canary: Sequence[int]) -> None:
        for attempt in range(TRIES):
            try:
                await announce(self._deps, self._publisher, job, shot, canary)
                break
            except PublishInterrupted as error:
                if attempt + 1 == TRIES:
                    raise
                log.warning("announcement_interrupted", job=job.id, version=shot.version, reason=str(error))
                await asyncio.sleep(PAUSE_S * 2**attempt)
        await lowrank.extend(self._deps, self._publisher, job, shot.version)
        await extend(self._deps, self._publisher, job, shot.version)
        await retire(self._deps, self._publisher, job)
