"""SQLite out of space or locked by another program: a reason in words, nothing half written, and the store goes on afterwards."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from coordinator.domain.model import Event
from coordinator.store.errors import StoreBusy, StoreFull
from coordinator.store.sql import open_store


@pytest.fixture
async def sqlite_store(sqlite_url):
    store = await open_store(sqlite_url)
    yield store
    await store.close()


def _event(seq: int, characters: int = 10) -> Event:
    return Event("job", seq, 1.0, "x" * characters, {})


async def _limit_pages(store, pages: int) -> None:
    """SQLite reports a full disk beyond this many pages of 4 KiB."""
    await store._writer._link.fetch(f"PRAGMA max_page_count={pages}", ())


async def test_a_full_disk_fails_in_words_and_acknowledges_nothing_that_is_lost(sqlite_store):
    await sqlite_store.write(lambda tx: tx.put(_event(1)))
    pages = (await sqlite_store._writer._link.fetch("PRAGMA page_count", ()))[0][0]
    await _limit_pages(sqlite_store, pages + 4)
    sizes = [10, 10, 200_000, 10, 200_000, 10]
    writes = [sqlite_store.write(lambda tx, n=n, size=size: tx.put(_event(n + 2, size))) for n, size in enumerate(sizes)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    kept = {event.seq for event in await sqlite_store.read(lambda r: r.select(Event))}
    for number, outcome in enumerate(outcomes):
        assert (outcome is None) == (number + 2 in kept), outcome
    assert any(isinstance(outcome, StoreFull) and "free space" in str(outcome) for outcome in outcomes)
    assert all(isinstance(outcomes[n], Exception) for n in (2, 4))
    await _limit_pages(sqlite_store, pages + 4000)
    await sqlite_store.write(lambda tx: tx.put(_event(99, 200_000)))
    assert await sqlite_store.read(lambda r: r.highest(Event, "seq")) == 99


async def test_a_full_disk_is_an_os_error_to_those_who_do_not_know_the_store(sqlite_store):
    await _limit_pages(sqlite_store, 1)
    with pytest.raises(OSError, match="full") as full:
        await sqlite_store.write(lambda tx: tx.put(_event(1, 200_000)))
    assert full.value.errno == 28


async def test_another_program_that_holds_the_database_makes_writes_busy_not_lost(sqlite_store, sqlite_url):
    await sqlite_store._writer._link.fetch("PRAGMA busy_timeout=20", ())
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    try:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreBusy, match="another program holds"):
            await sqlite_store.write(lambda tx: tx.put(_event(1)))
        other.execute("ROLLBACK")
    finally:
        other.close()
    await sqlite_store.write(lambda tx: tx.put(_event(1)))
    assert await sqlite_store.read(lambda r: r.count(Event)) == 1
