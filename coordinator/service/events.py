"""Reads a job's events in order, and waits for the next ones."""

from __future__ import annotations

from coordinator.domain.model import Event, Job, JobState
from coordinator.service.deps import Watch
from coordinator.service.ports import Reader, Store

PAGE = 200
ENDED = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)


async def after(reader: Reader, job_id: str, seq: int) -> tuple[list[Event], bool]:
    """At most `PAGE` events after `seq`, and whether nothing will follow them: the job has ended and this is the last page."""
    events = await reader.select(Event, job_id=job_id, seq__gt=seq, order_by="seq", limit=PAGE)
    job = await reader.get(Job, job_id)
    ended = job is None or job.state in ENDED
    return events, ended and len(events) < PAGE


async def next_events(store: Store, watch: Watch, *, job_id: str, seq: int, wait_s: float) -> tuple[list[Event], bool]:
    """Events after `seq`; waits for one at most `wait_s`. Register `watch` on the job before the first call."""
    events, last = await store.read(lambda reader: after(reader, job_id, seq))
    if events or last or not await watch.wait(wait_s):
        return events, last
    return await store.read(lambda reader: after(reader, job_id, seq))
