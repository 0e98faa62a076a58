"""One shard's record in a delta: its mode, its blob, and the way from one version of the shard to the next and back."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from p2p.codec import changes, planes
from p2p.codec.changes import LEAST_ELEMENTS, MOST_CHANGES, Changes, Part
from p2p.codec.dense import encode_dense, locate_dense
from p2p.codec.frames import Blob
from p2p.codec.gaps import encode_fast, encode_grouped, locate_fast, locate_grouped
from p2p.codec.layout import Bytes, Chunk, Shard, view
from p2p.codec.pieces import Reader
from p2p.codec.words import WordKind, Words, kind_of
from p2p.errors import ApplyFailed

RAW, PACKED, FULL, UNCHANGED, FAST, GROUPED, DENSE = range(7)  # the first three as in `planes`
HEADER = planes.RECORD  # mode, elements, blob bytes
PART = struct.Struct("<III")  # words covered, changes, body bytes

EncodePart = Callable[[WordKind, Words, Changes], bytes]
Choose = Callable[[WordKind, Words, Part], int]  # the mode for a shard, from a part and its words in the base
LocatePart = Callable[[WordKind, Words, int, Blob], Changes]
_ENCODERS: Mapping[int, EncodePart] = MappingProxyType({FAST: encode_fast, GROUPED: encode_grouped, DENSE: encode_dense})
_LOCATORS: Mapping[int, LocatePart] = MappingProxyType({FAST: locate_fast, GROUPED: locate_grouped, DENSE: locate_dense})


@dataclass(frozen=True, slots=True)
class Record:
    """How a shard of one version follows from the same shard of another."""

    mode: int
    blob: Chunk

    def chunks(self, shard: Shard) -> Iterator[Chunk]:
        """The record as it travels."""
        yield HEADER.pack(self.mode, shard.elements, view(self.blob).nbytes)
        if view(self.blob).nbytes:
            yield self.blob


def read(reader: Reader, shard: Shard, place: str) -> Record:
    """The next record of a stream. Raises ApplyFailed if it is not one of this shard; nothing is allocated beyond the shard's size."""
    mode, elements, length = HEADER.unpack(reader.take(HEADER.size, place))
    if elements != shard.elements or length > shard.nbytes:
        raise ApplyFailed(
            f"{place} declares {elements} elements in {length} bytes; {shard.elements} in at most {shard.nbytes} are due"
        )
    if mode > DENSE:
        raise ApplyFailed(f"{place} has mode {mode}; known are 0 to {DENSE}: update this program")
    return Record(mode, reader.take(length, place))


def encode(shard: Shard, base: Bytes, new: Bytes, choose: Choose) -> Record:
    """The record of a shard; FAST, GROUPED or DENSE is chosen by the first part that has changes. Never longer than the shard."""
    kind = kind_of(shard.dtype)
    old, words = kind.words(base), kind.words(new)
    bodies: list[bytes] = []
    chosen = changed = 0
    for part in changes.find(old, words):
        body = b""
        if len(part.changes):
            held = old[part.start : part.stop]
            chosen = chosen or choose(kind, held, part)
            body = _ENCODERS[chosen](kind, held, part.changes)
        bodies += [PART.pack(part.stop - part.start, len(part.changes), len(body)), body]
        changed += len(part.changes)
    if not changed:
        return Record(UNCHANGED, b"")
    size = sum(len(body) for body in bodies)
    if size < shard.nbytes // 2:
        return Record(chosen, b"".join(bodies))
    full, blobs = planes.smallest(shard, new)
    if size <= sum(len(blob) for blob in blobs):
        return Record(chosen, b"".join(bodies))
    return Record(full, blobs[0] if len(blobs) == 1 else b"".join(view(blob) for blob in blobs))


def decode(shard: Shard, record: Record, base: Bytes, place: str) -> Bytes:
    """The shard's new bytes. Raises ApplyFailed for a record that is damaged or, where that shows, made from another base."""
    if record.mode in planes.DECODERS:
        return planes.DECODERS[record.mode](shard, bytes(view(record.blob)), place)
    result = np.array(base)
    kind = kind_of(shard.dtype)
    for part in locate(shard, record, base, place):
        changes.add(result.view(kind.dtype), part)
    return result


def locate(shard: Shard, record: Record, base: Bytes, place: str) -> Iterator[Part]:
    """The changes that a record of mode UNCHANGED, FAST, GROUPED or DENSE makes to the base; FAST does not look at the base's bits."""
    blob = Blob(record.blob, place)
    if record.mode != UNCHANGED:
        kind = kind_of(shard.dtype)
        words = kind.words(base)
        start = 0
        while start < len(words):
            covered, count, length = _part_fields(blob, len(words) - start)
            body = Blob(blob.take(length), place)
            if count:
                located = _LOCATORS[record.mode](kind, words[start : start + covered], count, body)
                yield Part(start, start + covered, located)
            body.finish()
            start += covered
    blob.finish()


def _part_fields(blob: Blob, left: int) -> tuple[int, int, int]:
    """Words covered, changes, body bytes of the next part."""
    covered, count, length = blob.unpack(PART)
    if not min(left, LEAST_ELEMENTS) <= covered <= left:
        raise ApplyFailed(f"{blob.place} has a part of {covered} words; {min(left, LEAST_ELEMENTS)} to {left} are due")
    if count > min(covered, MOST_CHANGES):
        raise ApplyFailed(f"{blob.place} declares {count} changes in {covered} words; at most {min(covered, MOST_CHANGES)} may be")
    return covered, count, length
