"""What is left after a crash, on real databases.

Proved here: a process killed with SIGKILL at any moment loses no acknowledged write and leaves no half of a transaction (both
databases). For a power loss SQLite's write-ahead log is cut, zeroed or overwritten from any point on, which is what a disk may show of
a tail that was not synced: the database opens to a prefix of the transactions, in order and each whole, and one whose frames lie
before the damage is there. That the log was synced before the acknowledgement is SQLite's word (synchronous=FULL): the
last test checks that the writing connection runs with it. Not proved: a disk that damages what it had synced.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from coordinator.domain.model import Event, Metric
from coordinator.store.errors import StoreLocked
from coordinator.store.sql import open_store

WRITER = """
import asyncio, sys
from coordinator.domain.model import Event, Metric
from coordinator.store.sql import open_store

async def write(store, caller):
    number = 0
    while True:
        number += 1
        async def action(tx):
            seq = (await tx.highest(Event, "seq") or 0) + 1
            await tx.put(Event("job", seq, 1.0, f"caller {caller}", {"number": number}), Metric("job", "seq", seq, 1.0, float(seq)))
            return seq
        seq = await store.write(action)
        print(seq, flush=True)

async def main():
    store = await open_store(sys.argv[1])
    await asyncio.gather(*(write(store, caller) for caller in range(8)))

asyncio.run(main())
"""


def _acknowledged_before_the_kill(url: str, acknowledgements: int) -> list[int]:
    """Start a writer, kill it once it has acknowledged that many writes; every number it printed."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", WRITER, url], stdout=subprocess.PIPE, text=True, env=environment) as writer:
        assert writer.stdout is not None
        first = [writer.stdout.readline() for _ in range(acknowledgements)]
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().splitlines(keepends=True)
    return [int(line) for line in [*first, *rest] if line.endswith("\n")]


async def _reopen(url: str):
    """PostgreSQL needs a moment to notice that its client is gone."""
    for _ in range(100):
        try:
            return await open_store(url)
        except StoreLocked:
            await asyncio.sleep(0.05)
    raise AssertionError("the dead writer's lock was not released within 5 s")


async def _rows(url: str) -> tuple[list[int], list[int]]:
    store = await _reopen(url)
    try:
        events = await store.read(lambda r: r.select(Event, order_by="seq"))
        metrics = await store.read(lambda r: r.select(Metric, order_by="step"))
    finally:
        await store.close()
    return [event.seq for event in events], [metric.step for metric in metrics]


@pytest.mark.parametrize("acknowledgements", [1, 40, pytest.param(700, marks=pytest.mark.long)])
async def test_acknowledged_writes_survive_sigkill(store_url, acknowledgements):
    acknowledged = await asyncio.to_thread(_acknowledged_before_the_kill, store_url, acknowledgements)
    assert len(acknowledged) >= acknowledgements
    events, metrics = await _rows(store_url)
    assert events == metrics == list(range(1, len(events) + 1))
    assert set(acknowledged) <= set(events)


async def test_the_store_works_on_after_each_of_several_kills(store_url):
    for acknowledgements in (3, 5):
        acknowledged = await asyncio.to_thread(_acknowledged_before_the_kill, store_url, acknowledgements)
        events, metrics = await _rows(store_url)
        assert events == metrics == list(range(1, len(events) + 1))
        assert max(acknowledged) <= events[-1]


@pytest.fixture
async def crashed(sqlite_url, tmp_path):
    """A copy of database and log under a living writer, and the log's length at each acknowledgement."""
    path = Path(sqlite_url.removeprefix("sqlite:///"))
    wal = path.with_name(path.name + "-wal")
    store = await open_store(sqlite_url)
    lengths = []
    for seq in range(1, 31):

        async def action(tx, seq=seq):
            await tx.put(*(Event("job", seq * 10 + part, 1.0, "x" * 100 * part, {}) for part in range(4)))
            await tx.put(Metric("job", "seq", seq, 1.0, float(seq)))

        await store.write(action)
        lengths.append(wal.stat().st_size)
    shutil.copyfile(path, tmp_path / "copy.db")
    log = wal.read_bytes()
    await store.close()
    return tmp_path / "copy.db", log, lengths


async def _transactions(path: Path) -> int:
    """How many transactions the database opens to; they must be the first ones, each whole."""
    events, metrics = await _rows(f"sqlite:///{path}")
    assert metrics == list(range(1, len(metrics) + 1))
    assert events == [seq * 10 + part for seq in metrics for part in range(4)]
    return len(metrics)


@pytest.mark.parametrize("damage", ["cut", "zeroed", "overwritten", "one block of 512 bytes zeroed"])
async def test_a_damaged_tail_of_the_log_leaves_a_prefix_of_the_transactions(crashed, tmp_path, damage):
    database, log, lengths = crashed
    draw = Random(damage)
    places = [0, 31, 32, lengths[0] - 1, lengths[0], lengths[14] + 1, len(log), *(draw.randrange(len(log)) for _ in range(25))]
    for number, place in enumerate(places):
        tail = len(log) - place
        damaged = {
            "cut": log[:place],
            "zeroed": log[:place] + bytes(tail),
            "overwritten": log[:place] + draw.randbytes(tail),
            "one block of 512 bytes zeroed": log[:place] + bytes(min(512, tail)) + log[place + 512 :],
        }[damage]
        copy = tmp_path / f"{number}.db"
        shutil.copyfile(database, copy)
        copy.with_name(copy.name + "-wal").write_bytes(damaged)
        kept = await _transactions(copy)
        assert kept >= sum(length <= place for length in lengths)


async def test_the_undamaged_log_has_every_transaction(crashed):
    database, log, lengths = crashed
    database.with_name(database.name + "-wal").write_bytes(log)
    assert await _transactions(database) == len(lengths)


async def test_the_writing_connection_syncs_every_commit(store):
    link = store._writer._link
    if not link.savepoint_first:
        assert [tuple(row) for row in await link.fetch("PRAGMA journal_mode", ())] == [("wal",)]
        assert [tuple(row) for row in await link.fetch("PRAGMA synchronous", ())] == [(2,)]  # FULL
    else:
        assert (await link.fetch("SHOW synchronous_commit", ()))[0][0] == "on"
        assert (await link.fetch("SHOW fsync", ()))[0][0] == "on"
