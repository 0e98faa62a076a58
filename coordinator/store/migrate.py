"""Bring a database's tables to this release, with Alembic. The steps lie in the top-level package `migrations`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import resources
from typing import Any, TypeVar

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import URL, Connection, event
from sqlalchemy.ext.asyncio import AsyncEngine

from coordinator.store.errors import SchemaMismatch
from coordinator.store.links import connect, make_engine, parse_url, sqlite_path
from coordinator.store.lock import AdvisoryLock, FileLock, lock_path
from p2p.adapters.durable import REAL_FILES, make_directory_durably

T = TypeVar("T")


def upgrade(url: str) -> None:
    """Run every missing migration, each in a transaction; makes the SQLite file if it is absent. Blocks; safe inside a running loop.

    Takes the writer's lock meanwhile: raises StoreLocked while a coordinator runs, SchemaMismatch when the tables are newer.
    """
    _apart(_upgrade(parse_url(url)))


def current(url: str) -> str | None:
    """The revision of the database's tables; None before the first migration. Blocks; safe inside a running loop."""
    return _apart(_current(parse_url(url)))


@cache
def head() -> str:
    """The revision that this release needs."""
    revision = ScriptDirectory.from_config(_config()).get_current_head()
    assert revision is not None
    return revision


def check_revision(found: str | None) -> None:
    """Raise SchemaMismatch unless `found` is this release's revision."""
    if found == head():
        return
    if found is None or found in _known():
        raise SchemaMismatch(f"the database's tables are at revision {found}, this release needs {head()}: run `echo2 migrate`")
    raise SchemaMismatch(
        f"the database's tables are at revision {found}, which this release does not know: install a newer release"
    )


async def _upgrade(url: URL) -> None:
    engine = make_engine(url)
    try:
        if url.get_backend_name() == "sqlite":
            await _upgrade_sqlite(engine)
        else:
            await _upgrade_postgres(engine)
    finally:
        await engine.dispose()


async def _upgrade_sqlite(engine: AsyncEngine) -> None:
    path = sqlite_path(engine.url)
    make_directory_durably(path.parent)
    lock = FileLock(lock_path(path))
    try:
        event.listen(engine.sync_engine, "begin", _begin_sqlite)
        await _run_migrations(engine)
        REAL_FILES.fsync_dir(path.parent)  # the file's own name; SQLite syncs its content
    finally:
        lock.release()


async def _upgrade_postgres(engine: AsyncEngine) -> None:
    link = await connect(engine)
    try:
        await AdvisoryLock.take(link)
        await _run_migrations(engine)
    finally:
        await link.close()


async def _run_migrations(engine: AsyncEngine) -> None:
    async with engine.begin() as connection:
        await connection.run_sync(_migrate)


def _migrate(connection: Connection) -> None:
    found = _revision(connection)
    if found is not None and found not in _known():
        check_revision(found)
    config = _config()
    config.attributes["connection"] = connection
    command.upgrade(config, "head")


async def _current(url: URL) -> str | None:
    if url.get_backend_name() == "sqlite" and not sqlite_path(url).exists():
        return None
    engine = make_engine(url)
    try:
        async with engine.connect() as connection:
            return await connection.run_sync(_revision)
    finally:
        await engine.dispose()


def _revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _begin_sqlite(connection: Connection) -> None:
    """The driver begins nothing by itself; tables must be made in a transaction too."""
    connection.execute(sa.text("BEGIN IMMEDIATE"))


@cache
def _known() -> frozenset[str]:
    return frozenset(step.revision for step in ScriptDirectory.from_config(_config()).walk_revisions())


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(resources.files("migrations")).replace("%", "%%"))
    return config


def _apart(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on a loop of its own, whatever thread calls."""
    run: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    with ThreadPoolExecutor(1, thread_name_prefix="migrate") as threads:
        return threads.submit(run, work).result()
