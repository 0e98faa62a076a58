"""Says what the interlocks see in a step's figures, and lowers S where the job asks for it."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from coordinator.domain import interlocks
from coordinator.domain.model import Job, Metric
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event


async def interlocked(tx: Tx, job: Job, step: int, *, now: float) -> Job:
    """The job after its interlocks looked at the figures up to `step`, which this transaction wrote; each alarm is an event."""
    staleness = job.config.staleness
    recent = await _recent(tx, job.id, step)
    first = await tx.get(Metric, job.id, interlocks.ENTROPY, 0)
    found = interlocks.alarms(recent, step=step, first_entropy=first.value if first else None, bound=staleness.max)
    for alarm in found:
        await record_event(tx, job.id, "interlock", {"step": step, "code": alarm.code, "reason": alarm.words}, now=now)
    lower = interlocks.reduced_bound(found, bound=staleness.max, is_allowed=staleness.auto_reduce)
    if lower is None:
        return job
    bound, why = lower
    await record_event(tx, job.id, "staleness_reduced", {"from": staleness.max, "to": bound, "reason": why}, now=now)
    return replace(job, config=job.config.model_copy(update={"staleness": staleness.model_copy(update={"max": bound})}))


async def _recent(reader: Reader, job_id: str, step: int) -> list[dict[str, float]]:
    """Figures of the newest steps, as many as the interlocks look at."""
    first = max(0, step - interlocks.PATIENCE)
    by_step: dict[int, dict[str, float]] = defaultdict(dict)
    for row in await reader.select(Metric, job_id=job_id, name=list(interlocks.WATCHED), step__ge=first):
        by_step[row.step][row.name] = row.value
    return [by_step[each] for each in range(first, step + 1)]
