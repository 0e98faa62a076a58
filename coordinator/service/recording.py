"""Events and metrics: what people and scripts read about a job. Written in the transaction of what they tell about."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from coordinator.domain.model import Event, Metric
from coordinator.service.ports import Tx


async def record_event(tx: Tx, job_id: str, kind: str, data: Mapping[str, Any], *, now: float) -> None:
    """Append an event; `seq` is the next of its job."""
    seq = (await tx.highest(Event, "seq", job_id=job_id) or 0) + 1
    await tx.put(Event(job_id, seq, now, kind, dict(data)))


async def record_metrics(tx: Tx, job_id: str, step: int, values: Mapping[str, float], *, now: float) -> None:
    """Write figures of a step; a figure that is not finite is left out (it is no measurement), and said as an event."""
    finite = {name: float(value) for name, value in values.items() if math.isfinite(value)}
    if finite:
        await tx.put(*(Metric(job_id, name, step, now, value) for name, value in finite.items()))
    lost = sorted(set(values) - set(finite))
    if lost:
        await record_event(tx, job_id, "metric_not_finite", {"step": step, "names": lost}, now=now)
