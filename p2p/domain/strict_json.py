"""JSON from strangers, read without surprises: no duplicate keys, no floats, no NaN, integers of bounded length.

The readers below check one value each; every complaint names the place, the value and what is allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

MAX_DIGITS = 18
SHOWN = 80
T = TypeVar("T")


class JsonRefused(Exception):
    """The text is not what it must be; the message says where and why."""


def parse(text: str, *, limit: int) -> Any:
    """The value of `text`, at most `limit` characters. Raises JsonRefused."""
    if len(text) > limit:
        raise JsonRefused(f"it holds {len(text)} characters, above the limit of {limit}")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_no_number,
            parse_constant=_no_number,
        )
    except (ValueError, RecursionError) as error:
        raise JsonRefused(f"it is not JSON: {error}") from error


def canonical(value: object) -> str:
    """The one spelling: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def refuse(place: str, value: object, wanted: str) -> NoReturn:
    """Raise JsonRefused for `value` (shown shortened)."""
    shown = repr(value)
    raise JsonRefused(f"{place} is {shown[:SHOWN] + '...' if len(shown) > SHOWN else shown}; it must be {wanted}")


def integer(value: object, place: str, *, least: int, most: int) -> int:
    """`value` if it is an integer within bounds (a bool is not)."""
    if type(value) is not int or not least <= value <= most:
        refuse(place, value, f"an integer from {least} to {most}")
    return value


def text(value: object, place: str, pattern: re.Pattern[str]) -> str:
    """`value` if it is a string that matches `pattern` whole."""
    if not isinstance(value, str) or not pattern.fullmatch(value):
        refuse(place, value, f"text that matches {pattern.pattern}")
    return value


def array(value: object, place: str, *, most: int) -> list[Any]:
    """`value` if it is an array of at most `most` entries."""
    if not isinstance(value, list):
        refuse(place, value, "an array")
    if len(value) > most:
        raise JsonRefused(f"{place} holds {len(value)} entries; at most {most} are allowed")
    return value


def table(value: object, place: str, *, most: int) -> dict[str, Any]:
    """`value` if it is an object of at most `most` entries."""
    if not isinstance(value, dict):
        refuse(place, value, "an object")
    if len(value) > most:
        raise JsonRefused(f"{place} holds {len(value)} entries; at most {most} are allowed")
    return value


def record(value: object, place: str, keys: frozenset[str]) -> dict[str, Any]:
    """`value` if it is an object with exactly these keys."""
    fields = table(value, place, most=len(keys) + 1)
    if fields.keys() != keys:
        missing, unknown = sorted(keys - fields.keys()), sorted(fields.keys() - keys)
        raise JsonRefused(f"{place} must have the keys {sorted(keys)}; missing {missing}, unknown {unknown[:4]}")
    return fields


def each(values: list[Any], place: str, read: Callable[[object, str], T]) -> tuple[T, ...]:
    """`read` over an array, with the index in the place."""
    return tuple(read(value, f"{place}[{index}]") for index, value in enumerate(values))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("an object repeats a key")
    return value


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; at most {MAX_DIGITS} are allowed")
    return int(digits)


def _no_number(spelling: str) -> NoReturn:
    raise ValueError(f"the number {spelling[:20]!r}: only integers are allowed")
