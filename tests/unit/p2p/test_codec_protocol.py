"""A second decoder of delta records, written from PROTOCOL.md section 5 in plain Python: both must read the same bits."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import pytest
import zstandard

from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.codec.layout import Bytes, Shard
from tests.factories_deltas import shard_of, version

CLASSES = {"BF16": (16, 7, 256), "F16": (16, 10, 32), "F32": (32, 23, 256), "F8_E5M2": (8, 2, 32), "F8_E4M3": (8, 3, 16)}
MASK = (1 << 64) - 1


class Body:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, length: int) -> bytes:
        self.at += length
        assert self.at <= len(self.data)
        return self.data[self.at - length : self.at]

    def fields(self, form: str) -> tuple[int, ...]:
        return struct.unpack("<" + form, self.take(struct.calcsize("<" + form)))


class Coder:
    def __init__(self, data: bytes) -> None:
        self.numbers = struct.unpack(f"<{len(data) // 4}I", data)
        self.at, self.width = 2, MASK
        first, second = (*self.numbers, 0, 0)[:2]
        self.code = first << 32 | second
        self.contexts: dict[tuple[int, str], list[int]] = {}

    def _settle(self) -> None:
        if self.width < 1 << 32:
            self.width <<= 32
            self.code = self.code << 32 | (self.numbers[self.at] if self.at < len(self.numbers) else 0)
            self.at += 1

    def raw(self, bits: int) -> int:
        value = 0
        while bits:
            step = min(bits, 16)
            bits -= step
            self.width >>= step
            part = min(self.code // self.width, (1 << step) - 1)
            self.code -= part * self.width
            value = value << step | part
            self._settle()
        return value

    def bit(self, of: int, name: str) -> int:
        context = self.contexts.setdefault((of, name), [1 << 21, 0])
        split = (self.width >> 16) * max(1, context[0] >> 6)
        found = int(self.code < split)
        if found:
            self.width = split
        else:
            self.code -= split
            self.width -= split
        target = (1 << 22) - 1 if found else 0
        context[0] += ((target - context[0]) * (131072 // (2 * context[1] + 3))) >> 16
        context[1] = min(context[1] + 1, 255)
        self._settle()
        return found

    def gap(self, of: int, f: int) -> int:
        q = 0
        while q < 20 and self.bit(of, f"Q{min(q, 2)}"):
            q += 1
        if q == 20:
            length = self.raw(5)
            q = 19 + 2**length + self.raw(length)
        remainder, name = 0, "R0"
        for _ in range(min(f, 2)):
            bit = self.bit(of, name)
            remainder, name = remainder << 1 | bit, f"R{1 + bit}"
        rest = max(f - 2, 0)
        return (q << f) + (remainder << rest) + self.raw(rest)

    def difference(self, of: int, bits: int) -> int:
        sign = self.raw(1)
        magnitude = 1
        if self.bit(of, "L"):
            length = 0
            while length < bits - 2 and self.bit(of, f"N{min(length, 15)}"):
                length += 1
            v = self.bit(of, f"M{min(length, 8)}") << (length - 1) | self.raw(length - 1) if length else 0
            magnitude = 2**length + v + 1
        return -magnitude if sign else magnitude


def streams(body: Body, count: int) -> tuple[list[int], list[int]]:
    exceptions, *planes = body.fields("IBBB")
    lengths = [body.fields("I")[0] for _ in range(sum(planes))]
    frames = [zstandard.ZstdDecompressor().decompress(body.take(length)) for length in lengths]
    rows = []
    for number, size in zip(planes, (count, exceptions, exceptions), strict=True):
        mine, frames = frames[:number], frames[number:]
        rows.append([sum(plane[i] << 8 * j for j, plane in enumerate(mine)) for i in range(size)])
    gaps, between, over = rows
    signs = body.take(-(-count // 8))
    magnitudes, at = [1] * count, -1
    for skip, more in zip(between, over, strict=True):
        at += skip + 1
        magnitudes[at] = more + 2
    return gaps, [-m if signs[j // 8] >> j % 8 & 1 else m for j, m in enumerate(magnitudes)]


def fast(body: Body, classes: list[int], bits: int, count: int) -> Iterator[tuple[int, int]]:
    at = -1
    for gap, difference in zip(*streams(body, count), strict=True):
        at += gap + 1
        yield at, difference


def grouped(body: Body, classes: list[int], bits: int, count: int) -> Iterator[tuple[int, int]]:
    cut, listed = body.fields("BB")
    counts = dict(body.fields("BI") for _ in range(listed))
    small = sum(counts.values())
    gaps: list[int] = []
    differences: list[int] = []
    for size in (small, count - small):
        if size:
            more = streams(body, size)
            gaps, differences = gaps + more[0], differences + more[1]
    counts[cut] = count - small
    start = 0
    for group, size in sorted(counts.items()):
        members = [i for i, c in enumerate(classes) if min(c, cut) == group]
        at = -1
        for j in range(start, start + size):
            at += gaps[j] + 1
            yield members[at], differences[j]
        start += size


def dense(body: Body, classes: list[int], bits: int, count: int) -> Iterator[tuple[int, int]]:
    coder = Coder(body.take(len(body.data)))
    fits: dict[int, int] = {}
    left: dict[int, int] = {}
    for i, c in enumerate(classes):
        if c not in fits:
            fits[c] = coder.raw(5)
            left[c] = coder.gap(c, fits[c])
        if left[c]:
            left[c] -= 1
            continue
        yield i, coder.difference(c, bits)
        count -= 1
        if not count:
            break
        left[c] = coder.gap(c, fits[c])
    assert coder.at == len(coder.numbers) + 1


def decode(shard: Shard, record: bytes, base: Bytes) -> bytes:
    bits, shift, classes = CLASSES.get(shard.dtype, (8 * {"U8": 1, "I64": 8}.get(shard.dtype, 1), 0, 1))
    words = [int(word) for word in base.view(f"<u{bits // 8}")]
    mode, _, length = struct.unpack_from("<BII", record)
    blob = Body(record[9:])
    assert len(blob.data) == length
    start = 0
    while start < len(words):
        covered, count, size = blob.fields("III")
        body = Body(blob.take(size))
        part = words[start : start + covered]
        if count:
            read = {4: fast, 5: grouped, 6: dense}[mode]
            for position, difference in read(body, [(w >> shift) & (classes - 1) for w in part], bits, count):
                words[start + position] = (words[start + position] + difference) % (1 << bits)
            assert body.at == len(body.data)
        start += covered
    assert blob.at == length
    return np.array(words, f"<u{bits // 8}").tobytes()


@pytest.mark.parametrize("effort", ["fast", "grouped", "dense"])
@pytest.mark.parametrize("pair", [("w1_v06", "w1_v07"), ("w3_v06", "w3_v14")])
def test_real_weights(pair: tuple[str, str], effort: Effort) -> None:
    shard, base = shard_of("BF16", version(pair[0])[:40_000])
    _, new = shard_of("BF16", version(pair[1])[:40_000])
    record = Delta(effort).record(shard, base, new)
    assert decode(shard, b"".join(bytes(chunk) for chunk in record.chunks(shard)), base) == new.tobytes()


@pytest.mark.parametrize("effort", ["fast", "grouped", "dense"])
@pytest.mark.parametrize("dtype", [*CLASSES, "U8", "I64"])
def test_other_words_and_every_length_of_magnitude(dtype: str, effort: Effort) -> None:
    rng = np.random.default_rng(5)
    width = CLASSES.get(dtype, (64 if dtype == "I64" else 8,))[0]
    base = rng.normal(0, 2**40, 6000).astype("<f8").view("<u8") >> np.uint64(64 - width)
    old = base.astype(f"<u{width // 8}")
    new = old.copy()
    where = np.flatnonzero(rng.random(len(old)) ** 2 < 0.01 + (old.astype(np.uint64) % np.uint64(7) == 0) * 0.3)
    steps = np.uint64(1) << rng.integers(0, width, len(where), dtype=np.uint64)
    new[where] += np.where(rng.random(len(where)) < 0.5, steps, -steps + np.uint64(1)).astype(old.dtype)
    new[5000:] = old[5000:]  # a long gap at the end
    shard, data = shard_of(dtype, old)
    record = Delta(effort).record(shard, data, shard_of(dtype, new)[1])
    assert record.mode >= 4
    assert decode(shard, b"".join(bytes(chunk) for chunk in record.chunks(shard)), data) == new.tobytes()


def test_gaps_far_longer_than_their_class_usually_has() -> None:
    """More than twenty quotients: the escape of a dense gap."""
    old = np.full(1 << 16, 0x3F80, "<u2")
    new = old.copy()
    new[:900] += 1
    new[[2000, 40_000, 65_535]] -= 3
    shard, base = shard_of("BF16", old)
    record = Delta("dense").record(shard, base, shard_of("BF16", new)[1])
    assert record.mode == 6
    assert decode(shard, b"".join(bytes(chunk) for chunk in record.chunks(shard)), base) == new.tobytes()
