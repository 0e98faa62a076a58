"""The encoding `delta`: one record a shard, each from the same shard of the base version. See `records` for what a record holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from p2p.codec import changes, records
from p2p.codec.changes import Changes, Part
from p2p.codec.effort import MODES, Effort, chooser
from p2p.codec.layout import Base, Bytes, Chunk, Shard
from p2p.codec.pieces import Reader
from p2p.codec.records import Record
from p2p.codec.words import Words, kind_of
from p2p.errors import ApplyFailed

LINK_BYTES_PER_S = 12_500_000.0  # 100 Mbit/s


@dataclass(frozen=True, slots=True)
class Delta:
    """What a publisher may choose; whatever it was, every `Delta` decodes it.

    `effort`: fast, grouped and dense take more time and fewer bytes in this order; auto takes for each shard what is through
    first, given a link of `link_bytes_per_s` and `cores` that encode.
    """

    effort: Effort = "auto"
    link_bytes_per_s: float = LINK_BYTES_PER_S
    cores: int = 1

    def encode(self, shards: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:
        """The edge's bytes. One shard and its record are in memory at a time."""
        held = _needed(base)
        for shard, new in shards:
            yield from self.record(shard, held(shard), new).chunks(shard)

    def record(self, shard: Shard, base: Bytes, new: Bytes) -> Record:
        """The record of one shard. Safe to call in several threads at once; most of it runs without the interpreter's lock."""
        if base.nbytes != shard.nbytes or new.nbytes != shard.nbytes:
            raise ApplyFailed(f"a shard of {shard.nbytes} bytes was given {new.nbytes} new bytes and a base of {base.nbytes}")
        return records.encode(shard, base, new, chooser(self.effort, self.link_bytes_per_s, self.cores))

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:
        """The new bytes of the planned shards, in order. Raises ApplyFailed; never yields more than the plan declares."""
        held = _needed(base)
        for place, shard, record in read_records(chunks, plan):
            yield new_bytes(shard, record, held(shard), place)


def read_records(chunks: Iterable[Chunk], plan: Sequence[Shard]) -> Iterator[tuple[str, Shard, Record]]:
    """The records of an edge with their shards and places, and nothing after them. Raises ApplyFailed."""
    reader = Reader(chunks)
    for number, shard in enumerate(plan):
        place = f"shard {number}"
        yield place, shard, records.read(reader, shard, place)
    reader.finish()


def new_bytes(shard: Shard, record: Record, base: Bytes, place: str) -> Bytes:
    """The shard after a record. Raises ApplyFailed."""
    if base.nbytes != shard.nbytes:
        raise ApplyFailed(f"{place} of the base holds {base.nbytes} bytes; {shard.nbytes} are due")
    return records.decode(shard, record, base, place)


def apply(shard: Shard, record: Record, held: Bytes, place: str) -> Changes:
    """Bring a writable host copy of the shard to the next version in place; returns what `undo` takes.

    Decoded whole before the first bit changes: after ApplyFailed, `held` is as it was. The changes' positions are also what a
    sparse loader wants: values = words[positions].
    """
    found = located(shard, record, held, place)
    changes.add(*_whole(shard, held, found))
    return found


def undo(shard: Shard, done: Changes, held: Bytes) -> None:
    """Take `apply` back."""
    changes.subtract(*_whole(shard, held, done))


def located(shard: Shard, record: Record, base: Bytes, place: str) -> Changes:
    """What a record of any mode changes in the base. Raises ApplyFailed."""
    if base.nbytes != shard.nbytes:
        raise ApplyFailed(f"{place} of the base holds {base.nbytes} bytes; {shard.nbytes} are due")
    if record.mode > records.FULL:
        return changes.joined(records.locate(shard, record, base, place), kind_of(shard.dtype))
    kind = kind_of(shard.dtype)
    return changes.between(kind.words(base), kind.words(records.decode(shard, record, base, place)), kind)


def warm_up(dtypes: Iterable[str]) -> None:
    """Compile the loops for shards of these dtypes: seconds on a machine that never did, nothing where they are kept."""
    for dtype in dtypes:
        base = np.zeros(64, np.uint8)
        new = np.arange(64, dtype=np.uint8)
        shard = Shard(dtype, 0, base.nbytes, ())
        for effort in MODES:
            new_bytes(shard, Delta(effort).record(shard, base, new), base, dtype)


def _whole(shard: Shard, held: Bytes, found: Changes) -> tuple[Words, Part]:
    words = held.view(kind_of(shard.dtype).dtype)
    return words, Part(0, len(words), found)


def _needed(base: Base | None) -> Base:
    if base is None:
        raise ApplyFailed("a delta needs its base version: choose a keyframe")
    return base
