"""A real store with one running job, and workers whose work lies in the rows: the market is asked to look at them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.domain.model import (
    Batch,
    BatchState,
    Event,
    Group,
    GroupState,
    Invite,
    Job,
    JobState,
    Lease,
    LeaseState,
    Metric,
    QuoteRow,
    Rollout,
    RolloutState,
    Worker,
    WorkerSession,
    WorkerState,
)
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.service.market import Market, turn
from coordinator.service.ports import Tx
from coordinator.store.blobs import FileBlobs
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store
from coordinator.wire.job import JobConfig

START = 1_790_000_000.0
JOB, G, B, TOKENS, SLOTS = "j1", 4, 4, 20, 4
TRAIN_S = 2.0  # with G * B = 16 rollouts a step: 8 a second keep the learner busy


@dataclass
class SetClock:
    time: float = START

    def now(self) -> float:
        return self.time


@dataclass
class Scene:
    """Rows, and the market that looks at them."""

    deps: Deps
    clock: SetClock
    market: Market = field(default_factory=Market)
    numbers: Iterator[int] = field(default_factory=count)

    async def put(self, *rows: object) -> None:
        async def save(tx: Tx) -> None:
            for row in rows:
                await tx.put(row)

        await self.deps.store.write(save)

    async def rows(self, kind: type[Any], /, **filters: Any) -> list[Any]:
        return await self.deps.store.read(lambda reader: reader.select(kind, **filters))

    async def get(self, kind: type[Any], *key: object) -> Any:
        return await self.deps.store.read(lambda reader: reader.get(kind, *key))

    async def job(self, **sections: Any) -> None:
        """A running job."""
        config = {
            "name": "priced",
            "model": "m",
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": G, "groups_per_step": B},
            "staleness": {"max": 3},
            "workers": {"headroom": 1.0},
            "budget": {"steps": 10_000},
        } | sections
        row = Job(JOB, "priced", "t", JobConfig.model_validate(config), JobState.RUNNING, "", START, START - 600, "m")
        await self.put(row, Event(JOB, 1, START - 600, "learner_starting", {}), Invite("i", "h", "o", 99, START, START + 1e6))

    async def worker(self, name: str, usd: float, **changes: Any) -> None:
        """One that confirmed a version and waits for work."""
        now = self.clock.time
        row = Worker(
            name,
            f"key {name}",
            name,
            "o",
            "i",
            WorkerState.ACTIVE,
            "",
            now,
            now,
            now,
            1,
            {"kind": "torch"},
            round(usd * 1e6),
            SLOTS,
        )
        await self.put(replace(row, **changes), WorkerSession(name, 1, now, now, row.price_uusd_per_hour))

    async def steps(self, count: int) -> None:
        """Steps that the learner took."""
        now = self.clock.time
        for step in range(count):
            row = Batch(JOB, step, BatchState.COMMITTED, (0, 1, 2, 3), "", "", G * B, False, {"0": B}, now, 0.1, now, TRAIN_S)
            await self.put(row)
        job = await self.get(Job, JOB)
        await self.put(replace(job, committed_steps=count))

    async def work(self, name: str, rate: float, *, seconds: float = 60.0, length: int = TOKENS, at_once: int = SLOTS) -> None:
        """The worker made `rate` completions a second, `at_once` slots busy, until now: so many at a time, group by group."""
        now = self.clock.time
        took = at_once / rate
        groups, leases, rollouts = [], [], []
        for turn_ in range(int(seconds / took)):
            end = now - turn_ * took
            group, lease = f"{name}/{now:.0f}/{turn_}", f"{name}/{now:.0f}/{turn_}/f1"
            number = next(self.numbers)
            groups.append(Group(group, JOB, number, 0, (1,), at_once, GroupState.TRAINED, end - took))
            slots = tuple(range(at_once))
            leases.append(Lease(lease, JOB, group, name, 1, slots, 0, "d", 3, end + 60, 1, LeaseState.DONE, end - took, "", end))
            times: dict[str, Any] = {"length": length, "accepted_at": end, "graded_at": end + 0.1}
            rollouts += [Rollout(group, slot, JOB, number, RolloutState.SCORED, lease, name, **times) for slot in slots]
        for rows in (groups, leases, rollouts):
            await self.deps.store.write(lambda tx, rows=rows: tx.put(*rows))

    async def look(self, after_s: float = 10.0) -> dict[str, QuoteRow]:
        """Let time pass and the market look; open quotes by worker."""
        self.clock.time += after_s
        await turn(self.deps, self.market)
        return {quote.worker_id: quote for quote in await self.rows(QuoteRow, ended_at=None)}

    async def metric(self, name: str) -> float:
        """The newest value."""
        points = await self.rows(Metric, job_id=JOB, name=name, order_by="-step", limit=1)
        return float(points[0].value)

    def why_not(self, name: str) -> str:
        return self.deps.market.why_not(JOB, name)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    url = f"sqlite:///{tmp_path / 'rows.sqlite3'}"
    await asyncio.to_thread(upgrade, url)
    store = await open_store(url)
    clock = SetClock()
    yield Scene(
        Deps(store, FileBlobs(tmp_path / "b"), clock, ServiceSettings(tmp_path), Ed25519PrivateKey.generate(), START), clock
    )
    await store.close()
