"""The compiled loop of the low-rank coding: bf16 words become round(word + scale · up · down), the same bits on every machine.

Float32 in a fixed order: for each element, products are added for k = 0, 1, 2 …, then the sum is multiplied by the scale, then the word is
added, then the result is rounded to bf16, ties to even. numba compiles it without fastmath, so LLVM neither reorders nor fuses what stands
here; products of bf16 numbers are exact in float32 anyway. PROTOCOL.md section 5 says the limits that keep everything clear of
subnormal numbers, which some threads flush to zero.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from p2p.codec.jit import compiled

SIGN_OFF = 0x7FFFFFFF
FAINT = (127 - 100) << 23  # float32 bits of 2^-100: a smaller word counts as nothing where something is added to it
HALF = 0x7FFF  # of a unit in the last place of a bf16, less one
NOT_A_NUMBER = 0x7FC0


@compiled
def added(word: Any, change: Any) -> Any:
    """A bf16 word plus a float32 number, rounded to bf16, ties to even; the word itself where the number is zero."""
    wide = np.uint32(np.uint32(word) << np.uint32(16))
    is_faint = np.uint32(wide & np.uint32(SIGN_OFF)) < np.uint32(FAINT)
    old = np.uint32(np.uint32(0) if is_faint else wide)
    value = np.float32(old.view(np.float32) + change)
    bits = value.view(np.uint32)
    odd = np.uint32(np.uint32(bits >> np.uint32(16)) & np.uint32(1))
    rounded = np.uint32(np.uint32(bits + np.uint32(HALF) + odd) >> np.uint32(16))
    if value != value:  # noqa: PLR0124 (not a number: its payload differs between processors)
        rounded = np.uint32(NOT_A_NUMBER)
    if change == np.float32(0.0):
        rounded = np.uint32(word)
    return np.uint16(rounded)


@compiled
def merge(words: Any, first: Any, columns: Any, up: Any, down: Any, scale: Any, sums: Any) -> None:
    """Merge into the words in place: elements of a row-major matrix of so many columns, from element `first` on.

    `up` [rows, r] and `down` [r, columns] are float32; `sums` is room for a few columns, at least one.
    """
    rank = down.shape[0]
    at = 0
    while at < words.size:
        row = (first + at) // columns
        column = (first + at) - row * columns
        count = min(columns - column, words.size - at, sums.size)
        for j in range(count):
            sums[j] = np.float32(0.0)
        k = 0
        while k + 4 <= rank:  # four at a time spare loads and stores; the order of the additions is the same
            u0, u1, u2, u3 = up[row, k], up[row, k + 1], up[row, k + 2], up[row, k + 3]
            for j in range(count):
                # Unsigned: an index that might be negative keeps LLVM from whole registers.
                place = np.uint64(column) + np.uint64(j)
                total = sums[j] + u0 * down[k, place]
                total = total + u1 * down[k + 1, place]
                total = total + u2 * down[k + 2, place]
                sums[j] = total + u3 * down[k + 3, place]
            k += 4
        while k < rank:
            u0 = up[row, k]
            for j in range(count):
                sums[j] = sums[j] + u0 * down[k, np.uint64(column) + np.uint64(j)]
            k += 1
        for j in range(count):
            place = np.uint64(at) + np.uint64(j)
            words[place] = added(words[place], scale * sums[j])
        at += count
