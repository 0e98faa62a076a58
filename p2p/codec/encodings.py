"""The encodings an edge may have, behind one interface: shards in, chunks out, and back.

A delta encoding reads `base`, the same shard of the base version; a keyframe is given None and ignores it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import numpy as np

from p2p.codec import planes
from p2p.codec.delta import Delta
from p2p.codec.layout import Base, Bytes, Chunk, Shard
from p2p.codec.lowrank import LowRank
from p2p.codec.pieces import Reader

__all__ = ["ENCODINGS", "Base", "Delta", "Encoding", "LowRank", "Planes", "Raw"]


class Encoding(Protocol):
    """Pure and streaming: memory is bounded by a few shards. Lossless, bit for bit."""

    def encode(self, shards: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:
        """The edge's bytes for shards in layout order."""
        ...

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:
        """The bytes of each planned shard in order. Raises ApplyFailed; never yields more than the plan declares."""
        ...


class Raw:
    """The tensor bytes as they are, in layout order: what a receiver without a codec reads."""

    def encode(self, shards: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:  # noqa: ARG002
        return (data for _, data in shards)

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:  # noqa: ARG002
        reader = Reader(chunks)
        for number, shard in enumerate(plan):
            yield np.frombuffer(reader.take(shard.nbytes, f"shard {number}"), np.uint8)
        reader.finish()


class Planes:
    """Exponent planes for 16-bit floats, zstd or stored for the rest: see `planes`."""

    def encode(self, shards: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:  # noqa: ARG002
        return planes.encode(shards)

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:  # noqa: ARG002
        return planes.decode(chunks, plan)


ENCODINGS: Mapping[str, Encoding] = MappingProxyType({"raw": Raw(), "planes": Planes(), "delta": Delta(), "lowrank": LowRank()})
