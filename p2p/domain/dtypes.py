"""Element types as safetensors spells them, with their width in bits."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

BITS: Mapping[str, int] = MappingProxyType(
    {
        "F4": 4,
        "F6_E2M3": 6,
        "F6_E3M2": 6,
        "BOOL": 8,
        "U8": 8,
        "I8": 8,
        "F8_E5M2": 8,
        "F8_E4M3": 8,
        "F8_E8M0": 8,
        "F8_E4M3FNUZ": 8,
        "F8_E5M2FNUZ": 8,
        "I16": 16,
        "U16": 16,
        "F16": 16,
        "BF16": 16,
        "I32": 32,
        "U32": 32,
        "F32": 32,
        "C64": 64,
        "F64": 64,
        "I64": 64,
        "U64": 64,
    }
)


def elements(shape: tuple[int, ...]) -> int:
    """How many elements a shape holds: 1 for a scalar, 0 if any side is 0."""
    count = 1
    for side in shape:
        count *= side
    return count


def whole_bytes(dtype: str, shape: tuple[int, ...]) -> int | None:
    """Bytes that a tensor takes; None when its bits do not fill whole bytes. Raises KeyError for an unknown dtype."""
    bits = elements(shape) * BITS[dtype]
    return None if bits % 8 else bits // 8
