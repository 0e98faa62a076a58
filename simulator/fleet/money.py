"""What a simulated job costs, in whole micro-dollars: workers by active time, traffic by the gigabyte, the learner by the hour.

Running totals instead of a sum over 10,000 workers: with p the price and f the second from which it runs, Σ p·(now − f) is
(Σ p)·now − Σ p·f. `check` adds it up worker by worker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pricing.money import accrued_uusd
from simulator.fleet.worker import FleetWorker
from simulator.laws import LawBroken

MS_PER_HOUR = 3_600_000


@dataclass(slots=True)
class Purse:
    """The job's accounts; `limit_uusd` None: no budget."""

    learner_uusd_per_hour: int
    limit_uusd: int | None
    workers_uusd: int = 0  # of intervals that have ended
    transfer_uusd: int = 0
    price_sum: int = 0  # of the active workers, uUSD per hour
    _price_times_from: int = 0  # uUSD/h times milliseconds
    intervals: int = 0

    def begin(self, worker: FleetWorker) -> None:
        """A worker's interval at its present price; `paid_from` is set."""
        worker.paid = True
        self.price_sum += worker.price_uusd
        self._price_times_from += worker.price_uusd * _ms(worker.paid_from)
        self.intervals += 1

    def end(self, worker: FleetWorker, at: float) -> None:
        """The interval ends."""
        worker.paid = False
        worker.paid_s += max(at - worker.paid_from, 0.0)
        self.price_sum -= worker.price_uusd
        self._price_times_from -= worker.price_uusd * _ms(worker.paid_from)
        self.workers_uusd += worker.price_uusd * max(_ms(at) - _ms(worker.paid_from), 0) // MS_PER_HOUR

    def spent(self, now: float) -> int:
        """Until now, everything; rounded down for each interval that has ended and once for the open ones."""
        open_uusd = (self.price_sum * _ms(now) - self._price_times_from) // MS_PER_HOUR
        return self.workers_uusd + open_uusd + self.transfer_uusd + self.learner(now)

    def learner(self, now: float) -> int:
        """Of which the learner's."""
        return accrued_uusd(self.learner_uusd_per_hour, seconds=now)

    def seconds_left(self, now: float) -> float | None:
        """Until the budget is spent if nothing changes; None without a budget or without spending."""
        burn = self.price_sum + self.learner_uusd_per_hour
        if self.limit_uusd is None or burn == 0:
            return None
        return max((self.limit_uusd - self.spent(now)) * 3600 / burn, 0.0)

    def check(self, workers: Iterable[FleetWorker], now: float) -> None:
        """Law 7, in full: the running totals are the sums over workers, and the budget is not passed."""
        paid = [worker for worker in workers if worker.paid]
        one_by_one = sum(worker.price_uusd * (_ms(now) - _ms(worker.paid_from)) for worker in paid)
        running = self.price_sum * _ms(now) - self._price_times_from
        if one_by_one != running or self.price_sum != sum(worker.price_uusd for worker in paid):
            raise LawBroken(f"open intervals come to {one_by_one} uUSD·ms/h one by one and to {running} in the totals")
        if self.limit_uusd is not None and self.spent(now) > self.limit_uusd:
            raise LawBroken(f"{self.spent(now)} uUSD are spent and the budget is {self.limit_uusd}")


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
