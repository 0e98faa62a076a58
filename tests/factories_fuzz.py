"""How tests damage what honest senders send, and what they hold readers to: little time, bounded memory, words in one line."""

from __future__ import annotations

import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.errors import SwarmError

MOST_S = 2.0  # of this thread's own CPU, for what takes milliseconds
SLACK = 4 << 20


def scaled(quick: int, long: int = 10_000) -> Any:
    """How many cases: a few always, all of them with --long."""
    return pytest.mark.parametrize("cases", [quick, pytest.param(long, marks=pytest.mark.long)])


def fuzz(cases: int, *strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], None]:
    """Run the decorated check on so many draws."""
    plan = settings(max_examples=cases, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    return lambda check: plan(given(*strategies)(check))()


@contextmanager
def bounded(declared: int = 0) -> Iterator[None]:
    """Little time, and no more memory than what the reader may hold of `declared` bytes."""
    begun = time.thread_time()
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert time.thread_time() - begun < MOST_S
    assert peak < declared + SLACK, f"{peak} bytes for {declared} declared"


def in_one_line(error: SwarmError) -> None:
    """Words that tell a person something, fit a log line, and cannot steer a terminal."""
    words = str(error)
    assert 10 < len(words) < 4000
    assert "\n" not in words
    assert "\x1b" not in words


# --- how documents are damaged

COUNTS = [0, 1, 2, 127, 255, 256, 2**16 - 1, 2**20, 2**31 - 1, 2**32 - 1]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """Bits flipped, bytes cut out, doubled, moved, put in, or a number written over a few; one to four of these."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        how = draw(st.integers(0, 6))
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.integers(1, 40))
        if how == 0 and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif how == 1:
            del data[at : at + length]
        elif how == 2:
            data[at:at] = data[at : at + length]
        elif how == 3:
            data[at:at] = draw(st.binary(min_size=1, max_size=12))
        elif how == 4:
            data[at : at + 4] = draw(st.sampled_from(COUNTS)).to_bytes(4, "little")
        elif how == 5:
            to = draw(st.integers(0, max(len(data) - 1, 0)))
            data[at : at + length], data[to : to + length] = data[to : to + length], data[at : at + length]
        else:
            del data[at:]
    return bytes(data)


STRANGE: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2**31,
    2**53 + 1,
    10**17,
    10**30,
    0.5,
    "",
    "x",
    "../../etc/passwd",
    "/etc/passwd",
    "C:\\x",
    "a\0b",
    "a\n",
    "ü",
    "\ud800",
    "ab" * 32,
    "AB" * 32,
    "0" * 5000,
    [],
    {},
    [[[[[[[[]]]]]]]],
    [None] * 9,
    {"x": 1},
]


@st.composite
def restructured(draw: st.DrawFn, text: str) -> str:
    """A JSON document of which some values are others, are gone, come twice, or change places; spelled canonically or not."""
    value = json.loads(text)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        places = list(_places(value))
        if not places:
            break
        _change(draw, places)
    spelled = json.dumps(value, sort_keys=True, separators=(",", ":"))
    match draw(st.integers(0, 11)):
        case 0:
            return json.dumps(value)
        case 1 if isinstance(value, dict) and value:  # a key twice
            key = draw(st.sampled_from(sorted(value)))
            return f"{spelled[:-1]},{json.dumps(key)}:{json.dumps(value[key])}}}"
    return spelled


def _change(draw: st.DrawFn, places: list[tuple[Any, Any]]) -> None:
    """One value, in place."""
    holder, key = places[draw(st.integers(0, len(places) - 1))]
    old = holder[key]
    alike = [other[at] for other, at in places if type(other[at]) is type(old)]
    match draw(st.integers(0, 7)):
        case 0:
            holder[key] = deepcopy(draw(st.sampled_from(STRANGE)))
        case 1:
            del holder[key]
        case 2 if isinstance(holder, list):
            holder.insert(key, deepcopy(old))
        case 3 if isinstance(holder, list):
            other = draw(st.integers(0, len(holder) - 1))
            holder[key], holder[other] = holder[other], holder[key]
        case 4 if isinstance(holder, dict):
            holder[draw(st.sampled_from(["extra", "../x", "", "format", "__proto__"]))] = deepcopy(old)
        case 5 if len(alike) > 1:  # a value that is right elsewhere
            holder[key] = deepcopy(alike[draw(st.integers(0, len(alike) - 1))])
        case _ if type(old) is int:
            holder[key] = old + draw(st.sampled_from([-1, 1, 1 << 20]))
        case _:
            holder[key] = deepcopy(draw(st.sampled_from(STRANGE)))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    for key in keys:
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])


def texts(text: str) -> st.SearchStrategy[str]:
    """Damaged by bytes or, twice as often, by structure."""
    whole = restructured(text)
    return damaged(text.encode()).map(lambda data: data.decode("utf-8", "replace")) | whole | whole


def plain(text: str | bytes) -> Any:
    """The value of a JSON text that an accepting reader may have read: no key is there twice."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len({key for key, _ in pairs}) == len(pairs), "a key came twice"
        return dict(pairs)

    return json.loads(text, object_pairs_hook=once)


def is_canonical(text: str) -> bool:
    return json.dumps(plain(text), sort_keys=True, separators=(",", ":")) == text
