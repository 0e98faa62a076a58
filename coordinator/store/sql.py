"""`ports.Store` on SQLite and PostgreSQL: one writing connection with group commit, and a few reading ones.

`open_store` is the way in. The tables must be this release's (`migrate.upgrade`). One store per database is open for as long
as its process lives; a second one is refused with StoreLocked.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TypeVar

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncEngine

from coordinator.service.ports import Reader, Tx
from coordinator.store.errors import SchemaMismatch
from coordinator.store.links import Link, connect, make_engine, parse_url, sqlite_path
from coordinator.store.lock import AdvisoryLock, FileLock, WriterLock, lock_path
from coordinator.store.migrate import check_revision
from coordinator.store.queries import Queries
from coordinator.store.readers import ReaderLimits, Readers
from coordinator.store.writer import GroupWriter, WriterLimits

T = TypeVar("T")
_TABLE_NAMED = {
    "sqlite": "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'alembic_version'",
    "postgresql": "SELECT count(*) WHERE to_regclass('alembic_version') IS NOT NULL",
}


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of a store."""

    writer: WriterLimits = field(default_factory=WriterLimits)
    reader: ReaderLimits = field(default_factory=ReaderLimits)


class SqlStore:
    """Durable rows. Made by `open_store`; `close` releases the lock."""

    def __init__(self, writer: GroupWriter, readers: Readers, resources: AsyncExitStack) -> None:
        self._writer = writer
        self._readers = readers
        self._resources = resources

    async def write(self, action: Callable[[Tx], Awaitable[T]]) -> T:
        """See `ports.Store.write`; the errors are those of `errors.py`."""
        return await self._writer.write(action)

    async def read(self, action: Callable[[Reader], Awaitable[T]]) -> T:
        """See `ports.Store.read`; the errors are those of `errors.py`."""
        return await self._readers.read(action)

    async def close(self) -> None:
        """Finish queued writes and running reads, close the connections, release the lock. Later calls do nothing."""
        await self._resources.aclose()


async def open_store(url: str, *, limits: StoreLimits | None = None) -> SqlStore:
    """Open the database at `url` (sqlite:///PATH or postgresql://...) as its one writer.

    Raises StoreLocked, SchemaMismatch (run `migrate.upgrade` first), or StoreError when it cannot be reached.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" and not sqlite_path(parsed).exists():
        raise SchemaMismatch(f"there is no database at {sqlite_path(parsed)}: run `echo2 migrate`")
    resources = AsyncExitStack()
    try:
        return await _open(parsed, limits or StoreLimits(), resources)
    except BaseException:
        await resources.aclose()
        raise


async def _open(url: URL, limits: StoreLimits, resources: AsyncExitStack) -> SqlStore:
    engine = make_engine(url)
    resources.push_async_callback(engine.dispose)
    link, lock = await _locked(engine, resources)
    check_revision(await _revision(link, engine.dialect.name))
    queries = Queries(engine.dialect)
    readers = Readers(engine, queries, limits.reader)
    resources.push_async_callback(readers.close)
    writer = GroupWriter(link, queries, lock, limits.writer)
    resources.push_async_callback(writer.close)
    writer.start()
    return SqlStore(writer, readers, resources)


async def _locked(engine: AsyncEngine, resources: AsyncExitStack) -> tuple[Link, WriterLock]:
    """The writing connection and the lock that makes it the only one."""
    if engine.dialect.name == "sqlite":
        lock = FileLock(lock_path(sqlite_path(engine.url)))
        resources.callback(lock.release)
        link = await connect(engine)
        resources.push_async_callback(link.close)
        return link, lock
    link = await connect(engine)
    resources.push_async_callback(link.close)
    return link, await AdvisoryLock.take(link)


async def _revision(link: Link, dialect: str) -> str | None:
    if not (await link.fetch(_TABLE_NAMED[dialect], ()))[0][0]:
        return None
    rows = await link.fetch("SELECT version_num FROM alembic_version", ())
    return str(rows[0][0]) if rows else None
