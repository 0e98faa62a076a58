"""How many hold each piece: one counter per piece, the counters' digits kept as masks, so that all are changed and compared at once."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random


class Copies:
    """Counters. `_digits[k]` has bit i where the count of piece i has binary digit k."""

    def __init__(self) -> None:
        self._digits: list[int] = []

    def add(self, mask: int) -> None:
        """One copy more of each piece in the mask."""
        for k, digit in enumerate(self._digits):
            self._digits[k], mask = digit ^ mask, digit & mask
        if mask:
            self._digits.append(mask)

    def remove(self, mask: int) -> None:
        """One copy less of each piece in the mask; each was added before."""
        for k, digit in enumerate(self._digits):
            self._digits[k], mask = digit ^ mask, ~digit & mask

    def rarest(self, mask: int) -> int:
        """Those pieces of the mask that fewest hold."""
        for digit in reversed(self._digits):
            mask = mask & ~digit or mask
        return mask

    def anywhere(self) -> int:
        """Pieces that anybody holds."""
        found = 0
        for digit in self._digits:
            found |= digit
        return found

    def of(self, piece: int) -> int:
        """How many hold one piece."""
        return sum((digit >> piece & 1) << k for k, digit in enumerate(self._digits))


def pick(mask: int, rng: Random) -> int:
    """The index of one set bit, each as likely; the mask is not 0."""
    rank = int(rng.random() * mask.bit_count())
    base = 0
    width = mask.bit_length()
    while width > 1:
        half = width >> 1
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if rank < count:
            mask, width = low, half
            continue
        rank -= count
        mask >>= half
        base += half
        width -= half
    return base


def indices(mask: int) -> Iterator[int]:
    """The set bits, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
