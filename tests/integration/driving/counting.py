"""A real store that counts the rows it hands out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from coordinator.service.ports import Reader, Store, Tx


class CountingStore:
    """`rows`: handed out since the start, by kind. `statements`: queries made."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.rows: Counter[type[Any]] = Counter()
        self.statements = 0

    async def read(self, action: Callable[[Reader], Awaitable[Any]]) -> Any:
        return await self._store.read(lambda reader: action(_Counting(reader, self)))

    async def write(self, action: Callable[[Tx], Awaitable[Any]]) -> Any:
        return await self._store.write(lambda tx: action(_Counting(tx, self)))

    async def close(self) -> None:
        await self._store.close()


class _Counting:
    """A reader or a transaction; only queries are counted."""

    def __init__(self, inner: Any, counts: CountingStore) -> None:
        self._inner = inner
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        self._counts.statements += name in ("count", "total", "highest")
        return getattr(self._inner, name)

    async def get(self, kind: type[Any], *key: object) -> Any:
        self._counts.statements += 1
        row = await self._inner.get(kind, *key)
        self._counts.rows[kind] += row is not None
        return row

    async def select(self, kind: type[Any], **how: Any) -> Any:
        self._counts.statements += 1
        rows = await self._inner.select(kind, **how)
        self._counts.rows[kind] += len(rows)
        return rows
