"""What the tests of the delta codec are made with: real versions, shards of any dtype, and the entropy bound, all without the codec."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from p2p.codec.layout import Bytes, Shard

DATA = Path(__file__).parent / "data" / "deltas"
XOR_WITH = {"w1_v07": "w1_v06", "w1_v14": "w1_v06", "w3_v06": "w1_v06", "w3_v07": "w3_v06", "w3_v14": "w3_v06"}
ELEMENTS = 1 << 21


@functools.cache
def version(name: str) -> NDArray[np.uint16]:
    """A real version's bits; see tests/data/deltas/README.md."""
    other = XOR_WITH.get(name)
    path = DATA / (f"{name}.u16.zst" if other is None else f"{name}.xor.zst")
    plain = zstandard.ZstdDecompressor().decompress(path.read_bytes())
    bits = np.frombuffer(plain, "<u2")
    assert len(bits) == ELEMENTS
    return bits if other is None else bits ^ version(other)


def shard_of(dtype: str, data: NDArray[Any]) -> tuple[Shard, Bytes]:
    """A shard of these bits alone, and its bytes."""
    flat = data.reshape(-1).view(np.uint8)
    return Shard(dtype, 0, flat.nbytes, ()), flat


def real_shard(name: str) -> tuple[Shard, Bytes]:
    """A real version as one bf16 shard."""
    return shard_of("BF16", version(name))


def exponent_bound(base: NDArray[np.uint16], new: NDArray[np.uint16]) -> float:
    """Bytes that no code can beat which knows each bf16 element's base exponent and nothing more about it."""
    changed = base != new
    signed = (new - base).astype(np.uint16).view(np.int16)
    bits = 0.0
    exponents = (base >> 7) & 0xFF
    for exponent in np.unique(exponents):
        members = exponents == exponent
        bits += _entropy(np.bincount(changed[members]))
        bits += _entropy(np.unique(signed[members & changed], return_counts=True)[1])
    return bits / 8


def _entropy(counts: NDArray[np.int64]) -> float:
    """Bits of a sequence with these counts, at its order-0 entropy."""
    some = counts[counts > 0]
    return float((some * np.log2(some.sum() / some)).sum()) if len(some) else 0.0
