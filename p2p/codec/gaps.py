"""The fast and the grouped coding of a part: byte planes of gaps through zstd's Huffman stage, one sign bit a change, and exceptions.

Fast counts gaps along all elements. Grouped takes the elements with the smallest exponents (below a cut, told by the base
that both ends hold) class by class: a step moves many more of them, so each class has gaps of its own size.
"""

from __future__ import annotations

import struct

import numpy as np
from numpy.typing import NDArray

from p2p.codec import frames
from p2p.codec.changes import Changes
from p2p.codec.frames import Blob
from p2p.codec.layout import Bytes
from p2p.codec.words import WordKind, Words
from p2p.errors import ApplyFailed

STREAMS = struct.Struct("<IBBB")  # exceptions; planes of gaps, of the exceptions' gaps, of magnitudes
LENGTH = struct.Struct("<I")
GROUPS = struct.Struct("<BB")  # cut, classes listed
GROUP = struct.Struct("<BI")  # class, its changes
SMALL_SHARE = 16  # the elements below the cut are at most one in so many
_SAMPLE = 61

Gaps = NDArray[np.uint32]


def encode_fast(kind: WordKind, words: Words, changes: Changes) -> bytes:  # noqa: ARG001
    """Body of a part; it does not depend on the base."""
    from p2p.codec import scan_loops

    gaps = np.empty(len(changes), np.uint32)
    scan_loops.gaps_between(changes.positions, gaps)
    return b"".join(_put_streams(kind, gaps, changes.differences))


def locate_fast(kind: WordKind, words: Words, count: int, blob: Blob) -> Changes:
    """The changes that a body names. Raises ApplyFailed."""
    from p2p.codec import scan_loops

    gaps, differences = _take_streams(kind, count, blob)
    positions = np.empty(count, np.uint32)
    if scan_loops.positions_from(gaps, len(words), positions) < 0:
        raise ApplyFailed(f"{blob.place} names a position past the {len(words)} elements of its part")
    return Changes(positions, differences)


def encode_grouped(kind: WordKind, words: Words, changes: Changes) -> bytes:
    """Body of a part, given the base's words."""
    from p2p.codec import scan_loops

    cut = pick_cut(kind, words)
    classes, gaps = np.empty(len(changes), np.uint8), np.empty(len(changes), np.uint32)
    counts = np.zeros(cut + 1, np.int64)
    scan_loops.class_gaps(words, changes.positions, *kind.exponent, cut, np.zeros(cut, np.int64), classes, gaps, counts)
    starts = np.cumsum(counts) - counts
    sorted_gaps, sorted_differences = np.empty_like(gaps), np.empty_like(changes.differences)
    scan_loops.by_class(classes, starts, gaps, changes.differences, sorted_gaps, sorted_differences)
    listed = np.flatnonzero(counts[:cut])
    parts = [GROUPS.pack(cut, len(listed)), *(GROUP.pack(c, counts[c]) for c in listed)]
    small = len(changes) - int(counts[cut])
    for group in (slice(0, small), slice(small, len(changes))):
        if group.start < group.stop:
            parts += _put_streams(kind, sorted_gaps[group], sorted_differences[group])
    return b"".join(parts)


def locate_grouped(kind: WordKind, words: Words, count: int, blob: Blob) -> Changes:
    """The changes that a body names, given the base's words. Raises ApplyFailed."""
    from p2p.codec import scan_loops

    counts = _take_counts(kind, count, blob)
    small = int(counts[:-1].sum())
    gaps, differences = np.empty(count, np.uint32), np.empty(count, kind.dtype)
    for group in (slice(0, small), slice(small, count)):
        if group.start < group.stop:
            gaps[group], differences[group] = _take_streams(kind, group.stop - group.start, blob)
    ends = np.cumsum(counts)
    positions, ordered = np.empty(count, np.uint32), np.empty(count, kind.dtype)
    status = scan_loops.locate_by_class(
        words, *kind.exponent, ends - counts, ends, np.empty_like(ends), gaps, differences, positions, ordered
    )
    if status < 0:
        raise ApplyFailed(f"{blob.place} names changes past the last element of their class: made from another base, or damaged")
    return Changes(positions, ordered)


def pick_cut(kind: WordKind, words: Words) -> int:
    """The largest exponent with at most one in SMALL_SHARE elements below it, by a sample; 0 if there is none."""
    shift, mask = kind.exponent
    sample = (words[::_SAMPLE] >> shift) & mask
    below = np.bincount(sample.astype(np.uint8), minlength=kind.classes).cumsum()
    return int(np.searchsorted(below, below[-1] / SMALL_SHARE))


def _take_counts(kind: WordKind, count: int, blob: Blob) -> NDArray[np.int64]:
    """Changes by class below the cut, then the rest; they sum to `count`."""
    cut, listed = blob.unpack(GROUPS)
    if cut >= kind.classes:
        raise ApplyFailed(f"{blob.place} cuts at exponent {cut}; its words have exponents below {kind.classes}")
    counts = np.zeros(cut + 1, np.int64)
    last = -1
    for _ in range(listed):
        exponent, changes = blob.unpack(GROUP)
        if not last < exponent < cut:
            raise ApplyFailed(f"{blob.place} lists exponent {exponent} after {last} with the cut at {cut}: they must increase")
        counts[exponent] = changes
        last = exponent
    counts[cut] = count - int(counts.sum())
    if counts[cut] < 0:
        raise ApplyFailed(f"{blob.place} lists {count - int(counts[cut])} changes by class; its part has {count}")
    return counts


def _put_streams(kind: WordKind, gaps: Gaps, differences: Words) -> list[bytes]:
    """Gaps and differences of one group as fields, frame lengths, frames, sign bits."""
    from p2p.codec import scan_loops

    count = len(gaps)
    signs = np.zeros((count + 7) // 8, np.uint8)
    between, magnitudes = np.empty(count, np.uint32), np.empty(count, kind.dtype)
    found = scan_loops.split_differences(differences, kind.bits, signs, between, magnitudes)
    groups = [_put_planes(values) for values in (gaps, between[:found], magnitudes[:found])]
    held = [frame for group in groups for frame in group]
    lengths = b"".join(LENGTH.pack(len(frame)) for frame in held)
    return [STREAMS.pack(found, *map(len, groups)), lengths, *held, signs.tobytes()]


def _take_streams(kind: WordKind, count: int, blob: Blob) -> tuple[Gaps, Words]:
    """The inverse of `_put_streams`, for `count` changes (at least one)."""
    from p2p.codec import scan_loops

    exceptions, *planes = blob.unpack(STREAMS)
    if exceptions > count or planes[0] > 4 or planes[1] > 4 or planes[2] > kind.nbytes:
        raise ApplyFailed(f"{blob.place} declares {exceptions} exceptions in {planes} planes for {count} changes")
    lengths = [blob.unpack(LENGTH)[0] for _ in range(sum(planes))]
    gaps = _take_planes(blob, lengths[: planes[0]], count, np.dtype("<u4"))
    between = _take_planes(blob, lengths[planes[0] : planes[0] + planes[1]], exceptions, np.dtype("<u4"))
    magnitudes = _take_planes(blob, lengths[planes[0] + planes[1] :], exceptions, kind.dtype)
    signs = np.frombuffer(blob.take((count + 7) // 8), np.uint8)
    differences: Words = np.empty(count, kind.dtype)
    if scan_loops.join_differences(signs, between, magnitudes, kind.bits, differences) < 0:
        raise ApplyFailed(f"{blob.place} names exceptions beyond its {count} changes, or magnitudes beyond {kind.bits} bits")
    return gaps, differences


def _put_planes(values: Words) -> list[bytes]:
    """Byte planes from the lowest, as many as the largest value has bytes, one frame each."""
    used = (int(values.max()).bit_length() + 7) // 8 if len(values) else 0
    columns = values.view(np.uint8).reshape(-1, values.itemsize)
    return [frames.huffman(columns[:, plane]) for plane in range(used)]


def _take_planes(blob: Blob, lengths: list[int], count: int, dtype: np.dtype[np.unsignedinteger]) -> Words:
    """The inverse of `_put_planes`."""
    columns: Bytes = np.zeros((count, dtype.itemsize), np.uint8)
    for plane, length in enumerate(lengths):
        columns[:, plane] = blob.frame(length, count)
    return columns.reshape(-1).view(dtype)
