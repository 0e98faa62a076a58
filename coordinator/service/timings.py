"""What a job's newest steps, versions and completions took, from rows: kappa, the market and the panel read the same figures."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

from coordinator.domain.capacity import fleet_kappa
from coordinator.domain.capacity_bcast import forecast_broadcasts
from coordinator.domain.market_rates import percentile
from coordinator.domain.model import Batch, BatchState, Holding, Job, Metric, Publication, Rollout
from coordinator.service.ports import Reader

RECENT = 20  # steps and versions looked back on
HOLDINGS = 200
COMPLETIONS = 64
FORECAST = "publish/bytes_forecast"  # with a version that went out whole: what the next one will send


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds. By worker: means over the versions that it confirmed.

    Attributes:
        batches: the newest committed, newest first.
        bcast_p95_s: from publication to confirmation by workers that held an older version; 0: none was confirmed yet, and no forecast is.
        is_forecast: no broadcast was measured yet: those that are told are what the first delta is expected to take.
        down: bytes a second while fetching.
    """

    batches: tuple[Batch, ...] = ()
    bcast_p95_s: float = 0.0
    bcast_s: Mapping[str, float] = field(default_factory=dict)
    is_forecast: bool = False
    apply_s: Mapping[str, float] = field(default_factory=dict)
    down: Mapping[str, float] = field(default_factory=dict)

    def train_s(self, *, least: int = 1) -> float | None:
        """Mean time of a training step; None until there are so many. The very first one is left out where there are others."""
        taken = [batch.train_s for batch in self.batches if batch.step > 0 or len(self.batches) == 1]
        return fmean(taken) if len(self.batches) >= least and sum(taken) > 0 else None

    def idle(self) -> float | None:
        """Share of the learner's time that went into waiting; None before the second step."""
        taken = [batch for batch in self.batches if batch.step > 0]
        waited, trained = sum(batch.waited_s for batch in taken), sum(batch.train_s for batch in taken)
        return waited / (waited + trained) if waited + trained > 0 else None


async def read_timings(reader: Reader, job: Job) -> Timings:
    """From the newest rows."""
    batches = await reader.select(Batch, job_id=job.id, state=BatchState.COMMITTED, order_by="-step", limit=RECENT)
    public = {
        (p.version, p.digest): p.published_at
        for p in await reader.select(Publication, job_id=job.id, order_by="-version", limit=RECENT)
    }
    confirmed = await reader.select(Holding, job_id=job.id, order_by="-confirmed_at", limit=HOLDINGS)
    held = _refreshed(confirmed)
    known = [(one, public[one.version, one.digest]) for one in held if (one.version, one.digest) in public]
    # Confirmed before it was published: the clock was set back between the two, and the span says nothing.
    delays = [(one, one.confirmed_at - since) for one, since in known if one.confirmed_at >= since]
    bcast_s = _means([(one.worker_id, seconds) for one, seconds in delays])
    expected_s = {} if delays else await _forecast(reader, job, _down(confirmed))
    return Timings(
        tuple(batches),
        bcast_p95_s=percentile([seconds for _, seconds in delays] or list(expected_s.values()), 0.95),
        bcast_s=bcast_s or expected_s,
        is_forecast=bool(expected_s),
        apply_s=_means([(one.worker_id, one.apply_s) for one in held]),
        down=_down(held),
    )


async def _forecast(reader: Reader, job: Job, down: Mapping[str, float]) -> dict[str, float]:
    """What the first delta is expected to take, by worker; none where its size is not forecast, or no link was seen yet."""
    delta, raw = await newest_metric(reader, job.id, FORECAST), await newest_metric(reader, job.id, "publish/bytes_full")
    if delta is None or raw is None:
        return {}
    return forecast_broadcasts(delta_bytes=delta.value, raw_bytes=raw.value, down=down)


async def refresh_bytes(reader: Reader, job: Job) -> float:
    """What the newest version sent to who held the one before; its forecast where the newest one went out whole; 0: not known."""
    newest, expected = await newest_metric(reader, job.id, "publish/bytes"), await newest_metric(reader, job.id, FORECAST)
    if newest is None:
        return 0.0
    return expected.value if expected is not None and expected.step == newest.step else newest.value


async def newest_metric(reader: Reader, job_id: str, name: str) -> Metric | None:
    """The figure of the newest step or version that has it."""
    newest = await reader.select(Metric, job_id=job_id, name=name, order_by="-step", limit=1)
    return newest[0] if newest else None


def _down(held: Sequence[Holding]) -> dict[str, float]:
    return _means([(one.worker_id, one.fetched_bytes / one.fetch_s) for one in held if one.fetch_s > 0 and one.fetched_bytes > 0])


def _refreshed(held: Sequence[Holding]) -> list[Holding]:
    """Without each worker's oldest, newest first: what a worker begins with is loaded whole, and long after it was published."""
    oldest = {one.worker_id: one for one in held}
    return [one for one in held if oldest[one.worker_id] is not one]


def _means(pairs: Sequence[tuple[str, float]]) -> dict[str, float]:
    by_worker: dict[str, list[float]] = defaultdict(list)
    for worker, value in pairs:
        by_worker[worker].append(value)
    return {worker: fmean(values) for worker, values in by_worker.items()}


async def measured_kappa(reader: Reader, job: Job) -> int:
    """Kappa of DESIGN 5 as measured; a worker that gives up what runs pauses for that, too."""
    timings = await read_timings(reader, job)
    given_up_s = await _given_up_s(reader, job) if job.config.staleness.on_update == "abort" else 0.0
    pauses = [(1.0, apply_s + given_up_s) for apply_s in timings.apply_s.values()]
    return fleet_kappa(job.config.staleness.publish_every, job.config.staleness.max, timings.train_s(), timings.bcast_p95_s, pauses)


async def _given_up_s(reader: Reader, job: Job) -> float:
    """Mean age of a completion that a publication interrupts: (1 + cv^2) / 2 mean durations."""
    newest = await reader.select(Rollout, job_id=job.id, accepted_at__gt=0.0, order_by="-accepted_at", limit=COMPLETIONS)
    total = sum(one.generate_s for one in newest)
    return sum(one.generate_s**2 for one in newest) / (2 * total) if total > 0 else 0.0
