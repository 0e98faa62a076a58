"""Owners change what they ask; without a quote there is no work, and the words say why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.domain.model import Invite, PriceRow, QuoteRow, Worker
from coordinator.service.market import Market, turn

JOB = "job-1"


async def end_quotes(coordinator: Any, worker: Any) -> None:
    for quote in await coordinator.rows(QuoteRow, worker_id=worker.id, ended_at=None):
        await coordinator.put(replace(quote, ended_at=coordinator.clock.now(), ended_because="a test ends it"))


async def test_a_new_price_rides_on_a_beat_and_is_kept(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    coordinator.clock.added += 20
    reply = await worker.beat(0, price_uusd_per_hour=500_000)
    assert (reply.price_uusd_per_hour, reply.price_refused) == (500_000, "")
    assert (await coordinator.get(Worker, worker.id)).price_uusd_per_hour == 500_000
    assert [row.uusd_per_hour for row in await coordinator.rows(PriceRow, worker_id=worker.id, order_by="at")] == [350_000, 500_000]
    again = await worker.beat(0, price_uusd_per_hour=500_000)
    assert again.price_uusd_per_hour == 500_000
    assert (await worker.beat(0)).price_uusd_per_hour == 500_000  # a beat that names none changes none
    assert len(await coordinator.rows(PriceRow, worker_id=worker.id)) == 2


async def test_a_price_above_the_invites_ceiling_is_refused_in_words_and_the_old_one_stays(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    (invite,) = await coordinator.rows(Invite)
    await coordinator.put(replace(invite, price_ceiling_uusd_per_hour=400_000))
    coordinator.clock.added += 20
    reply = await worker.beat(0, price_uusd_per_hour=400_001)
    assert reply.price_uusd_per_hour == 350_000
    assert reply.price_refused == (
        "price 0.4000 USD an hour is refused: the invite allows at most 0.4000; 0.3500 USD an hour stays: ask for less, or ask the operator"
    )
    assert (await worker.beat(0, price_uusd_per_hour=400_000)).price_uusd_per_hour == 400_000


async def test_prices_change_once_in_a_while(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    coordinator.clock.added += 20
    assert (await worker.beat(0, price_uusd_per_hour=1)).price_uusd_per_hour == 1
    reply = await worker.beat(0, price_uusd_per_hour=2)
    assert (reply.price_uusd_per_hour, "one change in 10 s" in reply.price_refused) == (1, True)
    coordinator.clock.added += 11
    assert (await worker.beat(0, price_uusd_per_hour=2)).price_uusd_per_hour == 2


async def test_the_market_quotes_the_new_price(coordinator: Any, stranger: Any) -> None:
    worker, market = await stranger().ready(), Market()
    await turn(coordinator.deps, market)
    coordinator.clock.added += 20
    await worker.beat(0, price_uusd_per_hour=500_000)
    await turn(coordinator.deps, market)
    (quote,) = await coordinator.rows(QuoteRow, worker_id=worker.id, ended_at=None)
    assert quote.uusd_per_idle_hour == 500_000


async def test_without_a_quote_a_request_waits_and_is_told_why(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    await worker.lease()
    await end_quotes(coordinator, worker)
    reply = await worker.ask()
    assert reply.leases == ()
    assert reply.reason.startswith("standby: the market has not decided yet")
    beat = await worker.beat(0)
    assert (beat.state, beat.reason) == ("standby", reply.reason)
    assert [notice.version for notice in beat.versions] == [0]  # it stays warm


async def test_leases_in_hand_run_to_their_end_when_a_quote_ends(coordinator: Any, stranger: Any) -> None:
    worker = await stranger().ready()
    lease = await worker.lease()
    await end_quotes(coordinator, worker)
    reply = await worker.submit(lease)
    assert len(reply.accepted) == len(lease.slots)


async def test_a_slot_that_the_only_active_worker_gave_up_comes_back_to_it(coordinator: Any, stranger: Any) -> None:
    """Workers without a quote could not take it, however many they are."""
    worker, other = await stranger().ready(), await stranger("w2").ready()
    lease = await worker.lease()
    await end_quotes(coordinator, other)
    coordinator.clock.added = lease.deadline - coordinator.clock.now() + coordinator.clock.added + 1
    await coordinator.sweep()
    await worker.beat(0)
    again = await worker.lease()
    assert again.group_id == lease.group_id
