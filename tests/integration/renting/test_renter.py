"""One fault at a time, where what must follow can be said: the coordinator's rows against the stand-in's truth."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from coordinator.domain.model import Invite, Job, JobState, LedgerAccount
from coordinator.service.ledger import Books, fund
from pricing import ledger
from pricing.ledger import Account
from pricing.rentals import Rental, RentalState, span_uusd
from tests.integration.renting.scene import JOB, Scene, feed_of
from tests.standin.here import sender, standin
from tests.standin.world import Fates

KINDS = pytest.mark.parametrize("kind", ["vast", "runpod"])


async def scene_of(stores, kind, *, fates=None, **changes):
    rng = Random(3)
    faults = {name: changes.pop(name) for name in ("share", "only", "create_times") if name in changes}
    there = standin(kind, rng, fates=fates, **faults)
    scene = Scene(await stores(), there, feed_of(kind), sender(there), rng, **changes)
    await scene.open()
    return scene


async def turns(scene, count, times=1, *, apart_s=30.0):
    for _ in range(times):
        await scene.turn(count)
        scene.there.world.advance(apart_s)


async def rows(scene):
    return await scene.store.read(lambda r: r.select(Rental, order_by="requested_at"))


@KINDS
async def test_what_is_wanted_is_rented_and_given_back(stores, kind):
    scene = await scene_of(stores, kind)
    await turns(scene, 2, 6)
    assert [row.state for row in await rows(scene)] == [RentalState.RUNNING] * 2
    assert len(scene.there.world.rented()) == 2
    await turns(scene, 1, 8)
    assert len(scene.there.world.rented()) == 1
    await scene.end()
    assert not scene.violations
    invites = await scene.store.read(lambda r: r.select(Invite))
    assert all(invite.revoked_at is not None for invite in invites)


@KINDS
async def test_a_create_that_was_carried_out_and_whose_reply_was_lost_is_not_sent_again(stores, kind):
    scene = await scene_of(stores, kind, share=1.0, create_times=1.0, only=("timeout, carried out",))
    scene.there.faults.share = 0.0
    await scene.turn(0)  # a search without faults
    scene.there.faults.draw = lambda operation, now: "timeout, carried out" if operation == "create" else None
    await turns(scene, 1, 12)
    assert scene.there.asked.count("create") == 1
    assert [row.tries for row in await rows(scene)] == [1]
    assert len(scene.there.world.rented()) == 1


@KINDS
async def test_a_create_that_was_not_carried_out_is_sent_again_after_it_was_looked_for(stores, kind):
    scene = await scene_of(stores, kind)
    lost = iter(["timeout, not carried out"])
    scene.there.faults.draw = lambda operation, now: next(lost, None) if operation == "create" else None
    await turns(scene, 1, 12)
    assert [(row.tries, row.state) for row in await rows(scene)] == [(2, RentalState.RUNNING)]
    looks = scene.there.asked[scene.there.asked.index("create") :].index("create", 1)
    assert scene.there.asked[scene.there.asked.index("create") :][:looks].count("list") >= 3
    codes = await scene.store.read(lambda r: r.select(Invite, order_by="created_at"))
    assert [invite.revoked_at is None for invite in codes] == [False, True]  # what the lost create carried opens nothing


@KINDS
async def test_a_list_that_cannot_be_read_whole_says_nothing_of_what_it_lacks(stores, kind):
    """The create's reply was lost and the list shows a record of ours without its id: it is not absent, and nothing is created."""
    scene = await scene_of(stores, kind)
    spoilt = {"create": "timeout, carried out", "list": "a machine without an id"}
    scene.there.faults.draw = lambda operation, now: (
        spoilt.get(operation) if scene.there.world.instances or operation == "create" else None
    )
    await turns(scene, 1, 1)
    await turns(scene, 2, 12)
    assert [(row.state, row.tries, row.absent_looks) for row in await rows(scene)] == [(RentalState.REQUESTED, 1, 0)]
    assert scene.there.asked.count("create") == 1
    spoilt.clear()
    await turns(scene, 1, 3)
    assert [(row.state, row.tries) for row in await rows(scene)] == [(RentalState.RUNNING, 1)]


async def test_a_bid_that_was_refused_and_left_a_machine_is_destroyed(stores):
    scene = await scene_of(stores, "vast")
    refused = iter(["created, then an error"])
    scene.there.faults.draw = lambda operation, now: next(refused, None) if operation == "create" else None
    await turns(scene, 1, 10)
    left, good = scene.there.world.instances
    assert left.ended is not None
    assert good.ended is None
    assert [row.ending.partition(":")[0] for row in await rows(scene)] == ["no_capacity", ""]


@KINDS
async def test_an_outbid_machine_is_destroyed_and_another_one_rented(stores, kind):
    scene = await scene_of(stores, kind)
    await turns(scene, 1, 5)
    first = scene.there.world.instances[0]
    first.paused_at = scene.there.world.now
    await turns(scene, 1, 8)
    assert first.ended is not None
    assert [one.ended for one in scene.there.world.instances[1:]] == [None]
    assert scene.there.world.instances[1].machine is not first.machine  # that one failed lately
    calls = [name for name in scene.there.asked if name in ("create", "destroy")]
    assert calls[:3] == ["create", "destroy", "create"]  # what costs money is ended first


async def test_a_slow_start_is_given_up_after_its_time(stores):
    scene = await scene_of(stores, "vast", fates=Fates(usual_start_s=1e7))
    await turns(scene, 1, 30)
    first = scene.there.world.instances[0]
    assert first.ended is not None
    assert 600.0 <= first.ended - first.started <= 700.0
    assert (await rows(scene))[0].ending.startswith("slow_start: ")


async def test_a_machine_that_is_stuck_is_destroyed_again_and_costs_on(stores):
    scene = await scene_of(stores, "vast", fates=Fates(deaf=1.0))
    await turns(scene, 1, 5)
    await turns(scene, 0, 12)
    (row,) = await rows(scene)
    assert (row.state, row.destroys) == (RentalState.GONE, 3)
    assert row.cost_uusd >= scene.there.world.spent() - row.price / 3600


async def test_a_machine_with_our_label_that_no_row_knows_is_destroyed_and_counted(stores):
    scene = await scene_of(stores, "vast")
    scene.plant_orphan()
    scene.there.world.advance(600.0)
    await turns(scene, 0, 8)
    assert scene.there.world.rented() == []
    (row,) = await rows(scene)
    assert row.reason.startswith("orphan: ")
    assert row.cost_uusd == pytest.approx(scene.there.world.spent(), rel=0.06)  # to the first look that did not show it


@KINDS
async def test_machines_of_others_are_left_alone(stores, kind):
    """Another deployment's label, and none at all."""
    scene = await scene_of(stores, kind)
    world = scene.there.world
    for label in ("echo2-ffffffffffffffff-1", "my own"):
        world.rent(world.machines[0], label, {}, 100_000)
    await turns(scene, 0, 8)
    assert len(world.rented()) == 2
    assert await rows(scene) == []


async def test_an_empty_account_stops_creates_and_nothing_else(stores):
    scene = await scene_of(stores, "vast")
    scene.there.faults.draw = lambda operation, now: "no balance" if operation == "create" else None
    await turns(scene, 2, 6)
    assert scene.there.asked.count("create") == 1
    assert scene.there.asked.count("list") == 6


@KINDS
async def test_what_was_requested_is_not_created_unseen(stores, kind):
    """The coordinator died between writing a request and sending it, and now the list cannot be seen."""
    scene = await scene_of(stores, kind)
    scene.crash_at = "renting.decided"
    await turns(scene, 1)
    scene.there.faults.draw = lambda operation, now: "500 as text" if operation == "list" else None
    await turns(scene, 1, 3)
    assert [row.tries for row in await rows(scene)] == [0]
    assert "create" not in scene.there.asked


async def test_a_provider_that_asks_for_time_is_given_it(stores):
    scene = await scene_of(stores, "runpod")
    scene.there.faults.draw = lambda operation, now: "429 with Retry-After" if operation == "list" else None
    await turns(scene, 1, 20, apart_s=5.0)
    assert scene.there.asked.count("list") < 20
    assert scene.there.asked.count("create") == 0  # nothing is created unseen


async def test_a_provider_that_failed_is_asked_again_when_our_clock_steps_back(stores):
    scene = await scene_of(stores, "runpod")
    scene.there.faults.draw = lambda operation, now: "500 as text"
    await turns(scene, 1)
    scene.there.faults.draw = lambda operation, now: None
    scene.clock.offset_s -= 7200.0
    await turns(scene, 1, 5)
    assert len(scene.there.world.rented()) == 1


async def test_machines_outlive_a_coordinator_that_was_down_longer_than_their_patience(stores):
    """Nobody could hear the worker: it has silent_s (300 s) from the start on."""
    scene = await scene_of(stores, "vast")
    await turns(scene, 1, 6)
    scene.there.world.advance(3000.0)
    scene.start()
    await turns(scene, 1, 3)
    assert [(row.state, row.ending) for row in await rows(scene)] == [(RentalState.RUNNING, "")]


async def test_looking_for_long_leaves_time_to_destroy(stores):
    """The list shows none of three machines and each get takes a minute: the turn still gives its orders."""
    scene = await scene_of(stores, "vast")
    await turns(scene, 3, 5)
    for one in scene.there.world.rented():
        one.listed_from = 1e12
    draw = scene.there.faults.draw
    scene.there.faults.draw = lambda operation, now: (
        scene.there.world.advance(60.0 if operation == "get" else 0.0) or draw(operation, now)
    )
    scene.there.asked.clear()
    await scene.turn(0)
    assert scene.there.asked.count("get") == 2
    assert scene.there.asked.count("destroy") == 3


async def test_what_a_machine_cost_that_ends_in_this_turn_is_not_spent_again(stores):
    """The budget bears the next machine only if the first one had cost nothing."""
    scene = await scene_of(stores, "vast")
    await turns(scene, 1, 10)
    scene.there.world.instances[0].ended = scene.there.world.now
    await turns(scene, 1, 2)
    (row,) = await rows(scene)
    assert (row.absent_looks, row.is_open) == (2, True)
    cheapest = min(machine.uusd_per_hour for machine in scene.there.world.free() if str(machine.machine_id) != row.machine)
    limits = scene.limits
    most = span_uusd(-(-cheapest * (100 + limits.margin_percent) // 100), limits.blind_s + limits.stop_s)
    scene.budget_uusd = most + row.cost_uusd // 2
    scene.start()
    await turns(scene, 1)
    assert [(one.id, one.is_open) for one in await rows(scene)] == [(row.id, False)]


async def test_a_bill_that_outlasts_its_job_is_posted_inside_its_budget(stores):
    """The machine is stuck for hours after the job has ended; the job had money left."""
    scene = await scene_of(stores, "vast", job_usd=20.0)
    await turns(scene, 1, 5)
    scene.there.world.instances[0].deaf = 150
    await scene.end()
    assert scene.there.world.spent() > 3600.0 * scene.there.world.instances[0].machine.uusd_per_hour / 3600
    assert not scene.violations


async def test_a_bill_beyond_all_budgets_is_posted_up_to_the_jobs_and_no_further(stores):
    """A provider that bills for hours beyond stop_s: the ledger takes what the job has, and the row says the rest."""
    scene = await scene_of(stores, "vast")
    price = min(machine.uusd_per_hour for machine in scene.there.world.free())
    scene = await scene_of(stores, "vast", job_usd=round(price * 0.9 / 1e6, 6))  # 50 minutes with the margin are bound
    await turns(scene, 1, 5)
    scene.there.world.instances[0].deaf = 200
    await scene.end()
    (row,) = await rows(scene)
    accounts = await scene.store.read(lambda r: r.select(LedgerAccount, job_id=JOB))
    held, spent = (sum(one.uusd for one in accounts if one.kind == kind) for kind in (Account.RESERVED, Account.SPENT))
    assert row.cost_uusd > scene.limit_uusd
    assert held == 0
    assert 0.95 * scene.limit_uusd <= spent <= scene.limit_uusd


async def test_a_machine_whose_worker_is_heard_stays_and_one_whose_is_not_goes(stores):
    """join_s is 400 s and silent_s 300 s."""
    scene = await scene_of(stores, "vast")
    scene.rng.random = lambda: 0.5  # every worker joins
    await turns(scene, 1, 40)
    assert [row.state for row in await rows(scene)] == [RentalState.RUNNING]
    scene._workers = lambda: asyncio.sleep(0)
    await turns(scene, 1, 15)
    assert (await rows(scene))[0].ending.startswith("silent: ")


async def test_a_jobs_budget_bears_what_fits_beside_what_its_other_workers_hold(stores):
    """Each machine binds 40 minutes with the margin: 0.83 of its hourly price, and 10 minutes in advance where there is room."""
    scene = await scene_of(stores, "vast")
    first, second, *_ = sorted(machine.uusd_per_hour for machine in scene.there.world.free())
    scene = await scene_of(stores, "vast", job_usd=(first + second) / 1e6)
    await turns(scene, 2, 8)
    assert [row.state for row in await rows(scene)] == [RentalState.RUNNING] * 2
    other = await scene_of(stores, "vast", job_usd=(first + second) / 1e6)

    async def hold(tx):
        job = await tx.get(Job, JOB)
        books = await Books.open(tx, JOB, [ledger.name(Account.RESERVED, "quote-1")])
        fund(books, job)
        books.must(ledger.reserve(books.balances, JOB, "quote-1", uusd=second, reason="a worker of its own"))
        await books.save(tx, now=other.clock.now())

    await other.store.write(hold)
    await turns(other, 2, 8)
    assert [row.uusd_per_hour for row in await rows(other)] == [first]


async def test_without_a_budget_for_stopping_nothing_is_rented(stores):
    """The cheapest machine costs more in 40 minutes with the margin than is there."""
    scene = await scene_of(stores, "vast", budget_uusd=50_000)
    await turns(scene, 1, 3)
    assert await rows(scene) == []
    assert scene.there.asked.count("create") == 0


@pytest.mark.parametrize("what", ["nothing else", "our clock steps back", "the coordinator starts again, its clock behind"])
async def test_machines_end_when_the_list_cannot_be_seen_and_money_runs_out(stores, what):
    scene = await scene_of(stores, "vast", offset_s=-3000.0)
    await turns(scene, 1, 5)
    price = scene.there.world.instances[0].machine.uusd_per_hour
    scene.budget_uusd = price  # an hour's worth: 40 minutes with the margin are bound, so that some ten are left
    scene.start()
    await scene.turn(1)
    scene.there.faults.draw = lambda operation, now: "500 as text" if operation in ("list", "search") else None
    await turns(scene, 1, 3)
    if what == "our clock steps back":
        scene.clock.offset_s -= 7200.0
    elif what != "nothing else":
        scene.start()
    await turns(scene, 1, 57)
    assert scene.there.world.rented() == []
    assert scene.there.world.spent() <= price
    assert not scene.violations


async def test_a_job_without_a_wish_keeps_its_machines_over_a_restart(stores):
    """Nobody has said anything yet: the market will."""
    scene = await scene_of(stores, "vast")
    await turns(scene, 1, 5)
    scene.start()
    await scene.renter.turn()
    assert len(scene.there.world.rented()) == 1
    assert (await rows(scene))[0].is_wanted


async def test_a_paused_job_gives_its_machines_back_after_a_while(stores):
    """What pauses for minutes would pay for machines that wait."""
    scene = await scene_of(stores, "vast")
    await turns(scene, 1, 5)
    job = await scene.store.read(lambda r: r.get(Job, JOB))
    await scene.write(replace(job, state=JobState.PAUSED, state_since=scene.clock.now()))
    await turns(scene, 1, 8)
    assert len(scene.there.world.rented()) == 1
    await turns(scene, 1, 8)
    assert scene.there.world.rented() == []


async def test_a_dearer_machine_is_given_up(stores):
    scene = await scene_of(stores, "vast", budget_uusd=50_000_000)
    await turns(scene, 1, 5)
    one = scene.there.world.instances[0]
    one.prices.append((scene.there.world.now, one.machine.uusd_per_hour * 2))
    await turns(scene, 1, 8)
    assert one.ended is not None
    assert (await rows(scene))[0].ending.startswith("dearer: ")


async def test_a_worker_that_never_joins_costs_no_more_than_its_patience(stores):
    scene = await scene_of(stores, "vast")
    scene.rng.random = lambda: 0.0  # nobody joins
    scene.limits = replace(scene.limits, join_s=120.0)
    scene.start()
    await turns(scene, 1, 12)
    assert (await rows(scene))[0].ending.startswith("no_worker: ")
