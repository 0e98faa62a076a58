"""A real server on loopback over a real SQLite store, with tokens of every role."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.api.rest import RUNNER_OPTIONS, add_rest_routes
from coordinator.api.rest_table import RestLimits
from coordinator.domain.model import (
    Batch,
    BatchState,
    Event,
    Group,
    GroupState,
    Holding,
    Job,
    JobState,
    Metric,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
    Worker,
    WorkerSession,
    WorkerState,
)
from coordinator.service import tokens
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store
from coordinator.wire.job import JobConfig
from coordinator.wire.rest import NewToken

NOW = 1_790_000_000.0
FREE = 10**12


@dataclass
class SetClock:
    """Time stands still until a test moves it."""

    time: float = NOW

    def now(self) -> float:
        return self.time


@dataclass
class DiskOf:
    """A blob store of which only the free space matters here."""

    free: int = FREE

    async def free_bytes(self) -> int:
        return self.free


@dataclass
class Bench:
    """A running API, and what tests turn."""

    deps: Deps
    client: TestClient[Any, Any]
    clock: SetClock
    disk: DiskOf
    root: Path
    texts: dict[str, str] = field(default_factory=dict)  # role -> token

    def headers(self, role: str = "admin", **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.texts[role]}", **{k.replace("_", "-"): v for k, v in more.items()}}

    async def token(self, name: str, role: str, **more: Any) -> str:
        row, text = tokens.make(NewToken(name=name, role=role, **more), now=self.clock.now())
        await self.deps.store.write(lambda tx: tx.put(row))
        self.texts[name] = text
        return row.id

    async def put(self, *rows: object) -> None:
        for row in rows:
            await self.deps.store.write(lambda tx, row=row: tx.put(row))

    async def close(self) -> None:
        await self.client.close()
        await self.deps.store.close()

    async def ask(self, method: str, path: str, *, role: str | None = "admin", status: int | None = None, **more: Any) -> Any:
        """The decoded answer; checks the status, and that every error is a whole problem document."""
        headers = {**(self.headers(role) if role else {}), **more.pop("headers", {})}
        async with self.client.request(method, path, headers=headers, **more) as response:
            if response.status >= 400:
                assert response.content_type == "application/problem+json", await response.text()
                problem = await response.json()
                assert problem["status"] == response.status
                assert problem["code"]
                assert problem["detail"]
                assert problem["field"] or response.status in (500, 503)
                assert problem["fix"]
            assert status is None or response.status == status, await response.text()
            if response.content_type.endswith("json"):
                return await response.json()
            return await response.read()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rest") / "empty.db"
    upgrade(f"sqlite:///{path}")
    return path


async def _start(
    database: Path,
    directory: Path,
    *,
    limits: RestLimits | None = None,
    started_at: float = NOW - 100,
    reuse: bool = False,
    **more: Any,
) -> Bench:
    """A bench whose rows and files lie in `directory`; `reuse` opens what an earlier one left there."""
    root, rows = directory / "root", directory / "rows.db"
    if not reuse:
        shutil.copy(database, rows)
        _fill_root(root)
    store = await open_store(f"sqlite:///{rows}")
    clock, disk = SetClock(), DiskOf()
    settings = ServiceSettings(data_dir=directory / "data", roots=(root,), **more)
    key = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
    deps = Deps(store, disk, clock, settings, key, started_at)  # type: ignore[arg-type]
    app = web.Application()
    add_rest_routes(app, deps, limits=limits)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server(**RUNNER_OPTIONS)
    bench = Bench(deps, TestClient(server), clock, disk, root)
    if not reuse:
        await bench.token("admin", "admin")
        await bench.token("author", "author")
        await bench.token("coder", "author", rights=("code",))
        await bench.token("viewer", "viewer")
    return bench


def _fill_root(root: Path) -> None:
    (root / "tiny").mkdir(parents=True)
    (root / "tiny" / "config.json").write_text("{}")
    (root / "train.jsonl").write_text('{"prompt": "1+1", "answer": "2"}\n')
    (root / "rewards.py").write_text("def accuracy(completions, **_):\n    return [0.0 for _ in completions]\n")


@pytest.fixture(scope="session")
def bench_maker() -> Callable[..., Any]:
    return _start


@pytest.fixture
async def make_bench(tmp_path: Path, empty_database: Path) -> AsyncIterator[Callable[..., Any]]:
    made: list[Bench] = []

    async def make(**more: Any) -> Bench:
        made.append(await _start(empty_database, tmp_path, **more))
        return made[-1]

    yield make
    for bench in made:
        await bench.close()


@pytest.fixture
async def bench(make_bench: Callable[..., Any]) -> Bench:
    return await make_bench()


def _job_body(**sections: Any) -> dict[str, Any]:
    return {
        "name": "sort",
        "model": "tiny",
        "environment": {"type": "digit_sort"},
        "algorithm": {"group_size": 2, "groups_per_step": 2},
        "staleness": {"max": 2},
        "budget": {"steps": 10},
        **sections,
    }


@pytest.fixture
def job_body() -> Callable[..., dict[str, Any]]:
    return _job_body


@pytest.fixture(scope="session")
def row_maker() -> Callable[..., list[object]]:
    return _rows


@pytest.fixture
def seeded(tmp_path: Path) -> Callable[[str], list[object]]:
    """Rows of a running job `j-1` of an owner, with one trained step, a worker `w-1` and a publication."""
    return lambda owner: _rows(owner, tmp_path)


def _rows(owner: str, place: Path, *, ended: bool = False) -> list[object]:
    directory = place / "snapshots" / "v1"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"a": 1}')
    (directory / "model.safetensors").write_bytes(bytes(range(100)))
    (directory / "secret.txt").write_text("no")
    state = JobState.COMPLETED if ended else JobState.RUNNING
    job = Job("j-1", "sort", owner, JobConfig(**_job_body()), state, "steps", NOW - 50, NOW - 60, "/m", 1)
    groups = [
        Group(f"g-{n}", "j-1", n, n, (1, 2), 2, GroupState.TRAINED, NOW - 40, "", 0, 0, 1, NOW - 10, f"prompt {n}") for n in (0, 1)
    ]
    rollouts = [
        Rollout(
            g.id, slot, "j-1", g.number, RolloutState.SCORED, "l-1", "w-1", 0, None, 0, 5, 0, 0, {"0": "a" * 64}, "stop", 0.5,
            float(slot), f"text {g.number}.{slot}", "", NOW - 30 + slot, NOW - 29,
        )
        for g in groups
        for slot in (0, 1)
    ]  # fmt: skip
    batch = Batch("j-1", 0, BatchState.COMMITTED, (0, 1), "/b", "b" * 64, 4, False, {"0": 2}, NOW - 20, 1.0, NOW - 10, 3.0)
    worker = Worker(
        "w-1", "c" * 64, "box", "alice", "i-1", WorkerState.ACTIVE, "active", NOW - 50, NOW - 55, NOW - 1, 1,
        {"kind": "torch", "version": "2", "dtype": "float32", "device": "cpu"}, 350_000, 4, 80.0,
    )  # fmt: skip
    session = WorkerSession("w-1", 1, NOW - 50, NOW - 14, 350_000)
    holding = Holding("w-1", "j-1", 1, "d" * 64, (-0.5,), NOW - 9)
    publication = Publication("j-1", 1, "d" * 64, PublicationState.PUBLISHED, "{}", "e" * 128, str(directory), (-0.5,), NOW - 9)
    metrics = [Metric("j-1", "reward/all/mean", s, NOW - 20 + s, 0.1 * s) for s in range(5)]
    metrics.append(Metric("j-1", "eval/all/mean", 1, NOW - 5, 0.75))
    events = [Event("j-1", seq, NOW - 60 + seq, "step_committed", {"step": seq}) for seq in range(1, 6)]
    events.append(Event("j-1", 0, NOW - 60, "learner_starting", {}))
    return [job, *groups, *rollouts, batch, worker, session, holding, publication, *metrics, *events]
