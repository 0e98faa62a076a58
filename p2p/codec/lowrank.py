"""The encoding `lowrank`: the bf16 factors of the adapters that make one version out of another, tensor by tensor.

An edge of this kind is as large as its factors, however much the weights changed and however long ago the base was. What the factors
mean bit by bit is `lowrank_loops`; the learner's publications are made by the same loop, so decoding gives their very bits.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from p2p.codec import planes
from p2p.codec.layout import Base, Bytes, Chunk, Shard, view
from p2p.codec.pieces import Reader
from p2p.codec.records import HEADER, UNCHANGED
from p2p.domain.lowrank import DTYPE, fits
from p2p.domain.manifest import Tensor
from p2p.errors import ApplyFailed

HEAD = struct.Struct("<If")  # rank, scale
MAX_RANK = 1024
MAX_SCALE = float(1 << 16)
MIN_SCALE = 2.0**-10
COLUMNS = 2048  # summed at once: a row of sums and four of factors stay in the fastest cache

# Exponents of factors, as bf16 and float32 hold them. From LARGE on they are refused, below FAINT they count as zero: so no product
# or sum overflows or falls among the subnormal numbers.
LARGE = 127 + 48
FAINT = 127 - 48

Halves = NDArray[np.uint16]  # bf16 bits
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Factors:
    """An adapter of a matrix [rows, columns]: bf16 bits of `up` [rows, r] and `down` [r, columns]."""

    up: Halves
    down: Halves

    @property
    def rank(self) -> int:
        """The inner side of both."""
        return int(self.down.shape[0])


@dataclass(frozen=True, slots=True)
class LowRank:
    """What a publisher gives: the factors by tensor, and the scale that their product is multiplied by. A receiver gives nothing.

    `encode` also makes every shard from the base, and raises ApplyFailed at the first that is not the new one: what was told until then leads nowhere.
    """

    factors: Mapping[str, Factors] = field(default_factory=dict)
    scale: float = 1.0

    def encode(self, shards: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:
        """The edge's bytes. Raises ApplyFailed for factors that no receiver would take, or that do not make the new version."""
        held = _needed(base)
        yield self.head()
        for shard, new in shards:
            yield from self.records(shard)
            self.check(shard, held(shard), new)

    def head(self) -> bytes:
        """What stands before the records."""
        ranks = {one.rank for one in self.factors.values()} or {1}
        if len(ranks) > 1:
            raise ApplyFailed(f"the factors have ranks {sorted(ranks)}; an edge has one: send a delta")
        (rank,) = ranks
        _check_head(rank, self.scale)
        return HEAD.pack(rank, self.scale)

    def records(self, shard: Shard) -> Iterator[Chunk]:
        """The records of the tensors that begin in the shard."""
        for tensor in _beginning(shard):
            factors = self.factors.get(tensor.name)
            if factors is None:
                yield HEADER.pack(UNCHANGED, 0, 0)
                continue
            _check_fit(tensor, factors.rank, tensor.name)
            for bits, shape in zip((factors.down, factors.up), _shapes(tensor, factors.rank), strict=True):
                if bits.shape != shape:
                    raise ApplyFailed(f"a factor of {tensor.name!r} has shape {bits.shape}; {shape} is due")
                _check_bits(bits, tensor.name)
                yield from _packed(bits)

    def check(self, shard: Shard, base: Bytes, new: Bytes) -> None:
        """Return if the factors make the new shard from the base's. Safe in several threads at once."""
        if not np.array_equal(merged(shard, base, self.factors, self.scale), new):
            raise ApplyFailed(f"the factors do not make the shard at byte {shard.offset}: it has other bits")

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:
        """The new bytes of the planned shards, in order. Raises ApplyFailed; never yields more than the plan declares."""
        held = _needed(base)
        reader = Reader(chunks)
        rank, scale = HEAD.unpack(reader.take(HEAD.size, "the head"))
        _check_head(rank, scale)
        factors: dict[str, Factors] = {}
        for number, shard in enumerate(plan):
            for tensor in _beginning(shard):
                found = _read(reader, tensor, rank, f"shard {number}, tensor {tensor.name!r}")
                if found is not None:
                    factors[tensor.name] = found
            yield merged(shard, held(shard), factors, scale)
            for one in shard.slices:
                if one.stop == one.tensor.nbytes:
                    factors.pop(one.tensor.name, None)
        reader.finish()


def merged(shard: Shard, base: Bytes, factors: Mapping[str, Factors], scale: float) -> Bytes:
    """The shard after the factors: `base` itself where none of them touches it."""
    if base.nbytes != shard.nbytes:
        raise ApplyFailed(f"the shard at byte {shard.offset} of the base holds {base.nbytes} bytes; {shard.nbytes} are due")
    if not any(one.tensor.name in factors for one in shard.slices):
        return base
    result = np.array(base)
    offset = 0
    for one in shard.slices:
        length = one.stop - one.start
        if one.tensor.name in factors:
            words = result[offset : offset + length].view("<u2")
            merge_into(words, factors[one.tensor.name], scale, first=one.start // 2)
        offset += length
    return result


def merge_into(words: Halves, factors: Factors, scale: float, *, first: int = 0) -> None:
    """Add scale · up · down, in place, to bf16 words of a matrix in row-major order from element `first` on.

    Total: bits come out, the same ones everywhere, whatever the factors are. Runs without the interpreter's lock.
    """
    from p2p.codec import lowrank_loops

    columns = factors.down.shape[1]
    sums = np.empty(min(columns, COLUMNS), np.float32)
    lowrank_loops.merge(words, first, columns, widened(factors.up), widened(factors.down), np.float32(scale), sums)


def widened(bits: Halves) -> Floats:
    """bf16 bits as float32, faint ones as zero."""
    wide = bits.astype(np.uint32) << np.uint32(16)
    wide[_exponents(bits) < FAINT] = 0
    found: Floats = wide.view(np.float32)
    return found


def _exponents(bits: Halves) -> Halves:
    return (bits >> np.uint16(7)) & np.uint16(0xFF)


def _beginning(shard: Shard) -> Iterator[Tensor]:
    """Tensors whose first byte is in the shard."""
    return (one.tensor for one in shard.slices if one.start == 0)


def _shapes(tensor: Tensor, rank: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Of `down` and `up`."""
    rows, columns = tensor.shape
    return (rank, columns), (rows, rank)


def _packed(bits: Halves) -> Iterator[Chunk]:
    data = np.ascontiguousarray(bits).reshape(-1).view(np.uint8)
    mode, blobs = planes.smallest(Shard(DTYPE, 0, data.nbytes, ()), data)
    yield HEADER.pack(mode, bits.size, sum(view(blob).nbytes for blob in blobs))
    yield from blobs


def _read(reader: Reader, tensor: Tensor, rank: int, place: str) -> Factors | None:
    """The factors of a tensor, None if it has none. Raises ApplyFailed; nothing is allocated beyond the tensor's own size."""
    mode, elements, length = HEADER.unpack(reader.take(HEADER.size, place))
    if mode == UNCHANGED:
        if elements or length:
            raise ApplyFailed(f"{place} is unchanged and declares {elements} elements in {length} bytes; none are due")
        return None
    _check_fit(tensor, rank, place)
    down_shape, up_shape = _shapes(tensor, rank)
    down = _factor(reader, (mode, elements, length), down_shape, place)
    up = _factor(reader, HEADER.unpack(reader.take(HEADER.size, place)), up_shape, place)
    return Factors(up, down)


def _factor(reader: Reader, header: tuple[int, int, int], shape: tuple[int, int], place: str) -> Halves:
    mode, elements, length = header
    due = shape[0] * shape[1]
    if elements != due or length > 2 * due:
        raise ApplyFailed(f"{place} declares a factor of {elements} elements in {length} bytes; {due} in at most {2 * due} are due")
    decoder = planes.DECODERS.get(mode)
    if decoder is None:
        raise ApplyFailed(f"{place} has mode {mode}; known are {sorted(planes.DECODERS)} and {UNCHANGED}: update this program")
    bits: Halves = decoder(Shard(DTYPE, 0, 2 * due, ()), reader.take(length, place), place).view("<u2").reshape(shape)
    _check_bits(bits, place)
    return bits


def _check_head(rank: int, scale: float) -> None:
    if not 1 <= rank <= MAX_RANK:
        raise ApplyFailed(f"the head declares rank {rank}; 1 to {MAX_RANK} may be")
    if not MIN_SCALE <= scale <= MAX_SCALE:  # no comparison holds for what is no number
        raise ApplyFailed(f"the head declares scale {scale}; {MIN_SCALE:g} to {MAX_SCALE:g} may be")


def _check_fit(tensor: Tensor, rank: int, place: str) -> None:
    if not fits(tensor, rank):
        raise ApplyFailed(
            f"{place} has factors of rank {rank}; it is {tensor.dtype} {list(tensor.shape)}, and only {DTYPE} matrices that are no smaller than "
            "their factors may have some: send a delta"
        )


def _check_bits(bits: Halves, place: str) -> None:
    if bool((_exponents(bits) >= LARGE).any()):
        raise ApplyFailed(f"{place} has a factor with a number of 2^48 or more, or that is none: send a delta")


def _needed(base: Base | None) -> Base:
    if base is None:
        raise ApplyFailed("a low-rank edge needs its base version: choose a keyframe")
    return base
