"""A deterministic simulation of the spine: grant, lease, generate, admit, seal, train, publish, on a virtual clock.

The decisions are the product's own (`coordinator.domain`); only time, lengths and faults are made up, from the scenario's
seed. The laws are checked at every event and the audit at the end; a broken law raises LawBroken with the story so far.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable
from random import Random

from coordinator.domain import publication, retry
from coordinator.domain.audit import audit
from coordinator.domain.model import GroupState, Job, JobState, Worker, WorkerState
from coordinator.domain.seeds import derive
from coordinator.wire.environment import EnvironmentConfig
from coordinator.wire.job import (
    AlgorithmConfig,
    BudgetConfig,
    JobConfig,
    SamplingConfig,
    StalenessConfig,
)
from simulator.coordinator import Coordinator
from simulator.laws import LawBroken, Starvation, check_batch
from simulator.scenario import MAX_TOKENS, Outage, Outcome, Scenario, WorkerCrash, WorkerModel, warning_line
from simulator.worker import Generation, SimulatedWorker

STORY_LINES = 60
HORIZON_STEPS = 400.0  # virtual time limit, in step times per planned step


def run(scenario: Scenario) -> Outcome:
    """Simulate one job to its end. Raises LawBroken."""
    return Spine(scenario).run()


class Spine:
    """The event loop and the hands of learner, workers and network."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now = 0.0
        self.coordinator = Coordinator(_job(scenario), grace_s=scenario.grace_s, lost_after_s=scenario.lost_after_s)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._rng = Random(derive(scenario.seed, "spine"))  # noqa: S311 (seeded on purpose)
        self._workers = [SimulatedWorker(f"w{i}", model) for i, model in enumerate(scenario.workers)]
        self._starvation = Starvation(scenario.beat_s)
        self._story: deque[str] = deque(maxlen=STORY_LINES)
        self._up = True
        self._training = False
        self._learner_life = 0
        self._trained_s = 0.0
        self._first_seal: float | None = None
        self._started = 0
        self._aborted = 0
        self._replays = 0

    def run(self) -> Outcome:
        """Process events until the planned steps are committed."""
        self._begin()
        horizon = HORIZON_STEPS * self.scenario.steps * max(self.scenario.train_s, 1.0)
        while self.coordinator.job.committed_steps < self.scenario.steps:
            self.now, _, action = heapq.heappop(self._events)
            if self.now > horizon:
                raise self._broken(f"no end after {self.now:.0f} s: step {self.coordinator.job.committed_steps}")
            action()
            self._settle_down()
        return self._end()

    def _begin(self) -> None:
        for worker in self._workers:
            self.coordinator.join(_worker_row(worker), self.now)
            self._at(self._rng.uniform(0.0, self.scenario.beat_s), self._beat, worker)
        for outage in self.scenario.outages:
            self._at(outage.at, self._go_down, outage)
        for crash in self.scenario.crashes:
            self._at(crash.at, self._crash, crash)
        self._publish_if_due()

    def _at(self, delay_s: float, action: Callable[..., None], *args: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + delay_s, self._count, lambda: action(*args)))

    def _tell(self, words: str) -> None:
        self._story.append(f"{self.now:9.2f} s  step {self.coordinator.job.committed_steps}: {words}")

    def _broken(self, words: str) -> LawBroken:
        return LawBroken("\n".join((words, f"scenario: {self.scenario}", *self._story)))

    def _settle_down(self) -> None:
        """What follows from the rows as they are now: seal, grant, check. Nothing happens while the coordinator is down."""
        if not self._up:
            self._starvation.pause()
            return
        try:
            self._seal_if_ready()
            for worker in self._workers:
                self._feed(worker)
            idle = [worker.id for worker in self._workers if worker.is_idle and self.coordinator.may_lease(worker.id)]
            self._starvation.check(self.coordinator, idle, self.now)
        except LawBroken as broken:
            raise self._broken(str(broken)) from broken

    # Learner

    def _seal_if_ready(self) -> None:
        if self._training:
            return
        batch = self.coordinator.seal(self.now)
        if batch is None:
            return
        check_batch(self.coordinator, batch)
        self._tell(f"sealed groups {batch.groups}, staleness {batch.staleness}")
        self._first_seal = self.now if self._first_seal is None else self._first_seal
        self._train()

    def _train(self) -> None:
        self._training = True
        self._at(self.scenario.train_s, self._trained, self._learner_life)

    def _trained(self, life: int) -> None:
        if life != self._learner_life:  # that learner died in an outage
            return
        self._training = False
        self._trained_s += self.scenario.train_s
        self.coordinator.commit(self.now)
        self._publish_if_due()

    def _kappa(self) -> int:
        return publication.kappa(
            self.scenario.publish_every,
            bound=self.scenario.bound,
            train_s=self.scenario.train_s,
            bcast_p95_s=self.scenario.bcast_s * 1.5,
            pause_s=0.0,
        )

    def _publish_if_due(self) -> None:
        job, newest = self.coordinator.job, self.coordinator.newest
        published = None if newest is None else newest.version
        if publication.is_due(
            committed_steps=job.committed_steps,
            published=published,
            kappa=self._kappa(),
            planned_steps=self.scenario.steps,
        ):
            self.coordinator.publish(job.committed_steps, f"digest-{job.committed_steps}", self.now)
            self._tell(f"published version {job.committed_steps}")
            for worker in self._workers:
                self._fetch(worker)

    # Weights

    def _fetch(self, worker: SimulatedWorker) -> None:
        newest = self.coordinator.newest
        if not worker.up or worker.fetching or newest is None or newest.digest == worker.digest:
            return
        worker.fetching = True
        delay_s = self.scenario.bcast_s * self._rng.uniform(0.5, 1.5)
        self._at(delay_s, self._fetched, worker, worker.life, newest.version, newest.digest)

    def _fetched(self, worker: SimulatedWorker, life: int, version: int, digest: str) -> None:
        if life != worker.life or not worker.up:
            return
        if not self._up:  # confirming needs the coordinator
            self._retry(self._fetched, worker, life, version, digest)
            return
        worker.fetching = False
        self.coordinator.confirm(worker.id, version, digest, self.now)
        worker.swap(version, digest, self.now)
        self._fetch(worker)

    # Work

    def _feed(self, worker: SimulatedWorker) -> None:
        if worker.up and worker.version is not None and worker.free_slots > 0:
            for lease in self.coordinator.lease(worker.id, worker.free_slots, self.now):
                worker.take(lease)
        self._start(worker)

    def _start(self, worker: SimulatedWorker) -> None:
        for generation in worker.start(self.scenario.seed, self.scenario.tail, self.now):
            self._started += 1
            self._at(generation.tokens / worker.model.tokens_per_s, self._finished, worker, generation)

    def _finished(self, worker: SimulatedWorker, generation: Generation) -> None:
        if worker.running.get((generation.lease.id, generation.slot)) is not generation:
            return
        del worker.running[generation.lease.id, generation.slot]
        self._submit(worker, generation)
        self._start(worker)

    def _submit(self, worker: SimulatedWorker, generation: Generation) -> None:
        if generation.life != worker.life or not worker.up:
            return
        if not self._up:
            self._retry(self._submit, worker, generation)
            return
        done, claimed = worker.finish(generation)
        verdict = self.coordinator.submit(generation.lease, worker.life, done, claimed=claimed, now=self.now)
        if not verdict.accepted:
            self._tell(f"{worker.id} refused: {verdict.code}: {verdict.reason}")
            return
        number = int(generation.lease.group_id[1:])
        self._at(self.scenario.grade_s, self._grade, number, generation.slot)

    def _grade(self, number: int, slot: int) -> None:
        if not self._up:
            self._retry(self._grade, number, slot)
            return
        draw = Random(derive(self.scenario.seed, "reward", number))  # noqa: S311 (seeded on purpose)
        alike = draw.random() < self.scenario.zero_variance
        self.coordinator.grade(number, slot, 1.0 if alike else float(slot % 2), self.now)

    def _retry(self, action: Callable[..., None], *args: object) -> None:
        self._at(0.05 + retry.delay_s(2, first_s=0.5, most_s=2.0, rng=self._rng), action, *args)

    # Beats and faults

    def _beat(self, worker: SimulatedWorker) -> None:
        self._at(self.scenario.beat_s, self._beat, worker)
        if not self._up:
            return
        if worker.up:
            stopped = worker.keep_only(self.coordinator.beat(worker.id, self.now))
            self._aborted += len(stopped)
            self._fetch(worker)
        self.coordinator.sweep(self.now)

    def _go_down(self, outage: Outage) -> None:
        self._tell(f"coordinator down for {outage.for_s:.1f} s")
        self._up, self._learner_life = False, self._learner_life + 1
        self._at(outage.for_s, self._come_up, outage)

    def _come_up(self, outage: Outage) -> None:
        self._up = True
        self.coordinator.restarted(self.now)
        newest = self.coordinator.newest
        if outage.rolled_back and newest is not None:
            self._replays += 1
            self._tell(f"replay gave version {newest.version} other weights")
            self.coordinator.roll_back(newest.digest, f"{newest.digest}-replay{self._replays}", self.now)
        for worker in self._workers:
            self._fetch(worker)
        if self._training:  # the sealed batch is trained again by the new learner
            self._train()

    def _crash(self, crash: WorkerCrash) -> None:
        worker = self._workers[crash.worker]
        self._tell(f"{worker.id} crashed, back in {crash.for_s} s")
        worker.crash()
        if crash.for_s is not None:
            self._at(crash.for_s, self._rejoin, worker)

    def _rejoin(self, worker: SimulatedWorker) -> None:
        if worker.up:  # back already, from an earlier crash
            return
        if not self._up:
            self._retry(self._rejoin, worker)
            return
        worker.up = True
        self.coordinator.join(_worker_row(worker), self.now)
        worker.life = self.coordinator.workers[worker.id].session_epoch
        self._fetch(worker)

    # The end

    def _end(self) -> Outcome:
        coordinator = self.coordinator
        coordinator.finish(self.now)
        report = audit(
            coordinator.job,
            tuple(coordinator.groups.values()),
            tuple(row for rows in coordinator.rollouts.values() for row in rows),
            tuple(coordinator.leases.values()),
            tuple(coordinator.batches),
            tuple(coordinator.publications),
            tuple(coordinator.refusals),
        )
        if not report.ok:
            raise self._broken("the audit found: " + "; ".join(report.findings))
        first = self.now if self._first_seal is None else self._first_seal
        return Outcome(
            steps=coordinator.job.committed_steps,
            utilisation=self._trained_s / max(self.now - first, self._trained_s),
            discards=self._discarded() / max(self._started, 1),
            staleness=_histogram(coordinator),
            started=self._started,
            seconds=self.now,
            kappa=self._kappa(),
            reasons=_reasons(coordinator),
            story=tuple(self._story),
        )

    def _discarded(self) -> int:
        """Completions thrown away for their age: stopped or refused after the lease died, or in groups rejected as stale."""
        refused = sum(refusal.code in ("lease_dead_by_version", "stale") for refusal in self.coordinator.refusals)
        stale = 0
        for number, group in self.coordinator.groups.items():
            if group.state is GroupState.REJECTED and group.reason.startswith("stale"):
                stale += sum(row.accepted_at is not None for row in self.coordinator.rollouts[number])
        return self._aborted + refused + stale


def _histogram(coordinator: Coordinator) -> dict[int, int]:
    ages: Counter[int] = Counter()
    for batch in coordinator.batches:
        ages.update({int(age): count for age, count in batch.staleness.items()})
    return dict(sorted(ages.items()))


def _reasons(coordinator: Coordinator) -> dict[str, int]:
    codes = Counter(refusal.code for refusal in coordinator.refusals)
    for group in coordinator.groups.values():
        if group.state in (GroupState.REJECTED, GroupState.VOID):
            codes[f"group {group.state}: {group.reason.split(':')[0]}"] += 1
    return dict(sorted(codes.items()))


def _job(scenario: Scenario) -> Job:
    config = JobConfig(
        name="spine",
        model="model",
        seed=scenario.seed,
        environment=EnvironmentConfig(type="digit_sort"),
        algorithm=AlgorithmConfig(
            group_size=scenario.group_size,
            groups_per_step=scenario.groups_per_step,
            min_group=scenario.min_group,
        ),
        staleness=StalenessConfig(max=scenario.bound, publish_every=scenario.publish_every),
        sampling=SamplingConfig(max_new_tokens=MAX_TOKENS),
        budget=BudgetConfig(steps=scenario.steps),
    )
    return Job("job", "spine", "owner", config, JobState.RUNNING, "", 0.0, 0.0, "model")


def _worker_row(worker: SimulatedWorker) -> Worker:
    return Worker(
        id=worker.id,
        public_key="",
        name=worker.id,
        owner="",
        invite_id="",
        state=WorkerState.STANDBY,
        reason="",
        state_since=0.0,
        joined_at=0.0,
        last_seen_at=0.0,
        session_epoch=1,
        engine={},
        price_uusd_per_hour=0,
        max_slots=worker.model.slots,
        tokens_per_s=worker.model.tokens_per_s * worker.model.slots,
    )


def table(bounds: tuple[int, ...] = (0, 1, 2, 3, 4, 6), tails: tuple[float, ...] = (0.0, 0.5, 1.0)) -> str:
    """Utilisation and discards at 1.15 x load for some bounds and tails, as text."""
    fleet = (WorkerModel(4, 8.0), WorkerModel(8, 16.0), WorkerModel(4, 16.0), WorkerModel(2, 4.0))
    lines = ["  S  tail  kappa  inside  utilisation  discards  mean staleness  steps  seconds"]
    for bound in bounds:
        for tail in tails:
            scenario = Scenario(workers=fleet, bound=bound, tail=tail, steps=40, groups_per_step=16)
            outcome = run(scenario)
            groups = sum(outcome.staleness.values())
            mean = sum(age * count for age, count in outcome.staleness.items()) / groups
            inside = "yes" if warning_line(scenario, kappa=outcome.kappa) <= bound else "no"
            lines.append(
                f"{bound:3d}  {tail:4.1f}  {outcome.kappa:5d}  {inside:>6}  {outcome.utilisation:11.3f}  "
                f"{outcome.discards:8.4f}  {mean:14.2f}  {outcome.steps:5d}  {outcome.seconds:7.0f}"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
