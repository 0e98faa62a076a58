"""From the market's verdict to rented machines: one is tried, its worker measured, then as many more as are missing; idle ones go back."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from coordinator.domain.capacity_inputs import Estimate
from coordinator.domain.market import LEAST_MADE, LEAST_SEEN_S, Bidder, Figures, JobMarket, Verdict
from coordinator.domain.model import Job
from coordinator.service.market_board import Shown
from coordinator.service.renting_ports import RentingSettings
from coordinator.service.renting_wishes import IDLE_S, say
from pricing.feeds.contract import RentalOffer
from pricing.throughput import Throughput
from tests.integration.renting.scene import JOB, Scene, feed_of
from tests.standin.here import sender, standin


@pytest.fixture
async def scene(stores):
    rng = Random(5)
    there = standin("vast", rng)
    made = Scene(await stores(), there, feed_of("vast"), sender(there), rng, budget_uusd=10**8, job_usd=50.0)
    made.rng.random = lambda: 0.5  # every worker joins
    await made.open()
    await made.renter.search()
    made.deps.rentals.offers.update(made.desk.offers)
    made.renter._desk = made.deps.rentals
    return made


async def verdict(scene, *, offered, bidders=(), active=(), required=10.0):
    job = await scene.store.read(lambda r: r.get(Job, JOB))
    decided = Verdict(dict.fromkeys(active, "why"), frozenset(), {}, required, offered, 0.0, "")
    scene.deps.market.shown[JOB] = Shown(scene.clock.now(), JobMarket(job, Figures(train_s=1.0), tuple(bidders)), decided, {})


def measured(scene, worker_id, rate):
    done = max(LEAST_MADE, rate * LEAST_SEEN_S) + 1
    seen = Throughput(rate, scene.clock.now()).observed(done, done / rate, scene.clock.now())
    return Bidder(worker_id, worker_id, "rented-vast", 0, 8, seen, Estimate(1.0, 0.0), 0.9)


async def turns(scene, count):
    for _ in range(count):
        await say(scene.deps, {"vast": RentingSettings(10**8, "u", "i", limits=scene.limits)})
        await scene.renter.turn()
        await scene._workers()
        scene.there.world.advance(30.0)


async def test_a_job_that_is_short_is_given_one_machine_and_then_what_is_missing(scene):
    await verdict(scene, offered=0.0)
    await turns(scene, 8)
    assert len(scene.there.world.rented()) == 1
    (worker,) = scene.joined.values()
    # 10 completions/s are required, 11.5 with the headroom; the machine brings 4: two more bring what is missing.
    await verdict(scene, offered=4.0, bidders=[measured(scene, worker, 4.0)], active=[worker])
    await turns(scene, 1)
    await turns(scene, 6)
    assert len(scene.there.world.rented()) == 3


async def test_machines_whose_workers_had_no_work_for_long_go_back(scene):
    await verdict(scene, offered=0.0)
    await turns(scene, 8)
    (worker,) = scene.joined.values()
    await verdict(scene, offered=20.0, bidders=[measured(scene, worker, 4.0)])
    await turns(scene, 3)
    assert len(scene.there.world.rented()) == 1
    for _ in range(int(IDLE_S / 100)):  # the market keeps its verdict, the worker its beats
        scene.there.world.advance(100.0)
        await scene._workers()
    await turns(scene, 8)
    assert scene.there.world.rented() == []


@pytest.mark.parametrize("changes", [{"required": None}, {"offered": 20.0}])
async def test_nothing_is_rented_without_need(scene, changes):
    await verdict(scene, **{"offered": 0.0, **changes})
    await turns(scene, 3)
    assert scene.there.world.instances == []


async def test_nothing_is_rented_for_a_job_without_a_budget_of_money(scene):
    job = await scene.store.read(lambda r: r.get(Job, JOB))
    budget = job.config.budget.model_copy(update={"usd": None})
    await scene.write(replace(job, config=job.config.model_copy(update={"budget": budget})))
    await verdict(scene, offered=0.0)
    await turns(scene, 3)
    assert scene.there.world.instances == []


async def test_a_provider_whose_budget_is_used_up_does_not_keep_others_from_being_asked(scene):
    """Its offers are the cheapest, and stay so."""
    desk = scene.deps.rentals
    scene.budget_uusd = 1_000
    scene.start()
    scene.renter._desk = desk
    await scene.renter.search()
    desk.offers["runpod"] = (RentalOffer("runpod", "COMMUNITY/X", "X", 9_000_000, fetched_at=scene.clock.now()),)
    await verdict(scene, offered=0.0)
    for _ in range(2):
        await say(scene.deps, {name: RentingSettings(10**8, "u", "i", limits=scene.limits) for name in ("vast", "runpod")})
        await scene.renter.turn()
    assert (desk.wishes("vast")[JOB].count, desk.wishes("runpod")[JOB].count) == (0, 1)


async def test_the_budget_an_hour_bounds_machines(scene):
    """Three of the wanted machines would pass it: as many run as it pays, and workers' prices leave less."""
    job = await scene.store.read(lambda r: r.get(Job, JOB))
    price = min(offer.uusd_per_hour for offer in scene.deps.rentals.offers["vast"])

    async def allow(usd_per_hour):
        budget = job.config.budget.model_copy(update={"usd_per_hour": usd_per_hour})
        await scene.write(replace(job, config=job.config.model_copy(update={"budget": budget})))

    await allow(0.99 * price / 1e6)
    await verdict(scene, offered=0.0)
    await turns(scene, 8)
    assert scene.there.world.rented() == []
    await allow(price / 1e6)
    await verdict(scene, offered=0.0)
    await turns(scene, 8)
    assert len(scene.there.world.rented()) == 1
    (worker,) = scene.joined.values()
    await verdict(scene, offered=4.0, bidders=[measured(scene, worker, 4.0)], active=[worker])
    await turns(scene, 8)
    assert len(scene.there.world.rented()) == 1
