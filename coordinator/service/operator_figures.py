"""Figures of a job and a worker, computed from rows alone (pure). Each says what was counted (law 10)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from coordinator.domain.model import Batch, BatchState, Job, JobState, Metric, WorkerSession
from coordinator.wire.rest import Figure, LearnerView, RateView, StalenessView

ENDED = frozenset({JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED})
RATE_WINDOW_S = 300.0
RATE_STEPS = 20


def finite(value: float) -> float | None:
    """The value, or None when it is no number: JSON has no other word for it."""
    return value if math.isfinite(value) else None


def figure(metric: Metric | None) -> Figure | None:
    """A metric as shown."""
    if metric is None:
        return None
    return Figure(name=metric.name, step=metric.step, value=finite(metric.value), at=metric.at)


def staleness_view(job: Job, batches: Sequence[Batch]) -> StalenessView:
    """The histogram over the given batches."""
    histogram: Counter[int] = Counter()
    for batch in batches:
        for age, groups in batch.staleness.items():
            histogram[int(age)] += groups
    return StalenessView(
        bound=job.config.staleness.max,
        publish_every=job.config.staleness.publish_every,
        histogram={str(age): histogram[age] for age in sorted(histogram)},
        highest=max(histogram, default=None),
        steps_counted=len(batches),
    )


def learner_view(job: Job, batches: Sequence[Batch]) -> LearnerView:
    """How much of the learner's time went into training, over the committed ones among the given batches."""
    committed = [batch for batch in batches if batch.state is BatchState.COMMITTED]
    train_s, waited_s = sum(b.train_s for b in committed), sum(b.waited_s for b in committed)
    busy_s = train_s + waited_s
    return LearnerView(
        utilisation=train_s / busy_s if busy_s > 0 else None,
        train_s=train_s,
        waited_s=waited_s,
        steps_counted=len(committed),
        restarts=job.learner_restarts,
    )


def rate_view(job: Job, batches: Sequence[Batch], *, accepted: int, window_s: float) -> RateView:
    """Rollouts per second that came in, against R over the mean training time of the newest `RATE_STEPS` committed steps."""
    newest = sorted((b for b in batches if b.state is BatchState.COMMITTED), key=lambda b: b.step)[-RATE_STEPS:]
    train_s = sum(b.train_s for b in newest)
    required = job.config.rollouts_per_step * len(newest) / train_s if train_s > 0 else None
    return RateView(accepted_per_s=accepted / window_s if window_s > 0 else 0.0, window_s=window_s, required_per_s=required)


def rate_window_s(job: Job, *, now: float) -> float:
    """The time over which accepted rollouts are counted: the last minutes of the job's life."""
    return min(RATE_WINDOW_S, max(now - job.created_at, 0.0))


def active_s(sessions: Sequence[WorkerSession]) -> float:
    """Seconds that the sessions lasted."""
    return sum((s.last_seen_at if s.ended_at is None else s.ended_at) - s.started_at for s in sessions)
