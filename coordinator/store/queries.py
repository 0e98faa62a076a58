"""Statements for the generic store, built with SQLAlchemy Core and compiled once per shape.

A shape is what does not change from call to call: the kind, which filters and orders are used. The lists of `field=[...]`
travel as one parameter, so that their length makes no new statement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Dialect

from coordinator.store.errors import InvalidQuery
from coordinator.store.fields import JSON_STORAGES, Storage
from coordinator.store.rows import Mapping, mapping
from coordinator.store.tables import APPEND_ONLY

SHAPES = 2048  # compiled statements kept


class Test(Enum):
    """What a filter asks of a field."""

    EQUAL = ""
    LE = "le"
    LT = "lt"
    GE = "ge"
    GT = "gt"
    NULL = "null"
    ANY = "any"
    ANY_OR_NULL = "any_or_null"


Shape = tuple[tuple[str, Test], ...]
_RANGES = {"le": Test.LE, "lt": Test.LT, "ge": Test.GE, "gt": Test.GT}


@dataclass(frozen=True, slots=True)
class Filters:
    """Parsed filters: the shape, and the values in the order of its parameters."""

    shape: Shape
    values: tuple[Any, ...]


def parse(rows: Mapping[Any], filters: dict[str, object]) -> Filters:
    """Read keyword filters (see `ports.Reader`). Raises InvalidQuery or InvalidRow, naming the filter."""
    shape: list[tuple[str, Test]] = []
    values: list[Any] = []
    for name, value in filters.items():
        field, _, suffix = name.partition("__")
        _known(rows, field, f"filter {name}")
        test, parameters = _test(rows, field, suffix, value)
        shape.append((field, test))
        values.extend(parameters)
    return Filters(tuple(shape), tuple(values))


def _known(rows: Mapping[Any], field: str, use: str) -> None:
    spec = rows.specs.get(field)
    if spec is None:
        raise InvalidQuery(f"{rows.kind.__name__} has no field {field!r} ({use}): use one of {', '.join(rows.names)}")
    if spec.storage in JSON_STORAGES:
        raise InvalidQuery(f"{rows.kind.__name__}.{field} is stored as JSON ({use}): only plain fields can be compared")


def _test(rows: Mapping[Any], field: str, suffix: str, value: object) -> tuple[Test, list[Any]]:
    if suffix and suffix not in _RANGES:
        raise InvalidQuery(f"filter {field}__{suffix}: the suffix must be one of {', '.join(_RANGES)}")
    if suffix:
        if value is None:
            raise InvalidQuery(f"filter {field}__{suffix}=None compares with nothing: pass a value or use {field}=None")
        return _RANGES[suffix], [rows.value(field, value)]
    if value is None:
        return Test.NULL, []
    if isinstance(value, list | tuple | set | frozenset):
        some = [rows.value(field, one) for one in value if one is not None]
        return (Test.ANY if len(some) == len(value) else Test.ANY_OR_NULL), [some]
    return Test.EQUAL, [rows.value(field, value)]


@dataclass(frozen=True, slots=True)
class Statement:
    """SQL text of one dialect. `order` places the caller's parameters, followed by the dialect's own `constants`."""

    sql: str
    order: tuple[int, ...]
    constants: tuple[Any, ...] = ()

    def arguments(self, values: Sequence[Any]) -> tuple[Any, ...]:
        """The driver's parameters from the caller's, in the statement's order."""
        every = (*values, *self.constants) if self.constants else values
        return tuple([every[place] for place in self.order])


class Queries:
    """Compiled statements of one dialect. Kinds are those of `tables`."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        self._is_sqlite = dialect.name == "sqlite"
        compiled: Any = lru_cache(SHAPES)
        self.select: Callable[[type[Any], Shape, str | None, bool], Statement] = compiled(self._select)
        self.aggregate: Callable[[type[Any], str, str, Shape], Statement] = compiled(self._aggregate)
        self.delete: Callable[[type[Any], Shape], Statement] = compiled(self._delete)
        self.upsert: Callable[[type[Any]], Statement] = compiled(self._upsert)
        self.insert: Callable[[type[Any]], Statement] = compiled(self._insert)

    def list_argument(self, values: list[Any]) -> Any:
        """A list as this dialect's single parameter."""
        return json.dumps(values) if self._is_sqlite else values

    def arguments(self, statement: Statement, values: Sequence[Any]) -> tuple[Any, ...]:
        """The driver's parameters, lists included."""
        return statement.arguments([self.list_argument(v) if isinstance(v, list) else v for v in values])

    def _select(self, kind: type[Any], shape: Shape, order_by: str | None, limited: bool) -> Statement:
        rows = mapping(kind)
        statement = sa.select(rows.table).where(*self._where(rows, shape)).order_by(*_order(rows, order_by))
        names = _parameters(shape)
        if limited:
            statement = statement.limit(sa.bindparam("limit", type_=sa.BigInteger()))
            names.append("limit")
        return self._compile(statement, names)

    def _aggregate(self, kind: type[Any], what: str, field: str, shape: Shape) -> Statement:
        """`what` is count, sum or max; `field` is ignored by count."""
        rows = mapping(kind)
        if what != "count":
            _integer_field(rows, field, what)
        statement = sa.select(_figure(rows.table, what, field)).select_from(rows.table).where(*self._where(rows, shape))
        return self._compile(statement, _parameters(shape))

    def _delete(self, kind: type[Any], shape: Shape) -> Statement:
        rows = mapping(kind)
        if not shape:
            raise InvalidQuery(f"delete({rows.kind.__name__}) needs a filter: it would delete every row")
        if kind in APPEND_ONLY:
            raise InvalidQuery(f"{rows.kind.__name__} rows are only added: post what compensates them instead of deleting them")
        return self._compile(sa.delete(rows.table).where(*self._where(rows, shape)), _parameters(shape))

    def _upsert(self, kind: type[Any]) -> Statement:
        rows = mapping(kind)
        statement = self._insert_into(rows)
        if kind in APPEND_ONLY:
            return self._compile(statement, list(rows.names))  # an existing key is a Conflict
        rest = {name: statement.excluded[name] for name in rows.names if name not in rows.key}
        if not rest:
            return self._compile(statement.on_conflict_do_nothing(index_elements=rows.key), list(rows.names))
        return self._compile(statement.on_conflict_do_update(index_elements=rows.key, set_=rest), list(rows.names))

    def _insert(self, kind: type[Any]) -> Statement:
        rows = mapping(kind)
        return self._compile(self._insert_into(rows).on_conflict_do_nothing(), list(rows.names))

    def _insert_into(self, rows: Mapping[Any]) -> Any:
        make: Any = sqlite.insert if self._is_sqlite else postgresql.insert
        return make(rows.table).values({name: sa.bindparam(name) for name in rows.names}).inline()

    def _where(self, rows: Mapping[Any], shape: Shape) -> list[sa.ColumnElement[bool]]:
        return [self._condition(rows.table.c[field], test, f"p{place}") for place, (field, test) in enumerate(shape)]

    def _condition(self, column: sa.Column[Any], test: Test, name: str) -> sa.ColumnElement[bool]:
        value = sa.bindparam(name, type_=column.type)
        match test:
            case Test.EQUAL:
                return column == value
            case Test.LE:
                return column <= value
            case Test.LT:
                return column < value
            case Test.GE:
                return column >= value
            case Test.GT:
                return column > value
            case Test.NULL:
                return column.is_(None)
            case Test.ANY:
                return self._any(column, name)
            case Test.ANY_OR_NULL:
                return sa.or_(self._any(column, name), column.is_(None))

    def _any(self, column: sa.Column[Any], name: str) -> sa.ColumnElement[bool]:
        if self._is_sqlite:
            each = sa.func.json_each(sa.bindparam(name, type_=sa.String())).table_valued("value")
            return column.in_(sa.select(each.c.value))
        return column == sa.any_(sa.bindparam(name, type_=postgresql.ARRAY(column.type)))

    def _compile(self, statement: Any, names: list[str]) -> Statement:
        compiled = statement.compile(dialect=self._dialect)
        own = [name for name in compiled.positiontup if name not in names]
        every = [*names, *own]
        order = tuple(every.index(name) for name in compiled.positiontup)
        return Statement(str(compiled), order, tuple(compiled.params[name] for name in own))


def _figure(table: sa.Table, what: str, field: str) -> sa.ColumnElement[Any]:
    if what == "count":
        return sa.func.count()
    return sa.func.coalesce(sa.func.sum(table.c[field]), 0) if what == "sum" else sa.func.max(table.c[field])


def _parameters(shape: Shape) -> list[str]:
    return [f"p{place}" for place, (_, test) in enumerate(shape) if test is not Test.NULL]


def _integer_field(rows: Mapping[Any], field: str, use: str) -> None:
    _known(rows, field, use)
    if rows.specs[field].storage is not Storage.INTEGER:
        raise InvalidQuery(f"{rows.kind.__name__}.{field} is not an integer ({use}): only integer fields are summed or compared so")


def _order(rows: Mapping[Any], order_by: str | None) -> list[sa.UnaryExpression[Any]]:
    """The asked order, ties by primary key; None sorts first, so that both databases answer alike."""
    field = (order_by or rows.key[0]).removeprefix("-")
    _known(rows, field, f"order_by {order_by!r}")
    names = [field, *(name for name in rows.key if name != field)]
    descending = order_by is not None and order_by.startswith("-")
    return [_direction(rows, name, descending) for name in names]


def _direction(rows: Mapping[Any], name: str, descending: bool) -> sa.UnaryExpression[Any]:
    column = rows.table.c[name]
    if descending:
        return column.desc().nulls_last() if rows.specs[name].nullable else column.desc()
    return column.asc().nulls_first() if rows.specs[name].nullable else column.asc()
