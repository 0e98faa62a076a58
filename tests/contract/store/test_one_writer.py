"""Law 11: a second writer is refused, by name; one that lost its lock writes no more."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from coordinator.domain.model import Event
from coordinator.store.errors import SchemaMismatch, StoreEnded, StoreError, StoreLocked
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store


async def test_a_second_store_is_refused_and_names_the_holder(store, store_url):
    with pytest.raises(StoreLocked, match=rf"pid {os.getpid()} on .*another coordinator uses"):
        await open_store(store_url)
    assert await store.read(lambda r: r.count(Event)) == 0  # the first one is unharmed


async def test_migrating_under_a_running_store_is_refused(store, store_url):
    with pytest.raises(StoreLocked, match="stop it first"):
        upgrade(store_url)


async def test_the_lock_is_free_again_after_close(store_url):
    for _ in range(3):
        await (await open_store(store_url)).close()


async def test_a_store_that_could_not_open_holds_no_lock(tmp_path):
    path = tmp_path / "empty.db"
    path.touch()
    for _ in range(2):
        with pytest.raises(SchemaMismatch, match="revision None"):
            await open_store(f"sqlite:///{path}")
    upgrade(f"sqlite:///{path}")
    await (await open_store(f"sqlite:///{path}")).close()


async def test_a_removed_lock_file_ends_the_writer(sqlite_url, make, putting):
    store = await open_store(sqlite_url)
    try:
        await store.write(putting(make.event(1)))
        Path(sqlite_url.removeprefix("sqlite:///") + ".lock").unlink()
        for _ in range(2):
            with pytest.raises(StoreEnded, match="was removed or replaced"):
                await store.write(putting(make.event(2)))
        assert await store.read(lambda r: r.count(Event)) == 1
    finally:
        await store.close()


async def test_a_lost_postgres_connection_ends_the_writer_but_not_the_readers(postgres_url, postgres_server, make, putting):
    store = await open_store(postgres_url)
    try:
        await store.write(putting(make.event(1)))
        postgres_server.psql("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory';")
        for _ in range(2):
            with pytest.raises(StoreEnded):
                await store.write(putting(make.event(2)))
        assert await store.read(lambda r: r.count(Event)) == 1
        other = await open_store(postgres_url)  # the lock went with the connection
        await other.close()
    finally:
        await store.close()


async def test_a_postgres_connection_lost_in_an_action_fails_all_writes_of_its_group(postgres_url, postgres_server, make, putting):
    store = await open_store(postgres_url)

    async def loses_the_connection(tx):
        await tx.put(make.event(1))
        postgres_server.psql("SELECT pg_terminate_backend(pid) FROM pg_locks WHERE locktype = 'advisory';")
        await tx.put(make.event(2))

    try:
        with pytest.raises(StoreEnded):
            await store.write(loses_the_connection)
        with pytest.raises(StoreEnded):
            await store.write(putting(make.event(3)))
        assert await store.read(lambda r: r.count(Event)) == 0
    finally:
        await store.close()


async def test_a_broken_reading_connection_is_replaced(postgres_url, postgres_server):
    store = await open_store(postgres_url)
    try:
        await store.read(lambda r: r.count(Event))
        postgres_server.psql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'echo2_shared'"
            " AND pid NOT IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory');"
        )
        with pytest.raises(StoreEnded, match="connection"):
            await store.read(lambda r: r.count(Event))
        assert await store.read(lambda r: r.count(Event)) == 0
    finally:
        await store.close()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("mysql://root:secret@host/db", "names 'mysql': use sqlite:///PATH"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "names no file"),
        ("nonsense secret@x", "cannot be read: use sqlite:///PATH"),
    ],
)
async def test_unsupported_urls_are_refused_without_showing_a_password(url, message):
    with pytest.raises(StoreError, match=message) as refused:
        await open_store(url)
    assert "secret" not in str(refused.value)


async def test_an_unreachable_server_is_named_without_its_password(tmp_path):
    with pytest.raises(StoreError, match=r"cannot connect to postgresql.*check that it runs") as refused:
        await open_store("postgresql://me:secret@127.0.0.1:1/db")
    assert "secret" not in str(refused.value)


async def test_a_missing_sqlite_file_is_not_made_by_opening(tmp_path):
    with pytest.raises(SchemaMismatch, match=r"there is no database at .*echo2 migrate"):
        await open_store(f"sqlite:///{tmp_path}/none.db")
    assert list(tmp_path.iterdir()) == []
