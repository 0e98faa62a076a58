"""One database connection each, driven without an ORM: SQL text and parameters in, tuples out, errors of this package.

SQLAlchemy makes the connections and the SQL; statements then go straight to the driver (aiosqlite, asyncpg), which costs a
quarter of the way through its result objects. A link is used by one task at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import asyncpg
from sqlalchemy import URL, NullPool, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from coordinator.store.errors import Conflict, StoreBusy, StoreEnded, StoreError, StoreFull

SQLITE_BUSY_S = 5.0
SQLITE_PRAGMAS = (
    "PRAGMA journal_mode=WAL",
    "PRAGMA synchronous=FULL",
    "PRAGMA temp_store=MEMORY",
    "PRAGMA cache_size=-16384",
    "PRAGMA journal_size_limit=67108864",
)
CONNECT_S = 15.0
CANCEL_S = 5.0  # for opening a link that nobody wants any more
Values = Sequence[Any]


class Link(Protocol):
    """A connection. Each method raises a StoreError; StoreEnded when the connection is gone."""

    savepoint_first: bool  # a failed read spoils the whole transaction, so that each action starts with a savepoint

    async def fetch(self, sql: str, values: Values) -> list[Any]:
        """The rows of a query, as sequences of column values."""
        ...

    async def change(self, sql: str, values: Values) -> int:
        """Run one change; the number of rows changed."""
        ...

    async def change_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        """Run one change for each row of values."""
        ...

    async def begin_write(self) -> None: ...

    async def begin_read(self) -> None:
        """A transaction that sees one snapshot and writes nothing."""
        ...

    async def protect(self) -> None:
        """Set the savepoint that `undo` goes back to; an older one no longer counts."""
        ...

    async def undo(self) -> None: ...

    async def commit(self) -> None:
        """Durable on return."""
        ...

    async def rollback(self) -> None:
        """End the transaction; no error when the database has ended it already."""
        ...

    def in_transaction(self) -> bool: ...

    def is_closed(self) -> bool:
        """Whether the connection is known to be gone."""
        ...

    async def close(self) -> None: ...


def parse_url(url: str) -> URL:
    """The URL with the asynchronous driver in it. Raises StoreError for databases that are not supported."""
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError(
            f"database url {_shown(url)!r} cannot be read: use sqlite:///PATH or postgresql://USER@HOST/NAME"
        ) from error
    match parsed.get_backend_name():
        case "sqlite" if parsed.database and parsed.database != ":memory:":
            return parsed.set(drivername="sqlite+aiosqlite")
        case "sqlite":
            raise StoreError("database url names no file: rows must survive the process, use sqlite:///PATH")
        case "postgresql":
            return parsed.set(drivername="postgresql+asyncpg")
        case other:
            raise StoreError(f"database url names {other!r}: use sqlite:///PATH or postgresql://USER@HOST/NAME")


def sqlite_path(url: URL) -> Path:
    """Where an SQLite database lies."""
    assert url.database is not None
    return Path(url.database)


def make_engine(url: URL) -> AsyncEngine:
    """An engine that pools nothing: links live as long as the store."""
    if url.get_backend_name() == "sqlite":
        arguments: dict[str, Any] = {"timeout": SQLITE_BUSY_S, "isolation_level": None}
    else:
        name = f"echo2 pid {os.getpid()} on {socket.gethostname()}"
        arguments = {"timeout": CONNECT_S, "server_settings": {"application_name": name, "synchronous_commit": "on"}}
    return create_async_engine(url, poolclass=NullPool, connect_args=arguments)


async def connect(engine: AsyncEngine) -> Link:
    """A new link. Raises StoreError, without the URL's password, when the database cannot be reached.

    Cancelled, it opens the link first and closes it again: the driver would leave a half-open connection to the garbage collector.
    """
    opening = asyncio.ensure_future(_connect(engine))
    try:
        return await asyncio.shield(opening)
    except asyncio.CancelledError:
        await asyncio.wait([opening], timeout=CANCEL_S)
        if opening.done() and not opening.cancelled() and opening.exception() is None:
            await opening.result().close()
        else:
            opening.cancel()
        raise


async def _connect(engine: AsyncEngine) -> Link:
    try:
        connection = await engine.connect()
    except (DBAPIError, OSError, asyncpg.PostgresError) as error:
        shown = engine.url.render_as_string(hide_password=True)
        raise StoreError(f"cannot connect to {shown}: {_words(error)}; check that it runs and that the url is right") from error
    driver: Any = (await connection.get_raw_connection()).driver_connection
    if engine.dialect.name != "sqlite":
        await driver.set_type_codec("json", encoder=str, decoder=str, schema="pg_catalog")  # JSON as text, like SQLite
        return PostgresLink(connection, driver)
    link = SqliteLink(connection, driver)
    for pragma in SQLITE_PRAGMAS:
        await link.fetch(pragma, ())
    return link


class SqliteLink:
    """aiosqlite: every call is one hop to the connection's thread."""

    savepoint_first = False

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        self._connection = connection
        self._driver = driver

    async def fetch(self, sql: str, values: Values) -> list[Any]:
        with _sqlite_errors():
            return list(await self._driver.execute_fetchall(sql, values))

    async def change(self, sql: str, values: Values) -> int:
        with _sqlite_errors():
            return int((await self._driver.execute(sql, values)).rowcount)

    async def change_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        with _sqlite_errors():
            await self._driver.executemany(sql, rows)

    async def begin_write(self) -> None:
        await self._run("BEGIN IMMEDIATE")

    async def begin_read(self) -> None:
        await self._run("BEGIN")

    async def protect(self) -> None:
        await self._run("SAVEPOINT action")

    async def undo(self) -> None:
        await self._run("ROLLBACK TO SAVEPOINT action")

    async def commit(self) -> None:
        await self._run("COMMIT")

    async def rollback(self) -> None:
        # Through the driver's queue: a cancelled caller may have left a BEGIN in it that has not run yet.
        if not self.is_closed():
            with _sqlite_errors():
                await self._driver.rollback()

    def in_transaction(self) -> bool:
        return not self.is_closed() and bool(self._driver.in_transaction)

    async def _run(self, sql: str) -> None:
        with _sqlite_errors():
            await self._driver.execute(sql)

    def is_closed(self) -> bool:
        return self._connection.closed

    async def close(self) -> None:
        await self._connection.close()


class PostgresLink:
    """asyncpg, with its own cache of prepared statements."""

    savepoint_first = True

    def __init__(self, connection: AsyncConnection, driver: Any) -> None:
        self._connection = connection
        self._driver = driver
        self._protected = False

    async def fetch(self, sql: str, values: Values) -> list[Any]:
        with _postgres_errors():
            return list(await self._driver.fetch(sql, *values))

    async def change(self, sql: str, values: Values) -> int:
        with _postgres_errors():
            status: str = await self._driver.execute(sql, *values)
        return int(status.rpartition(" ")[2])

    async def change_many(self, sql: str, rows: list[tuple[Any, ...]]) -> None:
        with _postgres_errors():
            await self._driver.executemany(sql, rows)

    async def begin_write(self) -> None:
        self._protected = False
        await self._run("BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE")

    async def begin_read(self) -> None:
        await self._run("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")

    async def protect(self) -> None:
        # Released first: the server searches all nested savepoints for every row that it looks at.
        await self._run("RELEASE SAVEPOINT action; SAVEPOINT action" if self._protected else "SAVEPOINT action")
        self._protected = True

    async def undo(self) -> None:
        await self._run("ROLLBACK TO SAVEPOINT action")

    async def commit(self) -> None:
        status = await self._run("COMMIT")
        if status != "COMMIT":
            raise StoreError(f"PostgreSQL answered COMMIT with {status}: the transaction had failed, nothing of it was kept")

    async def rollback(self) -> None:
        if self.in_transaction():
            await self._run("ROLLBACK")

    def in_transaction(self) -> bool:
        return not self.is_closed() and bool(self._driver.is_in_transaction())

    async def _run(self, sql: str) -> str:
        with _postgres_errors():
            return str(await self._driver.execute(sql))

    def is_closed(self) -> bool:
        return bool(self._driver.is_closed())

    async def close(self) -> None:
        if self.is_closed():
            await self._connection.invalidate()
        await self._connection.close()


@contextmanager
def _sqlite_errors() -> Iterator[None]:
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise Conflict(str(error)) from error
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise StoreBusy(f"another program holds the SQLite database for over {SQLITE_BUSY_S} s: end it") from error
        if "disk is full" in str(error):
            raise StoreFull("the disk that holds the database is full: free space and resume") from error
        raise StoreError(f"SQLite: {error}") from error
    except ValueError as error:  # aiosqlite's word for a closed connection
        raise StoreEnded(f"SQLite: {error}") from error


@contextmanager
def _postgres_errors() -> Iterator[None]:
    try:
        yield
    except asyncpg.IntegrityConstraintViolationError as error:
        raise Conflict(str(error)) from error
    except asyncpg.DiskFullError as error:
        raise StoreFull("the disk of the PostgreSQL server is full: free space and resume") from error
    except (asyncpg.PostgresConnectionError, asyncpg.OperatorInterventionError, OSError) as error:
        raise StoreEnded(f"the connection to PostgreSQL was lost: {_words(error)}") from error
    except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        raise StoreError(f"PostgreSQL: {_words(error)}") from error


def _words(error: BaseException) -> str:
    return str(error).partition("\n")[0] or type(error).__name__


def _shown(url: str) -> str:
    """A URL without what stands before its @."""
    return url.rpartition("@")[2]
