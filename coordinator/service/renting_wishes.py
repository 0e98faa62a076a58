"""What to rent for which job: the market's verdicts as wishes for the renting loops. Waits for the clock (TURN_S).

Only jobs with a budget of money are rented for. A job that is short of rate gets one machine, and when its worker was measured as many more
as are missing, from the provider whose offer is cheapest for its measured (or assumed) rate. Machines whose workers had no work for IDLE_S go back.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence

import structlog

from coordinator.domain.model import JobState, QuoteRow, Worker
from coordinator.service.deps import Deps
from coordinator.service.market_board import Shown
from coordinator.service.ports import Reader
from coordinator.service.renting_ports import RENTALS, RentingSettings
from pricing.feeds.contract import RentalOffer
from pricing.money import usd_to_uusd
from pricing.rental_plan import usable
from pricing.rental_wish import Standing, ranked, wish, within_hour
from pricing.rentals import OPEN, Rental, RentalState

log = structlog.get_logger()
TURN_S = 15.0
IDLE_S = 900.0


async def keep_wishing(deps: Deps, providers: Mapping[str, RentingSettings]) -> None:
    """Say the wishes for ever. A round that fails is logged and repeated."""
    while True:
        try:
            await say(deps, providers)
        except ConnectionError:
            raise  # the store has ended
        except Exception:
            log.exception("wishing_failed")
        await asyncio.sleep(TURN_S)


async def say(deps: Deps, providers: Mapping[str, RentingSettings]) -> None:
    """One round over all jobs that the market has decided on."""
    now = deps.clock.now()
    for job_id, shown in sorted(deps.market.shown.items()):
        job = shown.market.job
        if job.state is not JobState.RUNNING or job.config.budget.usd is None or shown.verdict.required is None:
            continue
        rows = await deps.store.read(lambda r, job_id=job_id: r.select(Rental, job_id=job_id, state=list(OPEN)))  # type: ignore[misc]
        rentals = [row for row in rows if row.is_wanted]
        standing = await deps.store.read(lambda r, some=rentals, shown=shown: _standing(r, some, shown, now))  # type: ignore[misc]
        count, reason = wish(standing, short=shown.verdict.required * job.config.workers.headroom - shown.verdict.offered)
        candidates = await _candidates(deps, providers, standing, now)
        if (hourly := job.config.budget.usd_per_hour) is not None:
            prices, next_one = [row.price for row in rentals], candidates[0].uusd_per_hour if candidates else None
            asked = usd_to_uusd(shown.verdict.usd_per_hour)
            count, limit = within_hour(count, prices, next_one, allowed=usd_to_uusd(hourly), others=asked)
            reason = limit or reason
        _want(deps, providers, job_id, rentals, count, candidates)
        log.debug("wish", job=job_id, count=count, because=reason)
    deps.wake.notify(RENTALS)


async def _standing(reader: Reader, rentals: Sequence[Rental], shown: Shown, now: float) -> Standing:
    by_invite = {row.invite_id: row for row in rentals if row.invite_id}
    workers = await reader.select(Worker, invite_id=sorted(by_invite)) if by_invite else []
    bidders = {one.worker_id: one for one in shown.market.bidders}
    rates: dict[str, list[float]] = defaultdict(list)
    proven, idle = 0, 0
    for worker in workers:
        bidder, row = bidders.get(worker.id), by_invite[worker.invite_id]
        if bidder is None or not bidder.is_measured:
            continue
        proven += 1
        rates[str(row.offer.get("card", ""))].append(bidder.planned_rate(now))
        idle += worker.id not in shown.verdict.active and await _is_idle(reader, row, worker.id, now)
    return Standing(len(rentals), len(rentals) - proven, idle, rates)


async def _is_idle(reader: Reader, row: Rental, worker_id: str, now: float) -> bool:
    """Whether it runs for long and had no quote lately."""
    if row.state is not RentalState.RUNNING or now - row.state_since < IDLE_S:
        return False
    quoted = await reader.count(QuoteRow, worker_id=worker_id, ended_at=None)
    return not quoted and not await reader.count(QuoteRow, worker_id=worker_id, ended_at__ge=now - IDLE_S)


async def _candidates(
    deps: Deps, providers: Mapping[str, RentingSettings], standing: Standing, now: float
) -> tuple[RentalOffer, ...]:
    """All offers that can be asked for, the best first."""
    offers: list[RentalOffer] = []
    for name, settings in providers.items():
        since = now - settings.limits.cool_s
        ended = await deps.store.read(lambda r, name=name, since=since: r.select(Rental, provider=name, ending_since__ge=since))  # type: ignore[misc]
        offers += usable(deps.rentals.offers.get(name, ()), ended, now, settings.limits)
    return ranked(offers, standing.rates)


def _want(
    deps: Deps,
    providers: Mapping[str, RentingSettings],
    job_id: str,
    rentals: Sequence[Rental],
    count: int,
    candidates: Sequence[RentalOffer],
) -> None:
    """What is new goes to the provider of the best offer, what is too much is taken from the one that has most."""
    have = {name: sum(row.provider == name for row in rentals) for name in providers}
    more = count - len(rentals)
    if more > 0 and candidates:
        have[candidates[0].provider] += more
    if more < 0:
        most = max(have, key=lambda name: (have[name], name))
        have[most] = max(have[most] + more, 0)
    for name, number in have.items():
        deps.rentals.want(name, job_id, number, [offer for offer in candidates if offer.provider == name])
