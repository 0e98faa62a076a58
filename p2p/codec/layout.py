"""How a version's tensors lie one after another, and where that row of bytes is cut into shards.

Layout order is widest elements first, then dtype, then name: every tensor of a file starts aligned, and a shard never mixes
dtypes. Both ends derive the same shards from the manifest's tensors, so no table of them travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from p2p.domain.dtypes import BITS
from p2p.domain.manifest import Tensor

SHARD_ELEMENTS = 16 << 20

Bytes = NDArray[np.uint8]
Chunk = bytes | bytearray | memoryview | Bytes


def view(data: Chunk) -> memoryview:
    """The same bytes, as what C code and files take."""
    return data.data if isinstance(data, np.ndarray) else memoryview(data)


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes [start, stop) of a tensor."""

    tensor: Tensor
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Neighbouring bytes of one dtype: at most SHARD_ELEMENTS elements, from `offset` in layout order."""

    dtype: str
    offset: int
    nbytes: int
    slices: tuple[Slice, ...]

    @property
    def elements(self) -> int:
        """How many elements the bytes hold."""
        return self.nbytes * 8 // BITS[self.dtype]


Base = Callable[[Shard], Bytes]  # the same shard of a base version


def ordered(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors in layout order."""
    return sorted(tensors, key=lambda tensor: (-BITS[tensor.dtype], tensor.dtype, tensor.name))


def shards(tensors: Iterable[Tensor], *, most_elements: int = SHARD_ELEMENTS) -> list[Shard]:
    """The shards of a version, in layout order; tensors without bytes appear in none. `most_elements` is a multiple of 8."""
    cut: list[Shard] = []
    offset = 0
    for dtype, group in groupby(ordered(tensors), key=lambda tensor: tensor.dtype):
        for slices in _fill(list(group), most_elements * BITS[dtype] // 8):
            nbytes = sum(one.stop - one.start for one in slices)
            cut.append(Shard(dtype, offset, nbytes, tuple(slices)))
            offset += nbytes
    return cut


def gather(shard: Shard, read: Callable[[str], Bytes]) -> Bytes:
    """The shard's bytes, given the bytes of a tensor by name; without a copy if they lie within one tensor."""
    parts = [read(one.tensor.name)[one.start : one.stop] for one in shard.slices]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _fill(tensors: Sequence[Tensor], capacity: int) -> Iterator[list[Slice]]:
    """Cut a row of tensors every `capacity` bytes."""
    slices: list[Slice] = []
    room = capacity
    for tensor in tensors:
        start = 0
        while start < tensor.nbytes:
            stop = min(tensor.nbytes, start + room)
            slices.append(Slice(tensor, start, stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield slices
                slices, room = [], capacity
    if slices:
        yield slices
