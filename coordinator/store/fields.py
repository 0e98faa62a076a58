"""How each field of a row's dataclass is stored, from its type alone.

The mapper and the tables both start here, so that a field added to `domain.model` needs a migration and nothing else.
"""

from __future__ import annotations

import dataclasses
from enum import Enum, StrEnum
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel


class Storage(Enum):
    """The column type behind a field."""

    TEXT = "text"
    INTEGER = "integer"  # 64 bits
    REAL = "real"  # 64 bits
    BOOLEAN = "boolean"
    STATE = "state"  # a StrEnum, by value
    TUPLE = "tuple"  # JSON array
    DICT = "dict"  # JSON object
    MODEL = "model"  # a pydantic model, as JSON


JSON_STORAGES = frozenset({Storage.TUPLE, Storage.DICT, Storage.MODEL})
_PLAIN = {str: Storage.TEXT, int: Storage.INTEGER, float: Storage.REAL, bool: Storage.BOOLEAN}
_CONTAINERS = {tuple: Storage.TUPLE, dict: Storage.DICT}


@dataclasses.dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field. `type` is the type without None."""

    name: str
    storage: Storage
    nullable: bool
    type: Any


def fields_of(kind: type[Any]) -> tuple[FieldSpec, ...]:
    """The fields of a dataclass in order. Raises TypeError for one whose type has no column."""
    hints = get_type_hints(kind)
    return tuple(_spec(kind, field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _spec(kind: type[Any], name: str, hint: Any) -> FieldSpec:
    inner, nullable = _without_none(hint)
    storage = _storage(inner)
    if storage is None:
        raise TypeError(f"{kind.__name__}.{name} has type {hint}, which no column holds: add it to coordinator/store/fields.py")
    return FieldSpec(name, storage, nullable, inner)


def _without_none(hint: Any) -> tuple[Any, bool]:
    if get_origin(hint) not in (Union, UnionType):
        return hint, False
    rest = [part for part in get_args(hint) if part is not NoneType]
    return (rest[0], True) if len(rest) == 1 else (hint, False)


def _storage(inner: Any) -> Storage | None:
    if inner in _PLAIN:
        return _PLAIN[inner]
    if (origin := get_origin(inner)) in _CONTAINERS:
        return _CONTAINERS[origin]
    if isinstance(inner, type) and issubclass(inner, StrEnum):
        return Storage.STATE
    if isinstance(inner, type) and issubclass(inner, BaseModel):
        return Storage.MODEL
    return None
