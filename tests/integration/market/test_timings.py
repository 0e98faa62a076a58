"""Kappa, the market and the panel read the same figures from rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from coordinator.domain.capacity import chosen_kappa
from coordinator.domain.market import inputs_of, kappa_of, pauses_of
from coordinator.domain.model import Batch, BatchState, Holding, Job, Metric, Publication, PublicationState, Rollout, RolloutState
from coordinator.service.market_rows import read_markets
from coordinator.service.timings import measured_kappa, read_timings, refresh_bytes

JOB = "j1"


async def publish(scene: Any, version: int, at: float) -> None:
    await scene.put(Publication(JOB, version, f"d{version}", PublicationState.PUBLISHED, "", "", "", (), at))


async def confirm(
    scene: Any, worker: str, version: int, at: float, *, apply_s: float = 0.0, nbytes: int = 0, fetch_s: float = 0.0
) -> None:
    await scene.put(Holding(worker, JOB, version, f"d{version}", (), at, nbytes, 0, fetch_s, apply_s))


async def test_what_a_worker_begins_with_is_no_broadcast(scene: Any) -> None:
    """It came an hour late and loaded for a minute; afterwards it follows in 2 s and stands still for 0.1 s."""
    await scene.job()
    start = scene.clock.time
    for version in range(3):
        await publish(scene, version, start + 10 * version)
    await confirm(scene, "a", 0, start + 3600, apply_s=60.0)
    timings = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert (timings.bcast_p95_s, dict(timings.apply_s)) == (0.0, {})
    await confirm(scene, "a", 1, start + 3700, apply_s=0.1, nbytes=1_250_000, fetch_s=0.5)
    await scene.put(replace(await scene.get(Publication, JOB, 1, "d1"), published_at=start + 3698))
    timings = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert timings.bcast_p95_s == pytest.approx(2.0)
    assert timings.apply_s == {"a": pytest.approx(0.1)}
    assert timings.down == {"a": pytest.approx(2_500_000)}


async def test_a_clock_that_was_set_back_makes_no_broadcast_shorter_than_nothing(scene: Any) -> None:
    """Version 2 was confirmed 7 s before it was published, by the clock; what is left to believe is version 1's 3 s."""
    await scene.job()
    start = scene.clock.time
    for version, published, confirmed in ((0, 0, 1), (1, 10, 13), (2, 20, 13)):
        await publish(scene, version, start + published)
        await confirm(scene, "a", version, start + confirmed)
    timings = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert (timings.bcast_p95_s, dict(timings.bcast_s)) == (pytest.approx(3.0), {"a": pytest.approx(3.0)})


async def test_before_the_first_delta_its_broadcast_is_a_forecast(scene: Any) -> None:
    """1 GB of tensors: 1 s to write, code and rebuild, 0.2 s to apply. A delta of 10 MB at the 5 and 20 MB/s of the first fetch: 2 and 0.5 s."""
    await scene.job()
    start = scene.clock.time
    await publish(scene, 0, start)
    for name, value in (("publish/bytes", 667e6), ("publish/bytes_full", 1e9), ("publish/bytes_forecast", 1e7)):
        await scene.put(Metric(JOB, name, 0, start, value))
    none_yet = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert (none_yet.bcast_p95_s, none_yet.is_forecast) == (0.0, False), "no link was seen"
    await confirm(scene, "a", 0, start + 200, nbytes=667_000_000, fetch_s=133.4)
    await confirm(scene, "b", 0, start + 50, nbytes=667_000_000, fetch_s=33.35)
    timings = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert dict(timings.bcast_s) == {"a": pytest.approx(3.2), "b": pytest.approx(1.7)}
    assert (timings.bcast_p95_s, timings.is_forecast) == (pytest.approx(3.2), True)
    job = await scene.get(Job, JOB)
    assert await scene.deps.store.read(lambda r: refresh_bytes(r, job)) == 1e7, "not what the keyframe took"
    await scene.steps(6)
    assert await scene.deps.store.read(lambda r: measured_kappa(r, job)) == 2, "a broadcast of 3.2 s, steps of 2 s"
    (loaded,) = await scene.deps.store.read(lambda r: read_markets(r, scene.deps, scene.clock.now()))
    assert loaded.market.figures.is_bcast_forecast
    await publish(scene, 1, start + 300)
    await scene.put(Metric(JOB, "publish/bytes", 1, start + 300, 2e7))
    await confirm(scene, "a", 1, start + 309)
    measured = await scene.deps.store.read(lambda r: _timings(r, scene))
    assert (measured.bcast_p95_s, measured.is_forecast) == (pytest.approx(9.0), False)
    assert await scene.deps.store.read(lambda r: refresh_bytes(r, job)) == 2e7


async def test_without_a_forecast_nothing_is_expected(scene: Any) -> None:
    await scene.job()
    await publish(scene, 0, scene.clock.time)
    await confirm(scene, "a", 0, scene.clock.time + 10, nbytes=1_000_000, fetch_s=1.0)
    timings = await scene.deps.store.read(lambda r: _timings(r, scene))
    job = await scene.get(Job, JOB)
    assert (timings.bcast_p95_s, timings.is_forecast) == (0.0, False)
    assert await scene.deps.store.read(lambda r: refresh_bytes(r, job)) == 0.0


async def _timings(reader: Any, scene: Any) -> Any:
    return await read_timings(reader, await reader.get(Job, JOB))


async def test_the_first_step_is_not_like_the_others(scene: Any) -> None:
    """It compiles, and waits for workers to join."""
    await scene.job()
    now = scene.clock.time
    for step, (train_s, waited_s) in enumerate(((30.0, 100.0), (2.0, 0.5), (4.0, 1.5))):
        await scene.put(Batch(JOB, step, BatchState.COMMITTED, (0,), "", "", 4, False, {}, now, waited_s, now, train_s))
        timings = await scene.deps.store.read(lambda r: _timings(r, scene))
        if step == 0:
            assert (timings.train_s(), timings.idle()) == (30.0, None)
    assert timings.train_s() == 3.0
    assert timings.train_s(least=4) is None
    assert timings.idle() == pytest.approx(2.0 / 8.0)


@pytest.mark.parametrize("on_update", ["keep", "abort"])
async def test_there_is_one_kappa(scene: Any, on_update: str) -> None:
    """The publisher's from rows, the market's, and the capacity model's: for equal workers the same figure. A broadcast of 5 s, steps of 2 s."""
    await scene.job(staleness={"max": 8, "on_update": on_update})
    await scene.steps(6)
    start = scene.clock.time
    for version in range(2):
        await publish(scene, version, start)
    for name in ("a", "b"):
        await scene.worker(name, 0.1)
        await scene.work(name, 4.0)
        await confirm(scene, name, 0, start + 1)
        await confirm(scene, name, 1, start + 5, apply_s=0.05)
    rollouts = await scene.rows(Rollout, job_id=JOB, state=RolloutState.SCORED)
    await scene.put(*(replace(one, generate_s=1.0) for one in rollouts))
    job = await scene.get(Job, JOB)
    published = await scene.deps.store.read(lambda r: measured_kappa(r, job))
    (loaded,) = await scene.deps.store.read(lambda r: read_markets(r, scene.deps, scene.clock.now()))
    inputs = inputs_of(loaded.market, loaded.market.bidders, scene.clock.now())
    assert inputs is not None
    pauses = pauses_of(loaded.market, scene.clock.now())
    expected = 3 if on_update == "keep" else 6  # half a second given up, and 0.05 s to apply, are 5 % of 11 s
    assert published == kappa_of(loaded.market, inputs.bcast_p95_s, pauses) == chosen_kappa(inputs) == expected
