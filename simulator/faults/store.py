"""Rows and blobs in memory behind the service's own ports: atomic, serial, durable at the commit, lost before it.

An action runs in one go: one that waits for anything but its transaction is refused (law 9). `Process` stands between a
coordinator and its store: dead processes read and write nothing. Rows without an order come by primary key, so that no order
depends on who wrote first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence, Set
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3
from sqlalchemy import UniqueConstraint

from coordinator.service.ports import Reader, Swept, Tx
from coordinator.store.errors import Conflict
from coordinator.store.tables import APPEND_ONLY, TABLES

T = TypeVar("T")
KEYS: dict[type[Any], tuple[str, ...]] = {
    kind: tuple(column.name for column in table.primary_key) for kind, table in TABLES.items()
}
UNIQUE: dict[type[Any], tuple[tuple[str, ...], ...]] = {
    kind: tuple(tuple(c.name for c in one.columns) for one in table.constraints if isinstance(one, UniqueConstraint))
    for kind, table in TABLES.items()
}
_KEY_OF: dict[type[Any], Callable[[Any], Any]] = {kind: attrgetter(*names) for kind, names in KEYS.items()}
_ENDINGS = ("__le", "__lt", "__ge", "__gt")


class Died(asyncio.CancelledError):
    """The process is dead: whatever still runs in it unwinds without effect."""


class Change(NamedTuple):
    """One row before and after a commit; None: it was not there."""

    kind: type[Any]
    before: Any
    after: Any


class Rows:
    """The tables. Outlives every process."""

    def __init__(self) -> None:
        self.tables: dict[type[Any], dict[Any, Any]] = {kind: {} for kind in TABLES}

    def all(self, kind: type[T]) -> list[T]:
        """Every row of a kind, by primary key."""
        table = self.tables[kind]
        return [table[key] for key in sorted(table)]


class _View:
    """Reads, as `ports.Reader` says."""

    def __init__(self, rows: Rows) -> None:
        self._tables = rows.tables

    async def get(self, kind: type[T], /, *key: object) -> T | None:
        found: T | None = self._tables[kind].get(key[0] if len(key) == 1 else key)
        return found

    async def select(
        self, kind: type[T], /, *, order_by: str | None = None, limit: int | None = None, **filters: object
    ) -> list[T]:
        found = self._matching(kind, filters)
        if len(found) > 1:
            found.sort(key=_KEY_OF[kind])
            if order_by is not None:
                found.sort(key=attrgetter(order_by.removeprefix("-")), reverse=order_by.startswith("-"))
        return found if limit is None else found[:limit]

    async def count(self, kind: type[Any], /, **filters: object) -> int:
        return len(self._matching(kind, filters))

    async def total(self, kind: type[Any], field: str, /, **filters: object) -> int:
        return sum(getattr(row, field) for row in self._matching(kind, filters))

    async def highest(self, kind: type[Any], field: str, /, **filters: object) -> int | None:
        values = [value for row in self._matching(kind, filters) if (value := getattr(row, field)) is not None]
        return max(values, default=None)

    def _matching(self, kind: type[T], filters: dict[str, object]) -> list[T]:
        table = self._tables[kind]
        key = KEYS[kind][0]
        if len(KEYS[kind]) == 1 and key in filters:
            wanted = filters.pop(key)
            keys = dict.fromkeys(wanted) if isinstance(wanted, list | tuple | set | frozenset) else (wanted,)
            rows: Iterable[T] = [table[one] for one in keys if one in table]
        else:
            rows = table.values()
        for name, value in filters.items():
            rows = _kept(rows, name, value)
        return list(rows)


def _kept(rows: Iterable[T], name: str, value: object) -> list[T]:
    ending = name[-4:]
    if ending in _ENDINGS:
        return _compared(rows, attrgetter(name[:-4]), ending, value)
    get = attrgetter(name)
    if isinstance(value, list | tuple | set | frozenset):
        return [row for row in rows if get(row) in value]
    return [row for row in rows if get(row) == value]


def _compared(rows: Iterable[T], get: Callable[[Any], Any], ending: str, value: Any) -> list[T]:
    pairs = [(row, got) for row in rows if (got := get(row)) is not None]
    if ending == "__le":
        return [row for row, got in pairs if got <= value]
    if ending == "__lt":
        return [row for row, got in pairs if got < value]
    if ending == "__ge":
        return [row for row, got in pairs if got >= value]
    return [row for row, got in pairs if got > value]


class _Tx(_View):
    """A transaction: writes go to the tables and are taken back unless it commits."""

    def __init__(self, rows: Rows) -> None:
        super().__init__(rows)
        self._before: dict[tuple[type[Any], Any], Any] = {}

    async def put(self, *rows: object) -> None:
        for row in rows:
            kind = type(row)
            key = _KEY_OF[kind](row)
            if kind in APPEND_ONLY and key in self._tables[kind]:
                raise Conflict(f"{kind.__name__} {key} exists")
            self._set(kind, key, row)

    async def insert(self, row: object) -> bool:
        kind, key = type(row), _KEY_OF[type(row)](row)
        table = self._tables[kind]
        if key in table:
            return False
        for names in UNIQUE[kind]:
            values = attrgetter(*names)
            if any(values(one) == values(row) for one in table.values()):
                return False
        self._set(kind, key, row)
        return True

    async def delete(self, kind: type[Any], /, **filters: object) -> int:
        if not filters:
            raise ValueError("delete needs a filter")
        doomed = self._matching(kind, filters)
        for row in doomed:
            self._set(kind, _KEY_OF[kind](row), None)
        return len(doomed)

    def _set(self, kind: type[Any], key: Any, row: Any) -> None:
        table = self._tables[kind]
        self._before.setdefault((kind, key), table.get(key))
        if row is None:
            table.pop(key, None)
        else:
            table[key] = row

    def undo(self) -> None:
        """As if it had never begun."""
        for (kind, key), row in self._before.items():
            self._set(kind, key, row)

    def changes(self) -> list[Change]:
        """What the transaction did, by table and key."""
        found = [Change(kind, before, self._tables[kind].get(key)) for (kind, key), before in self._before.items()]
        return [change for change in found if change.before != change.after]


def _at_once(action: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits."""
    try:
        action.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    action.close()
    raise RuntimeError("a transaction waited for something else than its rows (law 9)")


@dataclass(slots=True)
class Process:
    """One life of the coordinator, as its store and disk see it."""

    pace: Callable[[], Awaitable[None]]  # how long the disk takes
    committed: Callable[[list[Change]], None]  # told after each commit
    before_commit: Callable[[], None]  # may kill the process: raises Died
    after_commit: Callable[[], None]
    is_dead: bool = False
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    def check(self) -> None:
        """Raises Died in a dead process."""
        if self.is_dead:
            raise Died


class MemoryStore:
    """`ports.Store` for one process."""

    def __init__(self, rows: Rows, process: Process) -> None:
        self._rows = rows
        self._process = process

    async def write(self, action: Callable[[Tx], Awaitable[T]]) -> T:
        process = self._process
        process.check()
        await process.pace()
        process.check()
        tx = _Tx(self._rows)
        try:
            result: T = _at_once(action(tx))  # type: ignore[arg-type]
            process.before_commit()
        except BaseException:
            tx.undo()
            raise
        changes = tx.changes()
        if changes:
            process.committed(changes)
        process.after_commit()
        return result

    async def read(self, action: Callable[[Reader], Awaitable[T]]) -> T:
        self._process.check()
        await self._process.pace()
        self._process.check()
        result: T = _at_once(action(_View(self._rows)))  # type: ignore[arg-type]
        return result

    async def close(self) -> None:
        """Nothing is open."""


class MemoryBlobs:
    """`ports.Blobs` for one process over a dictionary that outlives it; `room` is what the disk has left."""

    def __init__(
        self, data: dict[str, tuple[bytes, float]], process: Process, now: Callable[[], float], room: Callable[[], int]
    ) -> None:
        self._data = data
        self._process = process
        self._now = now
        self._room = room

    async def put(self, data: bytes) -> str:
        await self._process.pace()
        self._process.check()
        digest = blake3(data).hexdigest()
        self._data[digest] = (data, self._now())
        return digest

    async def get(self, digest: str) -> bytes:
        self._process.check()
        return self._data[digest][0]

    def path(self, digest: str) -> Path:
        raise NotImplementedError(f"blob {digest[:12]} lies in memory")

    async def free_bytes(self) -> int:
        return self._room()

    async def sweep(self, keep: Set[str], *, before: float) -> Swept:
        self._process.check()
        doomed = [digest for digest, (_, at) in self._data.items() if digest not in keep and at < before]
        size = sum(len(self._data.pop(digest)[0]) for digest in doomed)
        return Swept(len(doomed), size)


def keys(rows: Sequence[Any]) -> list[Any]:
    """Primary keys of rows of one kind."""
    return [_KEY_OF[type(row)](row) for row in rows]
