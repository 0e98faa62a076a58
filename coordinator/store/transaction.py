"""The generic reads and writes over one link: `ports.Reader` and `ports.Tx`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, TypeVar

from coordinator.store.errors import InvalidQuery, StoreError
from coordinator.store.links import Link
from coordinator.store.queries import Filters, Queries, Test, parse
from coordinator.store.rows import mapping

Row = TypeVar("Row")


class Reading:
    """A reader of one transaction. Ends with it: use after that raises."""

    def __init__(self, link: Link, queries: Queries) -> None:
        self._link = link
        self._queries = queries
        self._ended = ""

    def end(self, why: str) -> None:
        """Refuse every later use with these words."""
        self._ended = why

    async def get(self, kind: type[Row], /, *key: object) -> Row | None:
        """The row with that primary key, or None."""
        rows = mapping(kind)
        if len(key) != len(rows.key):
            raise InvalidQuery(f"{kind.__name__} has the key ({', '.join(rows.key)}): {len(key)} values were given")
        shape = tuple((name, Test.EQUAL) for name in rows.key)
        values = tuple(rows.value(name, value) for name, value in zip(rows.key, key, strict=True))
        found = await self._rows(kind, Filters(shape, values), None, None)
        return found[0] if found else None

    async def select(
        self, kind: type[Row], /, *, order_by: str | None = None, limit: int | None = None, **filters: object
    ) -> list[Row]:
        """Matching rows, by primary key unless ordered otherwise."""
        return await self._rows(kind, parse(mapping(kind), filters), order_by, limit)

    async def count(self, kind: type[Any], /, **filters: object) -> int:
        """How many rows match."""
        return int(await self._figure(kind, "count", "", filters))

    async def total(self, kind: type[Any], field: str, /, **filters: object) -> int:
        """Sum of an integer field; 0 when none match."""
        return int(await self._figure(kind, "sum", field, filters))

    async def highest(self, kind: type[Any], field: str, /, **filters: object) -> int | None:
        """Largest value of an integer field; None when none match."""
        figure = await self._figure(kind, "max", field, filters)
        return None if figure is None else int(figure)

    async def _rows(self, kind: type[Row], filters: Filters, order_by: str | None, limit: int | None) -> list[Row]:
        self._check()
        statement = self._queries.select(kind, filters.shape, order_by, limit is not None)
        values = filters.values if limit is None else (*filters.values, limit)
        found = await self._fetch(statement.sql, self._queries.arguments(statement, values))
        read = mapping(kind).row
        return [read(row) for row in found]

    async def _figure(self, kind: type[Any], what: str, field: str, filters: dict[str, object]) -> Any:
        self._check()
        parsed = parse(mapping(kind), filters)
        statement = self._queries.aggregate(kind, what, field, parsed.shape)
        return (await self._fetch(statement.sql, self._queries.arguments(statement, parsed.values)))[0][0]

    async def _fetch(self, sql: str, values: Sequence[Any]) -> list[Any]:
        return await self._link.fetch(sql, values)

    def _check(self) -> None:
        if self._ended:
            raise StoreError(self._ended)


class Writing(Reading):
    """A transaction. A statement that fails spoils it: the action must end, and is undone whole."""

    def __init__(self, link: Link, queries: Queries) -> None:
        super().__init__(link, queries)
        self._savepoint = False
        self._spoilt = False

    @property
    def is_spoilt(self) -> bool:
        """A statement failed; nothing of this transaction may be kept."""
        return self._spoilt

    async def start(self) -> None:
        """Set the savepoint now where the database needs it before reads."""
        if self._link.savepoint_first:
            await self._protect()

    async def undo(self) -> None:
        """Take back everything this transaction wrote."""
        if self._savepoint:
            await self._link.undo()

    async def put(self, *rows: object) -> None:
        """Insert or replace by primary key; one bulk statement per kind."""
        kinds: dict[type[Any], list[tuple[Any, ...]]] = defaultdict(list)
        for row in rows:
            kinds[type(row)].append(mapping(type(row)).values(row))
        await self._before_write()
        for kind, values in kinds.items():
            statement = self._queries.upsert(kind)
            with _Spoiling(self):
                await self._link.change_many(statement.sql, [statement.arguments(one) for one in values])

    async def insert(self, row: object) -> bool:
        """Insert; False when its primary key or a unique column exists."""
        values = mapping(type(row)).values(row)
        await self._before_write()
        statement = self._queries.insert(type(row))
        with _Spoiling(self):
            return await self._link.change(statement.sql, statement.arguments(values)) == 1

    async def delete(self, kind: type[Any], /, **filters: object) -> int:
        """Delete matching rows; at least one filter is required."""
        parsed = parse(mapping(kind), filters)
        statement = self._queries.delete(kind, parsed.shape)
        await self._before_write()
        with _Spoiling(self):
            return await self._link.change(statement.sql, self._queries.arguments(statement, parsed.values))

    def spoil(self) -> None:
        """Mark that a statement failed."""
        self._spoilt = True

    async def _fetch(self, sql: str, values: Sequence[Any]) -> list[Any]:
        with _Spoiling(self):
            return await super()._fetch(sql, values)

    async def _before_write(self) -> None:
        self._check()
        await self._protect()

    async def _protect(self) -> None:
        if not self._savepoint:
            await self._link.protect()
            self._savepoint = True

    def _check(self) -> None:
        super()._check()
        if self._spoilt:
            raise StoreError("a statement of this action failed before: let its error end the action, and write anew")


class _Spoiling:
    """Marks the transaction when a statement in its block raises, cancellation included."""

    def __init__(self, transaction: Writing) -> None:
        self._transaction = transaction

    def __enter__(self) -> None: ...

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._transaction.spoil()
