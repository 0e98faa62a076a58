"""Exponent planes: what makes a full snapshot of 16-bit floats a third smaller, losslessly.

Only the exponents of weights compress. Rotating each element left by one bit puts the sign last, so that the high byte holds
the exponent (all eight bits of a bf16, five bits and three of mantissa of an fp16). That plane goes through zstd with
match finding turned down, which leaves its Huffman stage: 1.334 bytes a parameter, near the order-0 bound. The low plane is noise and is stored.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from p2p.codec import frames
from p2p.codec.layout import Bytes, Chunk, Shard
from p2p.codec.pieces import Reader
from p2p.errors import ApplyFailed

STORED, PACKED, PLANES = 0, 1, 2
FLOATS_16 = frozenset({"BF16", "F16"})
RECORD = struct.Struct("<BII")  # mode, elements, blob bytes
BLOCK = 1 << 18  # elements turned at once: fits the cache


def encode(shards: Iterable[tuple[Shard, Bytes]]) -> Iterator[Chunk]:
    """Records of the shards, in order: header, blob. One shard is in memory at a time."""
    for shard, data in shards:
        mode, blobs = smallest(shard, data)
        yield RECORD.pack(mode, shard.elements, sum(len(blob) for blob in blobs))
        yield from blobs


def decode(chunks: Iterable[Chunk], plan: Sequence[Shard]) -> Iterator[Bytes]:
    """The bytes of the planned shards, in order. Raises ApplyFailed at the first record that does not fit the plan."""
    reader = Reader(chunks)
    for number, shard in enumerate(plan):
        place = f"shard {number}"
        mode, elements, length = RECORD.unpack(reader.take(RECORD.size, place))
        if elements != shard.elements or length > shard.nbytes:
            raise ApplyFailed(
                f"{place} declares {elements} elements in {length} bytes; {shard.elements} in at most {shard.nbytes} are due"
            )
        decoder = DECODERS.get(mode)
        if decoder is None:
            raise ApplyFailed(f"{place} has mode {mode}; known are {sorted(DECODERS)}: update this program")
        yield decoder(shard, reader.take(length, place), place)
    reader.finish()


def split(data: Bytes) -> tuple[Bytes, Bytes]:
    """High and low plane of 16-bit elements rotated left by one bit."""
    words = data.view("<u2")
    high, low = np.empty(len(words), np.uint8), np.empty(len(words), np.uint8)
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        stop = start + len(block)
        np.right_shift(block, 7, out=high[start:stop], casting="unsafe")
        low[start:stop] = (block << np.uint16(1)) | (block >> np.uint16(15))
    return high, low


def join(high: Bytes, low: Bytes) -> Bytes:
    """The inverse of `split`."""
    words = np.empty(len(high), "<u2")
    for start in range(0, len(words), BLOCK):
        stop = start + BLOCK
        upper, lower = high[start:stop].astype(np.uint16), low[start:stop].astype(np.uint16)
        words[start:stop] = (upper << np.uint16(7)) | (lower >> np.uint16(1)) | (lower << np.uint16(15))
    return words.view(np.uint8)


def smallest(shard: Shard, data: Bytes) -> tuple[int, list[bytes | Bytes]]:
    """The mode that takes the fewest bytes, and its blob in parts."""
    data = np.ascontiguousarray(data)
    if shard.dtype in FLOATS_16:
        high, low = split(data)
        packed = frames.huffman(high)
        if len(packed) + len(low) < shard.nbytes:
            return PLANES, [packed, low]
        return STORED, [data]
    packed = frames.packed(data)
    return (PACKED, [packed]) if len(packed) < shard.nbytes else (STORED, [data])


def _stored(shard: Shard, blob: bytes, place: str) -> Bytes:
    if len(blob) != shard.nbytes:
        raise ApplyFailed(f"{place} stores {len(blob)} bytes; {shard.nbytes} are due")
    return np.frombuffer(blob, np.uint8)


def _packed(shard: Shard, blob: bytes, place: str) -> Bytes:
    return frames.unpack(blob, shard.nbytes, place)


def _planes(shard: Shard, blob: bytes, place: str) -> Bytes:
    count = shard.elements
    if shard.dtype not in FLOATS_16 or len(blob) < count:
        raise ApplyFailed(
            f"{place} claims planes: {shard.dtype} must be one of {sorted(FLOATS_16)} and the blob hold {count} bytes or more"
        )
    view = memoryview(blob)
    return join(frames.unpack(view[: len(blob) - count], count, place), np.frombuffer(view[len(blob) - count :], np.uint8))


DECODERS: Mapping[int, Callable[[Shard, bytes, str], Bytes]] = MappingProxyType({STORED: _stored, PACKED: _packed, PLANES: _planes})
