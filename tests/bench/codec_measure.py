"""What the codec bench measures: sizes against the entropy bound, speed with hashing, scaling over two threads, memory.

Every form runs in a forked process of its own, so that one's memory, caches and compiled code do not meet another's.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import re
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from tests.bench.codec_forms import Form, Words

Pair = tuple[Words, Words]  # base and new version of a shard
THREADS = 2
LEAST_SECONDS, MOST_REPEATS = 0.1, 50  # short actions are repeated more often than asked, for so long a repeat


@dataclass(frozen=True, slots=True)
class Case:
    """A delta: its shards."""

    name: str
    pairs: Sequence[Pair]

    @property
    def elements(self) -> int:
        """Words in all shards."""
        return sum(len(base) for base, _ in self.pairs)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a delta holds, whatever the form."""

    elements: int
    changed: float  # share
    single: float  # share of the changes that are +-1
    bound: float  # bytes an element


def facts(case: Case) -> Facts:
    """Shares, and the bound: the entropy of every element's wrapped change given the exponent of its base, shard by shard.

    A coder that adapts to differences between tensors may end a little below it.
    """
    bits = changed = single = 0.0
    for base, new in case.pairs:
        difference = new - base
        at = np.flatnonzero(difference)
        changes, exponents = difference[at], (base[at] >> 7) & 0xFF
        everyone = np.bincount((base >> 7) & 0xFF, minlength=256)
        moved = np.bincount(exponents, minlength=256)
        kinds = np.unique(exponents.astype(np.uint32) << 16 | changes, return_counts=True)[1]
        bits += _plogp(everyone) - _plogp(everyone - moved) - _plogp(kinds)
        changed += len(at)
        single += int(np.count_nonzero((changes == 1) | (changes == 0xFFFF)))
    return Facts(case.elements, changed / case.elements, single / max(1.0, changed), bits / 8 / case.elements)


def _plogp(counts: np.ndarray[Any, np.dtype[Any]]) -> float:
    """Sum of n log2 n."""
    held = counts[counts > 0].astype(np.float64)
    return float((held * np.log2(held)).sum())


def sizes(form: Form, case: Case) -> dict[str, float]:
    """Bytes an element, decode-checked; in a process of its own."""
    return _apart(lambda: {"bytes_per_param": sum(map(len, _checked(form, case))) / case.elements})


def figures(form: Form, case: Case, repeats: int) -> dict[str, float]:
    """Sizes, GB/s of model bytes (CPU time and wall, median), two-thread scaling, peak memory; in a process of its own.

    Speeds include BLAKE3 of the blob and of the new shard at both ends: what a publisher and a worker do. Applying is in place.
    """
    return _apart(lambda: _figures(form, case, repeats))


def _figures(form: Form, case: Case, repeats: int) -> dict[str, float]:
    blobs = _checked(form, case)  # also warms caches and compiles
    gigabytes = 2 * case.elements / 1e9
    found = {"bytes_per_param": sum(map(len, blobs)) / case.elements}
    held = [[base.copy() for base, _ in case.pairs] for _ in range(THREADS)]

    def encode(_: int = 0) -> None:
        for base, new in case.pairs:
            blake3(form.encode(base, new)).digest()
            _hash(new)

    def apply(number: int = 0) -> None:
        for words, blob in zip(held[number], blobs, strict=True):
            blake3(blob).digest()
            form.apply(words, blob)
            _hash(words)

    def restore() -> None:
        for copies in held:
            for words, (base, _) in zip(copies, case.pairs, strict=True):
                words[:] = base

    for name, action in (("encode", encode), ("apply", apply)):
        found[f"{name}_peak_mb"] = _peak(action, restore) / 1e6
        cpu, wall = _median(action, restore, repeats)
        found[f"{name}_gb_s_cpu"], found[f"{name}_gb_s_wall"] = gigabytes / cpu, gigabytes / wall
        found[f"{name}_two_threads"] = THREADS * wall / _threaded_median(action, restore, repeats)
    return found


def _hash(words: Words) -> bytes:
    return blake3(words.view(np.uint8).data).digest()


def _checked(form: Form, case: Case) -> list[bytes]:
    """Every shard's blob; each gives the new shard back, or this raises."""
    blobs = []
    for number, (base, new) in enumerate(case.pairs):
        blob = form.encode(base, new)
        words = base.copy()
        form.apply(words, blob)
        if not np.array_equal(words, new):
            raise AssertionError(f"{case.name}: shard {number} is not what was encoded")
        blobs.append(blob)
    return blobs


def _median(action: Callable[[], None], restore: Callable[[], None], repeats: int) -> tuple[float, float]:
    """CPU and wall seconds."""
    taken: list[tuple[float, float]] = []
    while not _enough([wall for _, wall in taken], repeats):
        restore()
        cpu, wall = time.process_time(), time.perf_counter()
        action()
        taken.append((time.process_time() - cpu, time.perf_counter() - wall))
    return statistics.median(cpu for cpu, _ in taken), statistics.median(wall for _, wall in taken)


def _threaded_median(action: Callable[[int], None], restore: Callable[[], None], repeats: int) -> float:
    """Wall seconds of two threads that each do the whole action."""
    taken: list[float] = []
    while not _enough(taken, repeats):
        restore()
        threads = [threading.Thread(target=action, args=(number,)) for number in range(THREADS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def _enough(taken: Sequence[float], repeats: int) -> bool:
    return len(taken) >= repeats and (sum(taken) >= repeats * LEAST_SECONDS or len(taken) >= MOST_REPEATS)


def _peak(action: Callable[[], None], restore: Callable[[], None]) -> int:
    """Bytes of resident memory that the action takes at its highest, beyond what was there before."""
    restore()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier runs freed must be taken anew
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    action()
    return max(0, _status("VmHWM") - before)


def _status(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def _apart(action: Callable[[], dict[str, float]]) -> dict[str, float]:
    """The result of an action in a forked process. Raises what it raised, as text."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_report, args=(action, theirs))
    process.start()
    theirs.close()
    try:
        result = ours.recv()
    except EOFError:
        raise RuntimeError("the measuring process died without a word") from None
    finally:
        process.join()
    if isinstance(result, str):
        raise RuntimeError(result)
    return dict(result)


def _report(action: Callable[[], dict[str, float]], pipe: Connection) -> None:
    try:
        pipe.send(action())
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")
