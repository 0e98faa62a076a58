"""Rows to values and back: one cached mapping per dataclass, driven by the types of its fields.

Values are what both drivers take as they are: str, int, float, bool, None; containers and models as JSON text. What cannot
be stored the same way in both databases is refused (NaN, integers over 64 bits) or escaped (NUL, lone surrogates).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Generic, TypeVar

import sqlalchemy as sa

from coordinator.store.errors import InvalidQuery, InvalidRow
from coordinator.store.fields import FieldSpec, Storage, fields_of
from coordinator.store.tables import TABLES

Row = TypeVar("Row")
Convert = Callable[[Any], Any]

_ESCAPE = "\x1a"
_UNSAFE = re.compile("[\x00\x1a\ud800-\udfff]")
_ESCAPED = re.compile("\x1a([0-9a-f]{4})")
_INT64 = 1 << 63
_ENCODE_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Mapping(Generic[Row]):
    """How rows of one kind are written and read."""

    kind: type[Row]
    table: sa.Table
    names: tuple[str, ...]
    key: tuple[str, ...]
    specs: dict[str, FieldSpec]
    encoders: dict[str, Convert]
    decoders: tuple[tuple[int, Convert], ...]  # by column, only where the driver's value differs
    fetch: Callable[[Any], tuple[Any, ...]]

    def values(self, row: Row) -> tuple[Any, ...]:
        """The row's column values in order. Raises InvalidRow, naming the field."""
        encoders = self.encoders
        try:
            return tuple([encoders[name](value) for name, value in zip(self.names, self.fetch(row), strict=True)])
        except (ValueError, TypeError, LookupError, AttributeError):
            raise self._invalid(row) from None

    def value(self, name: str, value: object) -> Any:
        """One field's column value. Raises InvalidRow."""
        try:
            return self.encoders[name](value)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise InvalidRow(_refusal(self.kind, name, value, error)) from None

    def row(self, values: Sequence[Any]) -> Row:
        """The row of these column values. Raises InvalidRow when the database holds something else than this release wrote."""
        columns = list(values)
        for place, decode in self.decoders:
            if columns[place] is not None:
                try:
                    columns[place] = decode(columns[place])
                except (ValueError, TypeError, LookupError) as error:
                    raise InvalidRow(_refusal(self.kind, self.names[place], columns[place], error)) from None
        return self.kind(*columns)

    def _invalid(self, row: Row) -> Exception:
        """Find the field that `values` stumbled over."""
        for name, value in zip(self.names, self.fetch(row), strict=True):
            try:
                self.encoders[name](value)
            except (ValueError, TypeError, LookupError, AttributeError) as error:
                return InvalidRow(_refusal(self.kind, name, value, error))
        return InvalidRow(f"{self.kind.__name__} changed while it was written: pass immutable rows")


def mapping(kind: type[Row]) -> Mapping[Row]:
    """The mapping of a kind. Raises InvalidQuery for one that has no table."""
    found: Mapping[Row] | None = _MAPPINGS.get(kind)
    if found is None:
        raise InvalidQuery(f"{kind.__name__} is not a stored kind: use one of {', '.join(sorted(k.__name__ for k in TABLES))}")
    return found


def _refusal(kind: type[Any], name: str, value: object, error: Exception) -> str:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return f"{kind.__name__}.{name} cannot be {shown}: {error}"


def _encoder(spec: FieldSpec) -> Convert:
    encode = _strict_encoder(spec)
    if spec.nullable:
        return lambda value: None if value is None else encode(value)
    return encode


def _strict_encoder(spec: FieldSpec) -> Convert:
    match spec.storage:
        case Storage.TEXT:
            return _text
        case Storage.INTEGER:
            return _integer
        case Storage.REAL:
            return _real
        case Storage.BOOLEAN:
            return _boolean
        case Storage.STATE:
            return _state_encoder({str(member): str(member.value) for member in spec.type})
        case Storage.TUPLE:
            return _container(tuple)
        case Storage.DICT:
            return _container(dict)
        case Storage.MODEL:
            return lambda value: value.model_dump_json()


def _decoder(spec: FieldSpec) -> Convert | None:
    match spec.storage:
        case Storage.TEXT:
            return _unescape
        case Storage.INTEGER | Storage.REAL:
            return None
        case Storage.BOOLEAN:
            return bool
        case Storage.STATE:
            return {str(member.value): member for member in spec.type}.__getitem__
        case Storage.TUPLE:
            return lambda text: tuple(json.loads(text))
        case Storage.DICT:
            return json.loads
        case Storage.MODEL:
            # Read far oftener than changed, and frozen: one parsed value is shared.
            return lru_cache(maxsize=256)(spec.type.model_validate_json)


def _state_encoder(values: dict[str, str]) -> Convert:
    def encode(value: Any) -> str:
        if value not in values:
            raise ValueError(f"use one of {', '.join(values)}")
        return values[value]

    return encode


def _container(wanted: type[Any]) -> Convert:
    def encode(value: Any) -> str:
        if not isinstance(value, wanted):
            raise TypeError(f"a {wanted.__name__} is needed")
        return _ENCODE_JSON(value)

    return encode


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text is needed")
    return value if _UNSAFE.search(value) is None else _UNSAFE.sub(lambda m: f"{_ESCAPE}{ord(m[0]):04x}", value)


def _unescape(value: str) -> str:
    return value if _ESCAPE not in value else _ESCAPED.sub(lambda m: chr(int(m[1], 16)), value)


def _integer(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError("an integer is needed")
    if not -_INT64 <= value < _INT64:
        raise ValueError("it must fit in 64 bits")
    return value


def _real(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError("a number is needed")
    if value != value:  # noqa: PLR0124 (the cheapest test for NaN)
        raise ValueError("NaN is not a measurement")
    return float(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false is needed")
    return value


def _mapping(kind: type[Any], table: sa.Table) -> Mapping[Any]:
    specs = fields_of(kind)
    decoders = [(place, _decoder(spec)) for place, spec in enumerate(specs)]
    return Mapping(
        kind=kind,
        table=table,
        names=tuple(spec.name for spec in specs),
        key=tuple(column.name for column in table.primary_key.columns),
        specs={spec.name: spec for spec in specs},
        encoders={spec.name: _encoder(spec) for spec in specs},
        decoders=tuple((place, decode) for place, decode in decoders if decode is not None),
        fetch=attrgetter(*(spec.name for spec in specs)),
    )


_MAPPINGS: dict[type[Any], Mapping[Any]] = {kind: _mapping(kind, table) for kind, table in TABLES.items()}
