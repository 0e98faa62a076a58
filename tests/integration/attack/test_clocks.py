"""Clocks that jump while a job runs, and clocks that are simply wrong."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.clock import SystemClock
from coordinator.domain.model import Job, JobState, Worker
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.service.driving import JobDriver, Tools
from coordinator.service.market import Market, turn
from coordinator.store.blobs import FileBlobs
from coordinator.store.sql import open_store
from coordinator.wire.job import JobConfig
from coordinator.wire.messages import Heartbeat, HeartbeatReply
from tests.conftest import load_module

HOUR_S = 3600.0


class Hands:
    """A wall clock that a test sets, over a monotonic one that it cannot."""

    def __init__(self) -> None:
        self.set_by = 0.0
        self.passed = 0.0

    def wall(self) -> float:
        return 1_000_000.0 + self.passed + self.set_by

    def monotonic(self) -> float:
        return 5.0 + self.passed


def test_time_follows_the_wall_forward_and_never_stands_still() -> None:
    hands = Hands()
    clock = SystemClock(wall=hands.wall, monotonic=hands.monotonic)
    begun = clock.now()
    hands.passed += 10
    assert clock.now() == begun + 10
    hands.set_by += HOUR_S
    assert clock.now() == begun + 10 + HOUR_S
    hands.set_by -= HOUR_S  # set right again: deadlines that passed stay passed, and others still come
    assert clock.now() == begun + 10 + HOUR_S
    hands.passed += 7
    assert clock.now() == begun + 17 + HOUR_S
    hands.set_by += HOUR_S
    assert clock.now() == begun + 17 + HOUR_S, "the wall is where time already is"


def test_a_clock_that_was_never_set_is_the_wall_clock() -> None:
    clock = SystemClock()
    for _ in range(100):
        before = time.time()
        assert before <= clock.now() <= time.time() + 0.05


@pytest.fixture
def scene() -> ModuleType:
    return load_module("echo2_attack_pretend", Path(__file__).parents[1] / "driving" / "pretend.py")


@pytest.fixture
async def jumping(sqlite_url: str, tmp_path: Path) -> AsyncIterator[tuple[Deps, Hands]]:
    hands = Hands()
    begun = time.monotonic()
    clock = SystemClock(
        wall=lambda: 1_790_000_000.0 + time.monotonic() - begun + hands.set_by, monotonic=lambda: time.monotonic() - begun
    )
    store = await open_store(sqlite_url)
    deps = Deps(store, FileBlobs(tmp_path / "blobs"), clock, ServiceSettings(tmp_path), Ed25519PrivateKey.generate(), clock.now())
    yield deps, hands
    await store.close()


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
async def test_a_jump_in_the_middle_of_a_job_changes_no_step(jumping: tuple[Deps, Hands], scene: ModuleType, jump_s: float) -> None:
    deps, hands = jumping
    config = JobConfig.model_validate(
        {
            "name": "driven",
            "model": "m",
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": 2, "groups_per_step": 2, "truncated": "keep"},
            "sampling": {"max_new_tokens": 4},
            "checkpoints": {"eval_prompts": 0},
            "budget": {"steps": 12},
        }
    )
    now = deps.clock.now()
    await deps.store.write(lambda tx: tx.put(Job("j1", "driven", "t", config, JobState.QUEUED, "", now, now, "m")))
    learners = scene.PretendLearners()
    workers = asyncio.create_task(scene.pretend_workers(deps, "j1"))
    driver = asyncio.create_task(JobDriver(deps, Tools(learners, scene.PretendPublisher(), scene.PretendPlane()), "j1").run())
    async with asyncio.timeout(30):
        while (await _job(deps)).committed_steps < 3:
            await asyncio.sleep(0.01)
        hands.set_by += jump_s
        await driver
    workers.cancel()
    job = await _job(deps)
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, 12)
    assert learners.trained == [list(range(12))]


async def _job(deps: Deps) -> Job:
    job = await deps.store.read(lambda reader: reader.get(Job, "j1"))
    assert job is not None
    return job


async def test_after_a_jump_forward_workers_join_again_and_go_on(coordinator: Any, stranger: Any) -> None:
    """An hour at once: leases and workers end by time, as they must; the slots are open, and the same worker does them."""
    worker = await stranger().ready()
    lease = await worker.lease()
    coordinator.clock.added += HOUR_S
    await coordinator.sweep()
    await turn(coordinator.deps, Market())  # ends its quote at its last sign of life: it was no hour's trial
    assert (await coordinator.get(Worker, worker.id)).state.value == "gone"
    refused = await worker.send("heartbeat", Heartbeat(session_epoch=worker.epoch))
    assert (refused.status, refused.problem.code) == (409, "worker_gone")
    await worker.join(invite_code=None)
    assert (await worker.confirm(0)).accepted
    again = await worker.lease()
    assert (again.group_id, again.seeds) == (lease.group_id, lease.seeds)
    assert (await worker.submit(again)).accepted == lease.slots


async def test_after_a_jump_back_workers_are_heard_lost_and_limited_as_before(coordinator: Any, stranger: Any) -> None:
    """The clock that the service sees goes on, whatever the wall does."""
    hands = Hands()
    coordinator.clock.now = SystemClock(
        wall=lambda: time.time() + hands.set_by + hands.passed, monotonic=lambda: time.monotonic() + hands.passed
    ).now
    worker = await stranger().ready()
    lease = await worker.lease()
    hands.set_by -= HOUR_S
    (await worker.send("heartbeat", Heartbeat(session_epoch=worker.epoch))).read(HeartbeatReply)
    assert (await worker.submit(lease, (0,))).accepted == (0,)
    hands.passed += 40.0  # silent for longer than silence is borne: lost, although the wall clock is an hour behind
    await coordinator.sweep()
    assert (await coordinator.get(Worker, worker.id)).state.value == "gone"


async def test_a_worker_whose_clock_is_ten_minutes_off_works_by_the_offset(coordinator: Any, stranger: Any) -> None:
    """Refused once with the server's time; with the offset from it everything is as with a right clock."""
    for off_s in (-600.0, 600.0):
        worker = stranger(f"off{off_s:.0f}".replace("-", "m"))
        body = worker.join_request().model_dump_json().encode()
        wrong = coordinator.clock.now() + off_s
        refused = await worker.call("join", body, epoch=0, time=f"{wrong:.3f}")
        assert (refused.status, refused.problem.code) == (401, "clock_skew")
        assert refused.problem.server_time is not None
        offset_s = refused.problem.server_time - wrong
        assert abs(offset_s + off_s) < 5
        joined = await worker.call("join", body, epoch=0, time=f"{coordinator.clock.now() + off_s + offset_s:.3f}")
        assert joined.status == 200
