"""A fleet on a virtual clock: one event for a lease, one for a request of work, one for a birth, death, review, step; none for a beat.

The decisions are the product's: grant, lease size, wall deadline, seal, staleness, publication, kappa, activation, swarm policy. Made up, from
the seed, are lengths, deaths, returns and prices. Deterministic: the same scenario gives the same result.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from math import inf
from random import Random
from typing import Any

from coordinator.domain import publication
from coordinator.domain.capacity_inputs import Lengths
from coordinator.domain.seeds import derive
from pricing.cost import GB
from pricing.money import usd_to_uusd
from simulator.fleet import market, weights
from simulator.fleet.board import Board, Group, Lease
from simulator.fleet.laws import Laws
from simulator.fleet.money import Purse
from simulator.fleet.outcome import Outcome, Recorder
from simulator.fleet.scenario import Scenario
from simulator.fleet.spread import arrivals, p95_s
from simulator.fleet.worker import COLD, FleetWorker, Publication

HOUR_S = 3600.0
MOMENT_S = 1e-6
TRIES = 64  # workers with too old a version that are asked for a lost completion: each later request looks as well
FULL_CHECKS = 200  # over the whole duration
LENGTHS = 1 << 16  # drawn at once


def simulate(scenario: Scenario) -> Outcome:
    """Run it to its end. Raises LawBroken."""
    return Run(scenario).run()


class Run:
    """One simulation, while it runs."""

    def __init__(self, scenario: Scenario) -> None:
        self.of = scenario
        self.now = 0.0
        self.until = scenario.hours * HOUR_S
        self._rng = Random(derive(scenario.seed, "fleet"))  # noqa: S311 (seeded on purpose)
        self._heap: list[tuple[float, int, Callable[..., None], Any]] = []
        self._pushed = 0
        self.events = 0
        self.laws = Laws(scenario.job.groups_per_step, scenario.job.staleness)
        tokens = scenario.job.lengths
        self._lengths = Lengths.lognormal(tokens.cv, cap=tokens.max_tokens / tokens.mean_tokens).values
        self._drawn: list[float] = []
        self.board = Board(scenario, self._draw, self._rng, self.laws)
        budget = scenario.budget.usd
        self.purse = Purse(usd_to_uusd(scenario.learner_usd_per_hour), None if budget is None else usd_to_uusd(budget))
        self.log: list[Publication] = []
        self.workers: list[FleetWorker] = []
        self._spread: list[float] = []  # each worker's price, as a multiple of the group's
        self._asking_usd = [group.usd_per_hour for group in scenario.fleet]
        self._active = [0] * len(scenario.fleet)
        self._waiting: dict[FleetWorker, None] = {}
        self.kappa = 1
        self.training_since: float | None = None
        self._p95_s: float | None = None
        self._reviewed_at = -inf
        self._review_due = False
        self._stop_at = inf
        self._is_broke = False
        self.record = Recorder(scenario)

    # Time

    def run(self) -> Outcome:
        """Until the steps, the hours or the money are at an end."""
        self._begin()
        heap = self._heap
        while heap and not self._is_over():
            time, _, action, subject = heapq.heappop(heap)
            if time > min(self.until, self._stop_at):
                break
            self.now = time
            self.events += 1
            action(subject)
        return self._end()

    def _is_over(self) -> bool:
        return self.board.step >= self.board.planned

    def _at(self, time: float, action: Callable[..., None], subject: Any = None) -> None:
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, action, subject))

    def _begin(self) -> None:
        for place, group in enumerate(self.of.fleet):
            for _ in range(group.count):
                self._spread.append(self._rng.gauss(0.0, 1.0) if group.price_spread else 0.0)
                worker = FleetWorker(
                    number=len(self.workers),
                    group=place,
                    slots=group.slots,
                    generation_s=group.slots / group.completions_per_second,
                    apply_s=self.of.snapshot.apply_s,
                    idles=self.of.job.on_update == "idle",
                    alive=False,
                    known=False,
                )
                self.workers.append(worker)
                self._at(group.start_hours * HOUR_S, self._join, worker)
            for move in group.prices:
                self._at(move.hours * HOUR_S, self._move_price, (place, move.usd_per_hour))
        self._at(0.0, self._open)
        self._at(0.0, self._look_in_full)

    def _draw(self, count: int) -> list[float]:
        """Lengths of so many completions, relative to their mean."""
        if len(self._drawn) < count:
            self._drawn += self._rng.choices(self._lengths, k=LENGTHS + count)
        taken = self._drawn[-count:]
        del self._drawn[-count:]
        return taken

    def _open(self, _: None) -> None:
        """The job starts: everybody who is there at 0 has joined, and the first version is published."""
        self._choose_kappa()
        self._review(None)
        self._publish_if_due()
        for worker in self.workers:
            if worker.active:
                self._ask_later(worker)

    # Workers

    def _join(self, worker: FleetWorker) -> None:
        worker.revive()
        group = self.of.fleet[worker.group]
        worker.price_uusd = market.spread_price(self._asking_usd[worker.group], group.price_spread, self._spread[worker.number])
        self.record.joined += 1
        if hazard := market.losses_per_s(group.churn_per_hour):
            self._at(self.now + self._rng.expovariate(hazard), self._die, worker)
        if not self.of.market.on:
            self._activate(worker)
        elif self.now > 0:
            self._review_soon()

    def _activate(self, worker: FleetWorker) -> None:
        worker.begin(self.now)
        self._active[worker.group] += 1
        if not worker.paid:
            worker.paid_from = self.now
            self.purse.begin(worker)
            self._watch_budget()
        if self.log:
            if worker.place == COLD:
                usd_per_gb = self.of.fleet[worker.group].usd_per_gb_down
                self._can_pay(int(self.of.snapshot.keyframe_bytes / GB * usd_to_uusd(usd_per_gb)))
            self._ask_later(worker)

    def _drain(self, worker: FleetWorker) -> None:
        """No new leases; paid until it has finished what it has."""
        self._retire(worker)
        if not worker.leases:
            self._stop_pay(worker, self.now)

    def _retire(self, worker: FleetWorker) -> None:
        if worker.active:
            worker.look(self.now, self.log)
            worker.end()
            self._active[worker.group] -= 1
            self._waiting.pop(worker, None)

    def _stop_pay(self, worker: FleetWorker, at: float) -> None:
        if worker.paid:
            self.purse.end(worker, at)
            self._watch_budget()

    def _die(self, worker: FleetWorker) -> None:
        """It is silent from now on. Its last beat is up to one interval old; the coordinator waits for the rest of its patience."""
        worker.look(self.now, self.log)
        worker.die(self.now)
        self._waiting.pop(worker, None)
        liveness = self.of.liveness
        last_beat = self.now - self._rng.random() * liveness.heartbeat_s
        self._at(last_beat + liveness.lost_after_s, self._lose, (worker, last_beat))

    def _lose(self, loss: tuple[FleetWorker, float]) -> None:
        worker, last_beat = loss
        self.record.departed += 1
        self._stop_pay(worker, max(last_beat, worker.paid_from))
        leases = list(worker.leases)
        for lease in leases:
            self._whole(self.board.cut(lease, self.now, "lost"))
        self._retire(worker)
        worker.known = False
        back_s = self._rng.expovariate(1.0) * self.of.fleet[worker.group].return_hours * HOUR_S
        self._at(self.now + back_s, self._join, worker)
        if self.of.market.on:
            self._review_soon()
        if leases:
            self._wake()

    # Work

    def _ask_later(self, worker: FleetWorker) -> None:
        """When its next slot is free, or its first version here."""
        if worker.asking:
            return
        worker.look(self.now, self.log)
        free_at = max(worker.free_at[0] + worker.still_s, worker.still_until, self.now)
        at = worker.swap_at if worker.version == COLD else free_at
        if at < inf:
            worker.asking = True
            self._at(at, self._ask, (worker, worker.life))

    def _ask(self, asked: tuple[FleetWorker, int]) -> None:
        worker, life = asked
        if worker.life != life or not worker.alive:
            return
        worker.asking = False
        self._request(worker)

    def _request(self, worker: FleetWorker) -> None:
        worker.look(self.now, self.log)
        if worker.version == COLD or worker.still_until > self.now:
            self._ask_later(worker)
            return
        leases = self.board.give(worker, self.now)
        if leases:
            self._waiting.pop(worker, None)
            for lease in leases:
                self._await(lease)
            self._ask_later(worker)
        elif worker.free_at[0] > worker.work_time(self.now) + MOMENT_S:
            self._ask_later(worker)
        else:
            self._waiting[worker] = None
            self._ask_at_swap(worker)

    def _ask_at_swap(self, worker: FleetWorker) -> None:
        """Nothing for its version: the next one may be granted more."""
        worker.look(self.now, self.log)
        if worker.swap_at < inf and not worker.asking:
            worker.asking = True
            self._at(worker.swap_at, self._ask, (worker, worker.life))

    def _wake(self) -> None:
        """Something may have come free; those who wait longest are asked first."""
        if not self.board.missing and self.board.gate_is_shut:
            return
        failures = 0
        for worker in list(self._waiting):
            if self.board.gate_is_shut and (not self.board.missing or failures == TRIES):
                return
            del self._waiting[worker]
            self._request(worker)
            failures += worker in self._waiting

    def _await(self, lease: Lease) -> None:
        self._at(min(lease.last_end + lease.worker.still_s, lease.deadline), self._due, lease)

    def _due(self, lease: Lease) -> None:
        worker = lease.worker
        if lease not in worker.leases or not worker.alive:
            return
        worker.look(self.now, self.log)
        if lease.last_end + worker.still_s <= self.now + MOMENT_S:
            self._whole(self.board.finish(lease))
        elif self.now >= lease.deadline:
            self.board.counts.expired_leases += 1
            self._whole(self.board.cut(lease, self.now, "lost"))
            self._freed(worker)
            self._wake()
            return
        else:
            self._await(lease)
            return
        if not worker.active and not worker.leases:
            self._stop_pay(worker, self.now)
        if self.board.missing:
            self._wake()

    def _freed(self, worker: FleetWorker) -> None:
        """A lease of it was cut."""
        if worker.active and worker.alive:
            worker.life += 1  # the request it planned was for a later time
            worker.asking = False
            self._ask_later(worker)
        elif not worker.active and not worker.leases and worker.alive:
            self._stop_pay(worker, self.now)

    def _whole(self, group: Group | None) -> None:
        if group is not None:
            self._at(self.now + self.of.job.grade_s, self._graded, group)

    # Steps

    def _graded(self, group: Group) -> None:
        self.board.graded(group)
        self._seal()

    def _seal(self) -> None:
        came_free = self.board.seal()
        if self.board.batch is not None and self.training_since is None:
            self.training_since = self.now
            self.record.sealed(self.now)
            self._at(self.now + self.of.job.train_s, self._commit)
        if came_free:
            self._wake()

    def _commit(self, _: None) -> None:
        self.training_since = None
        self.record.trained_s += self.of.job.train_s
        ended, whole = self.board.commit(self._look, self.now)
        for group in whole:
            self._whole(group)
        self._publish_if_due()
        for worker in dict.fromkeys(lease.worker for lease in ended):
            self._freed(worker)
        self._wake()
        self._seal()

    def _look(self, worker: FleetWorker) -> None:
        worker.look(self.now, self.log)

    # Weights

    def _choose_kappa(self) -> None:
        job = self.of.job
        self.kappa = publication.kappa(
            job.publish_every,
            bound=job.staleness,
            train_s=job.train_s,
            bcast_p95_s=self._p95_s,
            pause_s=self._p95_s if job.on_update == "idle" else self.of.snapshot.apply_s,
        )

    def _publish_if_due(self) -> None:
        newest = self.log[-1].version if self.log else None
        self._choose_kappa()
        if not publication.is_due(
            committed_steps=self.board.step, published=newest, kappa=self.kappa, planned_steps=self.board.planned
        ):
            return
        snapshot, first = self.of.snapshot, newest is None
        size = snapshot.keyframe_bytes if first else weights.refresh_bytes(self.of)
        if not self._can_pay(sum(weights.bills(self.of, size, self._active))):
            return
        swarm = weights.swarm_of(self.of, self._active)
        times = arrivals(swarm, size, seed=self.of.seed)
        self.board.newest = self.board.step
        self.log.append(weights.published(self.of, swarm, times, self.now, self.board.step))
        if not first and swarm.workers:
            self._p95_s = p95_s(times, self._active) + snapshot.apply_s
            self.record.broadcast(times, self._active, snapshot.apply_s)
        for worker in list(self._waiting):
            self._ask_at_swap(worker)

    def _can_pay(self, uusd: int) -> bool:
        """Book traffic, or end the job because the budget does not allow it."""
        limit = self.purse.limit_uusd
        if limit is not None and self.purse.spent(self.now) + uusd > limit:
            self._is_broke = True
        else:
            self.purse.transfer_uusd += uusd
        self._watch_budget()
        return not self._is_broke

    # Market

    def _move_price(self, move: tuple[int, float]) -> None:
        place, usd = move
        self._asking_usd[place] = usd
        spread = self.of.fleet[place].price_spread
        for worker in self.workers:
            if worker.group != place:
                continue
            paid = worker.paid
            if paid:
                self.purse.end(worker, self.now)
            worker.price_uusd = market.spread_price(usd, spread, self._spread[worker.number])
            if paid:
                worker.paid_from = self.now
                self.purse.begin(worker)
        self._watch_budget()
        if self.of.market.on:
            self._review_soon()

    def _review_soon(self) -> None:
        if self._review_due:
            return
        self._review_due = True
        self._at(max(self.now, self._reviewed_at + self.of.market.react_s), self._review, "early")

    def _review(self, why: str | None) -> None:
        """Decide anew who is active."""
        if not self.of.market.on:
            return
        if why == "early":
            self._review_due = False
        elif why == "periodic" and self.now < self._reviewed_at + self.of.market.review_s - MOMENT_S:
            return  # one came early meanwhile, and planned its own follower
        self._reviewed_at = self.now
        present = market.buckets(self.workers)
        if present:
            spent = self.purse.spent(self.now)
            moment = market.Moment(self.now, self.board.step, self.kappa, spent, self.purse.learner_uusd_per_hour)
            decision = market.decide(self.of, present, moment)
            self.record.decided(decision)
            by_id = {market.offer_id(bucket): workers for bucket, workers in present.items()}
            for change in decision.drain:
                active = [worker for worker in by_id[change.offer_id] if worker.active]
                for worker in sorted(active, key=lambda one: len(one.leases))[: change.count]:
                    self._drain(worker)
            for change in decision.start:
                idle = [worker for worker in by_id[change.offer_id] if not worker.active]
                for worker in sorted(idle, key=lambda one: -one.place)[: change.count]:
                    self._activate(worker)
        self._at(self.now + self.of.market.review_s, self._review, "periodic")

    def _watch_budget(self) -> None:
        left_s = 0.0 if self._is_broke else self.purse.seconds_left(self.now)
        self._stop_at = inf if left_s is None else self.now + left_s

    # Looking

    def _look_in_full(self, _: None) -> None:
        self.laws.in_full(self.board, self.workers, self.purse, self.now)
        self.laws.nobody_starves(self.board, self._waiting)
        self.record.sample(self)
        self._at(self.now + self.until / FULL_CHECKS, self._look_in_full)

    def _end(self) -> Outcome:
        end = min(self.until, self._stop_at)
        why = "the planned steps are done"
        if not self._is_over():
            self.now = end
            why = "the budget is spent" if self._stop_at < self.until else "the hours are over"
        self.laws.in_full(self.board, self.workers, self.purse, self.now)
        return self.record.outcome(self, why)

    def census(self) -> Counter[str]:
        """Workers by where they are."""
        found: Counter[str] = Counter()
        for worker in self.workers:
            found["active" if worker.active else "standby" if worker.known else "gone"] += 1
        return found
