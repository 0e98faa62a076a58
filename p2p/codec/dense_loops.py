"""Compiled loops of the dense mode: an adaptive binary range coder, and changes walked in natural order through it.

Integers only, so every machine decodes the same. The coder keeps a 64-bit interval [low, low + width), width at least 2^32, and
moves it 32 bits at a time. PROTOCOL.md section 5 says all of it byte by byte. numba keeps compiled code until this file
changes and looks at no other: all that the loops use stands here.
"""

# ruff: noqa: PLR0913 (compiled loops take plain arrays and integers)
from __future__ import annotations

from typing import Any

import numpy as np

from p2p.codec.jit import compiled

# Contexts of a class, in its row of ROW.
QUOTIENT = 0  # 3: is the quotient larger than 0, 1, 2 or more
REMAINDER = 3  # 3: the remainder's highest bit; the next one, by it
LARGER = 6  # 1: is the magnitude larger than 1
LENGTH = 7  # 16: is the number of further bits larger than 0, 1, ... 15 or more
MANTISSA = 23  # 8: the highest further bit, by their number
ROW = 32

UNARY_LIMIT = 20  # quotients from here on are coded as this and an Elias-gamma rest
MOST_GAP_BITS = 25
COUNT_BITS = 10
COUNT_LIMIT = 255  # a context's memory: the last 250 decisions or so
HALF = 1 << 31  # a context at birth: probability 1/2 in the upper 22 bits, no decisions seen in the lower 10
RATES = 131072 // (2 * np.arange(COUNT_LIMIT + 1) + 3)  # 65536 / (n + 1.5)
SPARE = 64  # words that one change or one first gap never exceeds

# Columns of the table that has a row a class.
FITTED, SINCE, FIRST_GAP, ELEMENTS, CHANGES, LAST, MET, MET_BEFORE, COLUMNS = range(9)

SHORT = -4  # the words end before the changes do
FOREIGN = -5  # a length that no encoder writes
FULL = -6  # the encoder's buffer is full
LONG = -7  # words are left after the last change
INCOMPLETE = -8  # the elements end before the changes do


@compiled
def adapt(contexts: Any, slot: Any, bit: Any) -> None:
    """Move a context's probability of a 1 towards the bit, by 1/(n + 1.5) after n decisions, by 1/256 in the end."""
    state = np.int64(contexts[slot])
    chance, seen = state >> COUNT_BITS, state & ((1 << COUNT_BITS) - 1)
    target = np.int64((1 << 22) - 1) if bit else np.int64(0)
    chance += ((target - chance) * RATES[seen]) >> 16
    if seen < COUNT_LIMIT:
        seen += 1
    contexts[slot] = (chance << COUNT_BITS) | seen


@compiled
def share(contexts: Any, slot: Any) -> Any:
    """The chance of a 1 as the coder takes it: 1 to 65535 in 65536."""
    chance: Any = np.int64(contexts[slot]) >> (COUNT_BITS + 6)
    return np.uint64(max(chance, 1))


@compiled
def carry(out: Any, at: Any) -> None:
    """Add one to the words already written."""
    at -= 1
    while out[at] == 0xFFFFFFFF:
        out[at] = 0
        at -= 1
    out[at] += 1


@compiled
def put_bit(bit: Any, contexts: Any, slot: Any, low: Any, width: Any, at: Any, out: Any) -> tuple[Any, Any, Any]:
    """Code a bit under a context, which learns it; returns the coder's new state."""
    split = (width >> np.uint64(16)) * share(contexts, slot)
    adapt(contexts, slot, bit)
    added = np.uint64(0) if bit else split
    width = split if bit else width - split
    low += added
    if low < added:
        carry(out, at)
    if width < np.uint64(1 << 32):
        out[at] = low >> np.uint64(32)
        at += 1
        low <<= np.uint64(32)
        width <<= np.uint64(32)
    return low, width, at


@compiled
def put_raw(value: Any, bits: Any, low: Any, width: Any, at: Any, out: Any) -> tuple[Any, Any, Any]:
    """Code the `bits` lowest bits of a value at even chances, sixteen at a time, highest first."""
    while bits > 0:
        step = min(bits, 16)
        bits -= step
        width >>= np.uint64(step)
        added = ((np.uint64(value) >> np.uint64(bits)) & np.uint64((1 << step) - 1)) * width
        low += added
        if low < added:
            carry(out, at)
        if width < np.uint64(1 << 32):
            out[at] = low >> np.uint64(32)
            at += 1
            low <<= np.uint64(32)
            width <<= np.uint64(32)
    return low, width, at


@compiled
def get_bit(contexts: Any, slot: Any, code: Any, width: Any, at: Any, words: Any) -> tuple[Any, Any, Any, Any]:
    """The inverse of `put_bit`: the bit, and the coder's new state. Past the end there are zeros; `at` tells."""
    split = (width >> np.uint64(16)) * share(contexts, slot)
    bit = 1 if code < split else 0
    code = code if bit else code - split
    width = split if bit else width - split
    adapt(contexts, slot, bit)
    if width < np.uint64(1 << 32):
        width <<= np.uint64(32)
        code = (code << np.uint64(32)) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
        at += 1
    return bit, code, width, at


@compiled
def get_raw(bits: Any, code: Any, width: Any, at: Any, words: Any) -> tuple[Any, Any, Any, int]:
    """The inverse of `put_raw`."""
    value = np.uint64(0)
    while bits > 0:
        step = min(bits, 16)
        bits -= step
        width >>= np.uint64(step)
        part = min(code // width, np.uint64((1 << step) - 1))
        code -= part * width
        value = (value << np.uint64(step)) | part
        if width < np.uint64(1 << 32):
            width <<= np.uint64(32)
            code = (code << np.uint64(32)) | (np.uint64(words[at]) if at < words.size else np.uint64(0))
            at += 1
    return value, code, width, at


@compiled
def bit_length(value: Any) -> Any:
    """Bits up to the highest one that is set."""
    length = 0
    while value:
        value >>= np.uint64(1)
        length += 1
    return length


@compiled
def put_gap(gap: Any, bits: Any, contexts: Any, row: Any, low: Any, width: Any, at: Any, out: Any) -> tuple[Any, Any, Any]:
    """Code a gap as quotient and remainder by 2^bits; a geometric gap leaves little for the contexts to learn."""
    quotient = gap >> bits
    for step in range(UNARY_LIMIT):
        more = 1 if quotient > step else 0
        low, width, at = put_bit(more, contexts, row + QUOTIENT + min(step, 2), low, width, at, out)
        if not more:
            break
    if quotient >= UNARY_LIMIT:
        rest = np.uint64(quotient - UNARY_LIMIT + 1)
        length = bit_length(rest) - 1
        low, width, at = put_raw(np.uint64(length), 5, low, width, at, out)
        low, width, at = put_raw(rest, length, low, width, at, out)
    slot = 0
    for level in range(min(bits, 2)):
        bit = (gap >> (bits - 1 - level)) & 1
        low, width, at = put_bit(bit, contexts, row + REMAINDER + slot, low, width, at, out)
        slot = 1 + bit
    return put_raw(np.uint64(gap), max(bits - 2, 0), low, width, at, out)


@compiled
def get_gap(bits: Any, contexts: Any, row: Any, code: Any, width: Any, at: Any, words: Any) -> tuple[Any, Any, Any, Any]:
    """The inverse of `put_gap`; FOREIGN instead of a gap that no shard holds."""
    quotient: Any = 0
    while quotient < UNARY_LIMIT:
        more, code, width, at = get_bit(contexts, row + QUOTIENT + min(quotient, 2), code, width, at, words)
        if not more:
            break
        quotient += 1
    if quotient == UNARY_LIMIT:
        length, code, width, at = get_raw(5, code, width, at, words)
        if np.int64(length) > MOST_GAP_BITS:
            return FOREIGN, code, width, at
        rest, code, width, at = get_raw(np.int64(length), code, width, at, words)
        quotient += np.int64(rest | (np.uint64(1) << length)) - 1
    gap, slot = quotient, 0
    for _ in range(min(bits, 2)):
        bit, code, width, at = get_bit(contexts, row + REMAINDER + slot, code, width, at, words)
        gap = (gap << 1) | bit
        slot = 1 + bit
    further = max(bits - 2, 0)
    rest, code, width, at = get_raw(further, code, width, at, words)
    return (gap << further) | np.int64(rest), code, width, at


@compiled
def put_difference(
    difference: Any, bits: Any, contexts: Any, row: Any, low: Any, width: Any, at: Any, out: Any
) -> tuple[Any, Any, Any]:
    """Code a word's wrapped difference: sign, then magnitude."""
    value = np.uint64(difference)
    negative = value >> np.uint64(bits - 1)
    low, width, at = put_raw(negative, 1, low, width, at, out)
    if negative:
        value = (np.uint64(0) - value) & (np.uint64(0xFFFFFFFFFFFFFFFF) >> np.uint64(64 - bits))
    over = value - np.uint64(1)
    low, width, at = put_bit(1 if over else 0, contexts, row + LARGER, low, width, at, out)
    if not over:
        return low, width, at
    length = bit_length(over) - 1
    for step in range(bits - 2):
        more = 1 if length > step else 0
        low, width, at = put_bit(more, contexts, row + LENGTH + min(step, 15), low, width, at, out)
        if not more:
            break
    if length > 0:
        bit = np.int64((over >> np.uint64(length - 1)) & np.uint64(1))
        low, width, at = put_bit(bit, contexts, row + MANTISSA + min(length, 8) - 1, low, width, at, out)
    return put_raw(over, max(length - 1, 0), low, width, at, out)


@compiled
def get_difference(bits: Any, contexts: Any, row: Any, code: Any, width: Any, at: Any, words: Any) -> tuple[Any, Any, Any, int]:
    """The inverse of `put_difference`; every stream is some difference."""
    negative, code, width, at = get_raw(1, code, width, at, words)
    larger, code, width, at = get_bit(contexts, row + LARGER, code, width, at, words)
    value = np.uint64(1)
    if larger:
        length = 0
        while length < bits - 2:
            more, code, width, at = get_bit(contexts, row + LENGTH + min(length, 15), code, width, at, words)
            if not more:
                break
            length += 1
        over = np.uint64(1)
        if length > 0:
            bit, code, width, at = get_bit(contexts, row + MANTISSA + min(length, 8) - 1, code, width, at, words)
            over = (over << np.uint64(1)) | np.uint64(bit)
        further = max(length - 1, 0)
        rest, code, width, at = get_raw(further, code, width, at, words)
        value = ((over << np.uint64(further)) | rest) + np.uint64(1)
    if negative:
        value = np.uint64(0) - value
    return value, code, width, at


@compiled
def following_gaps(words: Any, positions: Any, shift: Any, mask: Any, following: Any, table: Any) -> Any:
    """Per change, the unchanged elements of its class until the next change in the class (or the last change of all).

    Fills FIRST_GAP, ELEMENTS and CHANGES of the table's classes; MET and MET_BEFORE list, from row 0, the classes as they first
    occur and how many changes come before that. Returns how many classes occur.
    """
    met, j, i = 0, 0, 0
    while j < positions.size:
        c = np.int64((words[i] >> shift) & mask)
        table[c, ELEMENTS] += 1
        if table[c, ELEMENTS] == 1:
            table[met, MET] = c
            table[met, MET_BEFORE] = j
            table[c, LAST] = -1
            met += 1
        if i < positions[j]:
            table[c, SINCE] += 1
            i += 1
            continue
        if table[c, LAST] < 0:
            table[c, FIRST_GAP] = table[c, SINCE]
        else:
            following[table[c, LAST]] = table[c, SINCE]
        table[c, SINCE] = 0
        table[c, LAST] = j
        table[c, CHANGES] += 1
        i += 1
        j += 1
    for row in range(met):
        c = table[row, MET]
        if table[c, LAST] < 0:
            table[c, FIRST_GAP] = table[c, SINCE]
        else:
            following[table[c, LAST]] = table[c, SINCE]
    return met


@compiled
def gap_bits(elements: Any, changes: Any) -> Any:
    """The fit: gaps average about 2^bits elements, or a little more."""
    ratio = elements // max(changes, 1)
    bits = 0
    while ratio > 1 and bits < MOST_GAP_BITS:
        ratio >>= 1
        bits += 1
    return bits


@compiled
def encode_changes(
    words: Any,
    positions: Any,
    differences: Any,
    shift: Any,
    mask: Any,
    bits: Any,
    following: Any,
    table: Any,
    contexts: Any,
    out: Any,
) -> Any:
    """Code the changes, at least one, into `out`: words written, or FULL. `table` comes as zeros, `contexts` as HALF."""
    met = following_gaps(words, positions, shift, mask, following, table)
    low, width, at = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF), 0
    new = 0
    for j in range(positions.size):
        while new < met and table[new, MET_BEFORE] <= j:
            c = table[new, MET]
            new += 1
            if at + SPARE > out.size:
                return FULL
            fitted = gap_bits(table[c, ELEMENTS], table[c, CHANGES])
            table[c, FITTED] = fitted
            low, width, at = put_raw(np.uint64(fitted), 5, low, width, at, out)
            low, width, at = put_gap(table[c, FIRST_GAP], fitted, contexts, c * ROW, low, width, at, out)
        c = np.int64((words[positions[j]] >> shift) & mask)
        if at + SPARE > out.size:
            return FULL
        low, width, at = put_difference(differences[j], bits, contexts, c * ROW, low, width, at, out)
        if j + 1 < positions.size:
            low, width, at = put_gap(np.int64(following[j]), table[c, FITTED], contexts, c * ROW, low, width, at, out)
    if at >= out.size:
        return FULL
    end = low + np.uint64(0xFFFFFFFF)  # some number in the interval whose lower half need not be written
    if end < low:
        carry(out, at)
    out[at] = end >> np.uint64(32)
    return at + 1


@compiled
def locate_changes(
    words: Any, shift: Any, mask: Any, bits: Any, coded: Any, table: Any, contexts: Any, positions: Any, differences: Any
) -> Any:
    """The inverse of `encode_changes`: 0, or SHORT, LONG, FOREIGN, INCOMPLETE. Work is bounded by the elements.

    In the table, FITTED is one more than the fit: 0 is a class not met yet. SINCE counts down to the class's next change.
    """
    code, width, at, found = np.uint64(0), np.uint64(0xFFFFFFFFFFFFFFFF), 0, 0
    while at < 2:
        code = (code << np.uint64(32)) | (np.uint64(coded[at]) if at < coded.size else np.uint64(0))
        at += 1
    for i in range(words.size):
        c = np.int64((words[i] >> shift) & mask)
        if table[c, SINCE] > 0:
            table[c, SINCE] -= 1
            continue
        if table[c, FITTED] == 0:
            fitted, code, width, at = get_raw(5, code, width, at, coded)
            if fitted > MOST_GAP_BITS:
                return FOREIGN
            table[c, FITTED] = np.int64(fitted) + 1
            gap, code, width, at = get_gap(np.int64(fitted), contexts, c * ROW, code, width, at, coded)
            if gap < 0 or at > coded.size + 1:
                return FOREIGN if gap < 0 else SHORT
            if gap > 0:
                table[c, SINCE] = gap - 1
                continue
        difference, code, width, at = get_difference(bits, contexts, c * ROW, code, width, at, coded)
        positions[found] = i
        differences[found] = difference
        found += 1
        if found == positions.size:
            break
        gap, code, width, at = get_gap(table[c, FITTED] - 1, contexts, c * ROW, code, width, at, coded)
        if gap < 0 or at > coded.size + 1:
            return FOREIGN if gap < 0 else SHORT
        table[c, SINCE] = gap
    if found < positions.size:
        return INCOMPLETE
    if at != coded.size + 1:
        return SHORT if at > coded.size + 1 else LONG
    return 0
