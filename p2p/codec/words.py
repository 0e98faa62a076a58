"""Elements as unsigned words, and the class of a word: what the delta codec knows about a dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p.codec.layout import Bytes
from p2p.domain.dtypes import BITS

Words = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, slots=True)
class WordKind:
    """How a dtype's bytes are read: words of `bits`, whose class is the exponent (`classes` values, from bit `shift`).

    Kinds without an exponent have one class. A step of an optimiser has much the same size everywhere, a unit in the last place
    has not: how likely a word changes depends on its exponent.
    """

    bits: int
    shift: int = 0
    classes: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes a word takes."""
        return self.bits // 8

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """As numpy calls it: little-endian, unsigned."""
        return np.dtype(f"<u{self.nbytes}")

    @property
    def exponent(self) -> tuple[Any, Any]:
        """Shift and mask that give a word's class, as scalars of the word's type."""
        return self.dtype.type(self.shift), self.dtype.type(self.classes - 1)

    def words(self, data: Bytes) -> Words:
        """The bytes as words: a read-only view, or a copy where the bytes do not start aligned."""
        aligned = np.require(data, requirements=["C", "A"])
        if aligned.ctypes.data % self.nbytes:
            aligned = aligned.copy()
        found: Words = aligned.view(self.dtype)
        found.flags.writeable = False
        return found


_FLOATS: Mapping[str, WordKind] = MappingProxyType(
    {
        "BF16": WordKind(16, 7, 256),
        "F16": WordKind(16, 10, 32),
        "F32": WordKind(32, 23, 256),
        "C64": WordKind(32, 23, 256),  # pairs of F32
        "F8_E4M3": WordKind(8, 3, 16),
        "F8_E4M3FNUZ": WordKind(8, 3, 16),
        "F8_E5M2": WordKind(8, 2, 32),
        "F8_E5M2FNUZ": WordKind(8, 2, 32),
    }
)


def kind_of(dtype: str) -> WordKind:
    """How the delta codec reads a dtype; packed elements narrower than a byte are read as bytes."""
    return _FLOATS.get(dtype) or WordKind(max(8, BITS[dtype]))
