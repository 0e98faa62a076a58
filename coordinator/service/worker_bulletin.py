"""What every beat is answered from: running jobs, their newest published version, and the jobs that invites name.

One reading of the rows serves all beats of a short while; anything that grants or settles reads the rows itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coordinator.domain.model import Invite, Job, JobState, Publication, PublicationState
from coordinator.domain.staleness import last_step
from coordinator.service.deps import VERSIONS, Deps
from coordinator.service.ports import Reader
from coordinator.wire.messages import VersionNotice

FRESH_S = 0.5


@dataclass(frozen=True, slots=True)
class Posting:
    """A running job and the newest version that workers may fetch."""

    job: Job
    version: int
    digest: str

    def is_usable(self, version: int) -> bool:
        """Whether data of `version` can still serve the learner's next step."""
        return self.job.committed_steps <= last_step(version, self.job.config.staleness.max)


def notice(posting: Posting) -> VersionNotice:
    """The posting as workers are told of it."""
    return VersionNotice(
        job_id=posting.job.id, version=posting.version, digest=posting.digest, committed_steps=posting.job.committed_steps
    )


@dataclass(frozen=True, slots=True)
class News:
    """One reading of the rows."""

    at: float
    postings: Mapping[str, Posting]  # by job id
    invited_to: Mapping[str, tuple[str, ...]]  # invite id -> jobs; absent: any


class Bulletin:
    """The newest reading, at most FRESH_S old; concurrent askers share one read."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._news: News | None = None
        self._lock = asyncio.Lock()
        self._digests: dict[tuple[str, int], str] = {}
        self._published = deps.wake.watch(VERSIONS)
        self._published.__enter__()  # as long as the process lives

    async def news(self) -> News:
        """The reading to answer from now."""
        return await self._fresh(lambda _: True)

    async def newer(self, job_id: str, newest: int, than: int) -> Posting | None:
        """The newest version of a job, known to be at least `newest`, if it is newer than `than`."""
        if newest <= than:
            return None

        def names_it(news: News) -> bool:
            posting = news.postings.get(job_id)
            return posting is None or posting.version >= newest

        posting = (await self._fresh(names_it)).postings.get(job_id)
        return posting if posting is not None and posting.version > than else None

    async def _fresh(self, is_enough: Callable[[News], bool]) -> News:
        async with self._lock:
            now = self._deps.clock.now()
            if self._published.take():
                self._news = None  # whoever asks now may have heard of that version
            if self._news is None or not 0 <= now - self._news.at < FRESH_S or not is_enough(self._news):
                self._news = await self._deps.store.read(lambda reader: self._read(reader, now))
            return self._news

    async def _read(self, reader: Reader, now: float) -> News:
        jobs = await reader.select(Job, state=[JobState.RUNNING, JobState.PAUSED, JobState.STARTING])
        postings = {}
        for job in jobs:
            version = await reader.highest(Publication, "version", job_id=job.id, state=PublicationState.PUBLISHED)
            if version is not None:
                postings[job.id] = Posting(job, version, await self._digest(reader, job.id, version))
        invites = await reader.select(Invite)
        return News(now, postings, {invite.id: invite.jobs for invite in invites if invite.jobs})

    async def _digest(self, reader: Reader, job_id: str, version: int) -> str:
        """The published digest; a publication's row is large, so it is only read when a cached digest no longer holds."""
        state = PublicationState.PUBLISHED
        digest = self._digests.get((job_id, version), "")
        if not digest or not await reader.count(Publication, job_id=job_id, version=version, digest=digest, state=state):
            digest = (await reader.select(Publication, job_id=job_id, version=version, state=state, limit=1))[0].digest
            self._digests = {key: value for key, value in self._digests.items() if key[0] != job_id}
            self._digests[job_id, version] = digest
        return digest
