"""What changed between two versions of a shard: positions, and wrapped differences of words.

Differences are exact in unsigned arithmetic whatever the bits mean, so -0, infinities and NaN payloads need no care.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from p2p.codec.words import WordKind, Words

MOST_CHANGES = 1 << 21  # in one part: bounds the memory of both ends, whatever the density
LEAST_ELEMENTS = 1 << 20  # in a part that is not the last: bounds how many there are

Positions = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Changes:
    """Positions, strictly increasing, and what is added there."""

    positions: Positions
    differences: Words

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [start, stop) of a shard, and the changes among them, counted from `start`."""

    start: int
    stop: int
    changes: Changes


def find(base: Words, new: Words) -> Iterator[Part]:
    """The parts of a shard, in order. The arrays of a part are good until the next one is asked for."""
    from p2p.codec import scan_loops

    whole = base.nbytes // 8 * 8 // base.itemsize
    base8, new8 = base[:whole].view("<u8"), new[:whole].view("<u8")
    room = min(MOST_CHANGES, len(base) + 8)  # a group of eight bytes is taken whole or left to the next part
    positions, differences = np.empty(room, np.uint32), np.empty(room, base.dtype)
    start = 0
    while start < len(base):
        stop, found = scan_loops.collect(base, new, base8, new8, start, positions, differences)
        yield Part(start, stop, Changes(positions[:found], differences[:found]))
        start = stop


def add(target: Words, part: Part) -> None:
    """Apply a part's changes to a shard's words in place."""
    from p2p.codec import scan_loops

    scan_loops.add(target[part.start : part.stop], part.changes.positions, part.changes.differences)


def subtract(target: Words, part: Part) -> None:
    """Undo `add`."""
    from p2p.codec import scan_loops

    scan_loops.subtract(target[part.start : part.stop], part.changes.positions, part.changes.differences)


def joined(parts: Iterable[Part], kind: WordKind) -> Changes:
    """The changes of all parts, with positions counted from the start of the shard."""
    positions, differences = [np.empty(0, np.uint32)], [np.empty(0, kind.dtype)]
    for part in parts:
        positions.append(part.changes.positions + np.uint32(part.start))
        differences.append(np.array(part.changes.differences))
    return Changes(np.concatenate(positions), np.concatenate(differences))


def between(base: Words, new: Words, kind: WordKind) -> Changes:
    """Every change of a shard."""
    return joined(find(base, new), kind)
