"""Compiled loops over a shard: find what changed, change it, and tell how far changes lie apart within their class.

Arrays of words are read-only unless a loop writes them. Positions count from the start of the part. Loops that read what a
stranger sent return a negative status instead of a count; no index is used before it was compared with its limit.
"""

# ruff: noqa: PLR0913 (compiled loops take plain arrays and integers)
from __future__ import annotations

from typing import Any

import numpy as np

from p2p.codec.jit import compiled

BEYOND = -1  # a position lies past the last element
INCOMPLETE = -2  # the elements end before the changes do
OVERSIZED = -3  # a change is no sign and magnitude of the word's width

NEVER = 1 << 62


@compiled
def collect(base: Any, new: Any, base8: Any, new8: Any, start: Any, positions: Any, differences: Any) -> tuple[Any, Any]:
    """Changed elements from `start` on, until the arrays are full: (the next element, changes found). `*8`: the same bytes by eight."""
    apiece = 8 // base.itemsize
    group, found = start // apiece, 0
    while group < base8.size:
        if base8[group] != new8[group]:
            if found + apiece > positions.size:
                return group * apiece, found
            for i in range(group * apiece, (group + 1) * apiece):
                if base[i] != new[i]:
                    positions[found] = i - start
                    differences[found] = new[i] - base[i]
                    found += 1
        group += 1
    tail = max(start, base8.size * apiece)
    if found + base.size - tail > positions.size:
        return tail, found
    for i in range(tail, base.size):
        if base[i] != new[i]:
            positions[found] = i - start
            differences[found] = new[i] - base[i]
            found += 1
    return base.size, found


@compiled
def add(words: Any, positions: Any, differences: Any) -> None:
    """Add the differences in place; they wrap."""
    for j in range(positions.size):
        words[positions[j]] += differences[j]


@compiled
def subtract(words: Any, positions: Any, differences: Any) -> None:
    """Undo `add`."""
    for j in range(positions.size):
        words[positions[j]] -= differences[j]


@compiled
def gaps_between(positions: Any, gaps: Any) -> None:
    """Unchanged elements before each position, since the one before it."""
    after = np.int64(0)
    for j in range(positions.size):
        gaps[j] = positions[j] - after
        after = np.int64(positions[j]) + 1


@compiled
def positions_from(gaps: Any, elements: Any, positions: Any) -> Any:
    """The inverse of `gaps_between`: 0, or BEYOND."""
    at = np.int64(-1)
    for j in range(gaps.size):
        at += np.int64(gaps[j]) + 1
        if at >= elements:
            return BEYOND
        positions[j] = at
    return 0


@compiled
def split_differences(differences: Any, bits: Any, signs: Any, gaps: Any, magnitudes: Any) -> Any:
    """Sign bits (first in the lowest bit), and the changes that are not ±1: how many follow another, and magnitude - 2. Returns their number."""
    mask = np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits)
    found, since = 0, 0
    for j in range(differences.size):
        value = np.uint64(differences[j])
        negative = value >> np.uint64(bits - 1)
        if negative:
            value = (np.uint64(0) - value) & mask
        signs[j >> 3] |= np.uint8(negative << np.uint64(j & 7))
        if value == 1:
            since += 1
            continue
        gaps[found] = since
        magnitudes[found] = value - np.uint64(2)
        found, since = found + 1, 0
    return found


@compiled
def join_differences(signs: Any, gaps: Any, magnitudes: Any, bits: Any, differences: Any) -> Any:
    """The inverse of `split_differences`: 0, or BEYOND, or OVERSIZED."""
    largest = np.uint64(1) << np.uint64(bits - 1)
    differences[:] = 1
    at = np.int64(-1)
    for j in range(gaps.size):
        at += np.int64(gaps[j]) + 1
        if at >= differences.size:
            return BEYOND
        if np.uint64(magnitudes[j]) > largest - np.uint64(2):
            return OVERSIZED
        differences[at] = np.uint64(magnitudes[j]) + np.uint64(2)
    for j in range(differences.size):
        if (signs[j >> 3] >> (j & 7)) & 1:
            differences[j] = np.uint64(0) - np.uint64(differences[j])
    return 0


@compiled
def class_gaps(
    words: Any, positions: Any, shift: Any, mask: Any, cut: Any, since: Any, classes: Any, gaps: Any, counts: Any
) -> None:
    """Class of each change (its exponent below `cut`, else `cut`), and unchanged elements of that class before it; counts by class."""
    small, large_after, i = 0, 0, 0
    for j in range(positions.size):
        stop = np.int64(positions[j])
        while i < stop:
            exponent = np.int64((words[i] >> shift) & mask)
            if exponent < cut:
                since[exponent] += 1
                small += 1
            i += 1
        exponent = np.int64((words[i] >> shift) & mask)
        if exponent < cut:
            gaps[j] = since[exponent]
            since[exponent] = 0
            small += 1
        else:
            exponent = cut
            gaps[j] = i - small - large_after
            large_after = i - small + 1
        classes[j] = exponent
        counts[exponent] += 1
        i += 1


@compiled
def by_class(classes: Any, starts: Any, gaps: Any, differences: Any, sorted_gaps: Any, sorted_differences: Any) -> None:
    """Put changes class by class, in natural order within one; `starts` is used up."""
    for j in range(classes.size):
        at = starts[classes[j]]
        starts[classes[j]] = at + 1
        sorted_gaps[at] = gaps[j]
        sorted_differences[at] = differences[j]


@compiled
def locate_by_class(
    words: Any, shift: Any, mask: Any, at: Any, ends: Any, left: Any, gaps: Any, differences: Any, positions: Any, ordered: Any
) -> Any:
    """Positions and differences in natural order, from gaps class by class: class c's stand from at[c] to ends[c], the last class is the rest.

    0, or INCOMPLETE when the words hold fewer elements of a class than its gaps walk over. `at` and `left` are used up.
    """
    cut = ends.size - 1
    for c in range(cut + 1):
        left[c] = np.int64(gaps[at[c]]) if at[c] < ends[c] else NEVER
    large_left, found, i = left[cut], 0, 0
    while i < words.size and found < positions.size:
        exponent = np.int64((words[i] >> shift) & mask)
        if exponent < cut:
            if left[exponent] > 0:
                left[exponent] -= 1
                i += 1
                continue
        else:
            if large_left > 0:
                large_left -= 1
                i += 1
                continue
            exponent = cut
        source = at[exponent]
        positions[found] = i
        ordered[found] = differences[source]
        at[exponent] = source + 1
        following = np.int64(gaps[source + 1]) if source + 1 < ends[exponent] else NEVER
        if exponent < cut:
            left[exponent] = following
        else:
            large_left = following
        found += 1
        i += 1
    return 0 if found == positions.size else INCOMPLETE
