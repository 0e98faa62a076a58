"""Prometheus' text format, made from rows at each scrape: a restart changes no figure (law 6), but for counters of calls and the lag."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from coordinator.domain.model import Batch, Job, JobState, Worker, WorkerState
from coordinator.service.ledger import spent_uusd
from coordinator.service.operator_figures import ENDED, learner_view
from coordinator.service.operator_views import newest_metric
from coordinator.service.ports import Reader
from coordinator.wire.rest import REWARD_METRIC

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_JOBS = 100
STEPS_COUNTED = 200
CONTROL_WAYS = ("libp2p", "https")
Sample = tuple[str, str, dict[str, str], float]  # name, help, labels, value


class _Rows(Collector):
    """Figures that were read already, as metric families."""

    def __init__(self, samples: list[Sample], asked: Mapping[str, int]) -> None:
        self._samples = samples
        self._asked = asked

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for name, words, labels, value in self._samples:
            family = families.get(name)
            if family is None:
                families[name] = family = GaugeMetricFamily(name, words, labels=list(labels))
            family.add_metric(list(labels.values()), value)
        yield from families.values()
        calls = CounterMetricFamily("echo2_control_requests", "Control requests answered since the start, by way", labels=["way"])
        for way in CONTROL_WAYS:
            calls.add_metric([way], self._asked.get(way, 0))
        yield calls


MARKET = (
    ("required_rate", "Completions per second that keep the learner busy"),
    ("offered_rate", "Completions per second that the active workers bring"),
    ("usd_per_hour", "Asked by the active workers"),
    ("active", "Workers active for the job"),
    ("offers", "Workers that may serve the job"),
    ("predicted_idle", "Share of learner time predicted to be waited"),
    ("measured_idle", "Share of learner time waited, newest steps"),
)


async def exposition(reader: Reader, *, now: float, asked: Mapping[str, int], lag_s: float) -> bytes:
    """The page. `asked`: control requests answered, by way; `lag_s`: the longest that the event loop stood still lately."""
    lag: Sample = ("echo2_event_loop_lag_seconds", "The longest that calls waited for the event loop, last minute", {}, lag_s)
    samples = [lag, *await _pool(reader), *await _jobs(reader, now=now)]
    registry = CollectorRegistry()
    registry.register(_Rows(samples, asked))
    return generate_latest(registry)


async def _pool(reader: Reader) -> list[Sample]:
    samples: list[Sample] = []
    for worker_state in WorkerState:
        count = await reader.count(Worker, state=worker_state)
        samples.append(("echo2_workers", "Workers by state", {"state": worker_state.value}, count))
    for job_state in JobState:
        count = await reader.count(Job, state=job_state)
        samples.append(("echo2_jobs", "Jobs by state", {"state": job_state.value}, count))
    return samples


async def _jobs(reader: Reader, *, now: float) -> list[Sample]:
    samples: list[Sample] = []
    live = [state for state in JobState if state not in ENDED]
    for job in await reader.select(Job, state=live, order_by="-created_at", limit=MOST_JOBS):
        samples += await _job(reader, job, now=now)
    return samples


async def _job(reader: Reader, job: Job, *, now: float) -> list[Sample]:
    labels = {"job": job.id, "name": job.name}
    batches = await reader.select(Batch, job_id=job.id, order_by="-step", limit=STEPS_COUNTED)
    learner = learner_view(job, batches)
    reward = await newest_metric(reader, job.id, REWARD_METRIC)
    committed = [batch.committed_at for batch in batches if batch.committed_at is not None]
    figures: list[tuple[str, str, float | None]] = [
        ("echo2_job_committed_steps", "Steps the learner committed", job.committed_steps),
        ("echo2_job_planned_steps", "Steps the job ends after", job.config.budget.steps),
        ("echo2_job_reward", "Mean sampled reward of the newest step", None if reward is None else reward.value),
        ("echo2_job_learner_utilisation", f"Training share of learner time, newest {STEPS_COUNTED} steps", learner.utilisation),
        ("echo2_job_cost_usd", "Posted as spent in the ledger so far", await spent_uusd(reader, job.id) / 1e6),
        ("echo2_job_last_step_age_seconds", "Since a step was last committed", now - max(committed) if committed else None),
    ]
    for name, words in MARKET:
        newest = await newest_metric(reader, job.id, f"market/{name}")
        figures.append((f"echo2_market_{name}", words, None if newest is None else newest.value))
    return [(name, words, labels, value) for name, words, value in figures if value is not None]
