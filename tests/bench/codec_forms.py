"""Wire forms of a bf16 delta as others publish them, re-implemented here to stand beside ours in one harness.

Named after the systems whose form they follow; none of their code is used. A form turns two shards of 16-bit words into bytes
(`encode`) and changes a copy of the base in place (`apply`). Sparse forms find changes in blocks and send absolute values.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
import zstandard
from numpy.typing import NDArray

Words = NDArray[np.uint16]
Positions = NDArray[np.int64]
BLOCK = 1 << 18
GAP_LIMIT = 1 << 16
COUNT = struct.Struct("<I")


class Form(Protocol):
    """A way to send what changed in a shard."""

    def encode(self, base: Words, new: Words) -> bytes:
        """The bytes that go over the wire."""
        ...

    def apply(self, words: Words, blob: bytes) -> None:
        """Turn the base in `words` into the new shard, in place."""
        ...


def changed(base: Words, new: Words) -> Positions:
    """Positions of words that differ."""
    found = [np.flatnonzero(base[at : at + BLOCK] != new[at : at + BLOCK]) + at for at in range(0, len(base), BLOCK)]
    return np.concatenate(found)


class Trl:
    """TRL: int32 index and bf16 value of every change."""

    def encode(self, base: Words, new: Words) -> bytes:
        at = changed(base, new)
        return COUNT.pack(len(at)) + at.astype("<i4").tobytes() + new[at].tobytes()

    def apply(self, words: Words, blob: bytes) -> None:
        (count,) = COUNT.unpack_from(blob)
        at = np.frombuffer(blob, "<i4", count, COUNT.size)
        words[at] = np.frombuffer(blob, "<u2", count, COUNT.size + 4 * count)


class Slime:
    """slime: 16-bit gaps through zstd-1, bf16 values as they are. Gaps beyond 16 bits are bridged by unchanged elements."""

    def encode(self, base: Words, new: Words) -> bytes:
        at = _bridged(changed(base, new))
        gaps = (np.diff(at, prepend=-1) - 1).astype("<u2")
        return _joined([_packed(gaps.tobytes(), 1), new[at].tobytes()])

    def apply(self, words: Words, blob: bytes) -> None:
        gaps, values = _parts(blob)
        at = np.cumsum(np.frombuffer(_unpacked(gaps), "<u2").astype(np.int64) + 1) - 1
        words[at] = np.frombuffer(values, "<u2")


class Pulse:
    """PULSE: byte planes of gaps and of values, each through zstd-1."""

    def encode(self, base: Words, new: Words) -> bytes:
        at = changed(base, new)
        gaps = (np.diff(at, prepend=-1) - 1).astype("<u4").view(np.uint8).reshape(-1, 4)
        values = new[at].view(np.uint8).reshape(-1, 2)
        used = [gaps[:, plane] for plane in range(4) if plane == 0 or gaps[:, plane].any()]
        return _joined([_packed(plane.tobytes(), 1) for plane in (values[:, 0], values[:, 1], *used)])

    def apply(self, words: Words, blob: bytes) -> None:
        low, high, *planes = [np.frombuffer(_unpacked(part), np.uint8) for part in _parts(blob)]
        gaps = np.zeros(len(low), np.int64)
        for number, plane in enumerate(planes):
            gaps |= plane.astype(np.int64) << (8 * number)
        words[np.cumsum(gaps + 1) - 1] = low | high.astype(np.uint16) << np.uint16(8)


class SparrowRl:
    """SparrowRL: LEB128 gaps, bf16 values."""

    def encode(self, base: Words, new: Words) -> bytes:
        at = changed(base, new)
        return _joined([_leb128(np.diff(at, prepend=-1) - 1), new[at].tobytes()])

    def apply(self, words: Words, blob: bytes) -> None:
        gaps, values = _parts(blob)
        words[np.cumsum(_from_leb128(gaps) + 1) - 1] = np.frombuffer(values, "<u2")


class XorZstd:
    """XOR of all words through zstd."""

    def __init__(self, level: int) -> None:
        self._level = level

    def encode(self, base: Words, new: Words) -> bytes:
        return _packed((base ^ new).tobytes(), self._level)

    def apply(self, words: Words, blob: bytes) -> None:
        words ^= np.frombuffer(_unpacked(blob), "<u2")


class XorSplitZstd:
    """XOR, low bytes and high bytes apart, each through zstd."""

    def __init__(self, level: int) -> None:
        self._level = level

    def encode(self, base: Words, new: Words) -> bytes:
        planes = (base ^ new).view(np.uint8).reshape(-1, 2)
        return _joined([_packed(planes[:, plane].tobytes(), self._level) for plane in (0, 1)])

    def apply(self, words: Words, blob: bytes) -> None:
        low, high = (np.frombuffer(_unpacked(part), np.uint8) for part in _parts(blob))
        words ^= low | high.astype(np.uint16) << np.uint16(8)


class XorBlosc2:
    """XOR through blosc2's byte shuffle and zstd-1."""

    def encode(self, base: Words, new: Words) -> bytes:
        import blosc2

        blosc2.set_nthreads(1)
        filters = {"filter": blosc2.Filter.SHUFFLE, "codec": blosc2.Codec.ZSTD}
        return bytes(blosc2.compress((base ^ new).tobytes(), typesize=2, clevel=1, **filters))

    def apply(self, words: Words, blob: bytes) -> None:
        import blosc2

        words ^= np.frombuffer(blosc2.decompress(blob), "<u2")


class XorZipnn:
    """XOR through ZipNN as bfloat16."""

    def encode(self, base: Words, new: Words) -> bytes:
        return bytes(_zipnn().compress(bytearray((base ^ new).tobytes())))

    def apply(self, words: Words, blob: bytes) -> None:
        words ^= np.frombuffer(bytes(_zipnn().decompress(bytearray(blob))), "<u2")


SLIME = "slime form"
COMPETITORS: Mapping[str, Form] = MappingProxyType(
    {
        SLIME: Slime(),
        "TRL form": Trl(),
        "PULSE form": Pulse(),
        "SparrowRL form": SparrowRl(),
        "xor zstd-1": XorZstd(1),
        "xor zstd-3": XorZstd(3),
        "xor byte split zstd-1": XorSplitZstd(1),
        "xor blosc2 shuffle": XorBlosc2(),
        "xor zipnn": XorZipnn(),
    }
)
PACKAGES: Mapping[str, str] = MappingProxyType({"xor blosc2 shuffle": "blosc2", "xor zipnn": "zipnn"})  # what a form needs


def _zipnn() -> Any:
    import zipnn

    return zipnn.ZipNN(method="HUFFMAN", input_format="byte", bytearray_dtype="bfloat16", threads=1)


def _packed(data: bytes, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level).compress(data)


def _unpacked(frame: bytes | memoryview) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame)


def _joined(parts: Sequence[bytes]) -> bytes:
    """Parts behind their number and lengths."""
    return bytes([len(parts)]) + b"".join(COUNT.pack(len(part)) for part in parts) + b"".join(parts)


def _parts(blob: bytes) -> list[memoryview]:
    at = 1 + COUNT.size * blob[0]
    found = []
    for number in range(blob[0]):
        (length,) = COUNT.unpack_from(blob, 1 + COUNT.size * number)
        found.append(memoryview(blob)[at : at + length])
        at += length
    return found


def _bridged(at: Positions) -> Positions:
    """Positions with others put in between, so that no gap passes 16 bits."""
    before = np.concatenate([[-1], at[:-1]]) if len(at) else at
    wide = np.flatnonzero(at - before > GAP_LIMIT)
    bridges = [np.arange(before[i] + GAP_LIMIT, at[i], GAP_LIMIT) for i in wide]
    return np.sort(np.concatenate([at, *bridges])) if bridges else at


def _leb128(values: Positions) -> bytes:
    """Seven bits a byte, low first, the eighth says that more follow."""
    lengths = np.ones(len(values), np.int64)
    for bits in (7, 14, 21, 28):
        lengths += values >= 1 << bits
    ends = np.cumsum(lengths)
    out = np.zeros(int(ends[-1]) if len(ends) else 0, np.uint8)
    for number in range(5):
        chosen = np.flatnonzero(lengths > number)
        byte = (values[chosen] >> (7 * number)) & 0x7F
        more = lengths[chosen] > number + 1
        out[ends[chosen] - lengths[chosen] + number] = byte | (more.astype(np.int64) << 7)
    return out.tobytes()


def _from_leb128(data: memoryview) -> Positions:
    coded = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(coded < 0x80)
    starts = np.concatenate([[0], ends[:-1] + 1]) if len(ends) else ends
    values = np.zeros(len(ends), np.int64)
    for number in range(int((ends - starts).max(initial=-1)) + 1):
        chosen = np.flatnonzero(ends - starts >= number)
        values[chosen] |= (coded[starts[chosen] + number].astype(np.int64) & 0x7F) << (7 * number)
    return values
