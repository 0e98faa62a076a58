"""The delta encoding gives back every bit: any dtype, shape, bit pattern and density; 10,000 cases with --long."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from p2p.codec import delta
from p2p.codec.compose import compose, squash
from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.codec.layout import Bytes, gather, shards, view
from p2p.codec.records import Record
from p2p.domain.dtypes import BITS, whole_bytes
from p2p.domain.manifest import Tensor
from tests.factories_deltas import shard_of

EFFORTS: tuple[Effort, ...] = ("fast", "grouped", "dense", "auto")
SPECIAL = {  # bit patterns that arithmetic on values would not give back
    "BF16": [0x8000, 0x0000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x3F80],
    "F16": [0x8000, 0x0000, 0x7C00, 0xFC00, 0x7E01, 0xFFFF, 0x0001, 0x3C00],
    "F32": [0x80000000, 0, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1],
}


def examples(number: int) -> settings:
    """So many cases; the first call of a loop compiles it, so no deadline."""
    return settings(max_examples=number, deadline=None, suppress_health_check=list(HealthCheck))


@st.composite
def versions(draw: st.DrawFn) -> tuple[list[Tensor], NDArray[np.uint8], NDArray[np.uint8], int]:
    """Tensors, the bytes of two versions of them in layout order, and how many elements a shard may have."""
    names = draw(st.lists(st.sampled_from([*"abcdefgh"]), min_size=1, max_size=3, unique=True))
    dtype = draw(st.sampled_from(["BF16", "BF16", "F16", "F32", *sorted(BITS)]))
    tensors = [_tensor(name, dtype, draw(st.sampled_from(SHAPES))) for name in names]
    tensors.append(_tensor("scale", draw(st.sampled_from(["F32", "BF16", "BOOL", "I64"])), draw(st.sampled_from([(), (1,), (7,)]))))
    seed = draw(st.integers(0, 2**32))
    total = sum(one.nbytes for one in tensors)
    base = _bits(np.random.default_rng(seed), total, dtype, draw(st.sampled_from(["weights", "noise", "special", "zeros"])))
    density = draw(st.sampled_from([0.0, 1.0]) | st.floats(1e-4, 1.0).map(lambda x: x**3))
    new = _changed(np.random.default_rng(seed + 1), base, density, draw(st.sampled_from(["step", "bit", "noise"])), dtype)
    return tensors, base, new, draw(st.sampled_from([8, 64, 1000, 1 << 24] if total < 2000 else [1000, 1 << 24]))


SHAPES = [(), (0,), (1,), (2, 0, 3), (8,), (24,), (5, 7, 8), (1000,), (33, 64), (20_000,)]


def _tensor(name: str, dtype: str, shape: tuple[int, ...]) -> Tensor:
    nbytes = whole_bytes(dtype, shape)
    if nbytes is None:  # sides that fill whole bytes
        shape = (*shape, 8)
        nbytes = whole_bytes(dtype, shape)
    assert nbytes is not None
    return Tensor(name, dtype, shape, nbytes)


def _bits(rng: np.random.Generator, total: int, dtype: str, how: str) -> NDArray[np.uint8]:
    if how == "zeros":
        return np.zeros(total, np.uint8)
    if how == "weights":
        values = (rng.normal(0, 0.02, total).astype("<f4").view("<u4") >> 16).astype("<u2")
        return values.view(np.uint8)[:total].copy()
    if how == "special" and dtype in SPECIAL:
        words = np.array(SPECIAL[dtype], f"<u{BITS[dtype] // 8}")
        return np.resize(rng.permutation(np.resize(words, total)), total).view(np.uint8)[:total].copy()
    return np.frombuffer(rng.bytes(total), np.uint8).copy()


def _changed(rng: np.random.Generator, base: NDArray[np.uint8], density: float, how: str, dtype: str) -> NDArray[np.uint8]:
    """Some bytes of the base, or some words, made others."""
    new = base.copy()
    if how == "noise":
        where = rng.random(len(new)) < density
        new[where] = rng.integers(0, 256, int(where.sum()), dtype=np.uint8)
        return new
    width = max(1, BITS[dtype] // 8)
    words: NDArray[Any] = new[: len(new) // width * width].view(f"<u{width}")
    where = rng.random(len(words)) < density
    step = words.dtype.type(1) << rng.integers(0, 8 * width, len(words), dtype=np.uint64).astype(words.dtype)
    if how == "step":
        step = rng.choice(np.array([1, 1, 1, -1, -1, 2, -3]), len(words)).astype(words.dtype)
    words[where] += step[where]
    return new


def _check(case: tuple[list[Tensor], NDArray[np.uint8], NDArray[np.uint8], int]) -> None:
    tensors, base, new, most = case
    plan = shards(tensors, most_elements=most)
    assert math.fsum(shard.nbytes for shard in plan) == len(base)

    def of(version: NDArray[np.uint8]) -> list[tuple[Any, Bytes]]:
        return [(shard, version[shard.offset : shard.offset + shard.nbytes]) for shard in plan]

    for effort in EFFORTS:
        encoding = Delta(effort, cores=8)
        edge = b"".join(bytes(chunk) for chunk in encoding.encode(of(new), lambda shard: base[shard.offset :][: shard.nbytes]))
        assert len(edge) <= len(new) + 9 * len(plan)
        if np.array_equal(base, new):
            assert len(edge) == 9 * len(plan)
        halves = [edge[: len(edge) // 2], edge[len(edge) // 2 :]]
        decoded = list(Delta().decode(halves, plan, lambda shard: base[shard.offset :][: shard.nbytes]))
        assert b"".join(one.tobytes() for one in decoded) == new.tobytes()


@examples(150)
@given(versions())
def test_every_bit_comes_back(case: tuple[list[Tensor], NDArray[np.uint8], NDArray[np.uint8], int]) -> None:
    _check(case)


@pytest.mark.long
@examples(10_000)
@given(versions())
def test_every_bit_comes_back_in_ten_thousand_cases(case: tuple[list[Tensor], NDArray[np.uint8], NDArray[np.uint8], int]) -> None:
    _check(case)


@examples(60)
@given(
    st.sampled_from(["BF16", "F16", "F32", "U8", "I64", "F8_E4M3"]),
    st.integers(0, 2**32),
    st.lists(st.floats(0, 1).map(lambda x: x**4), min_size=1, max_size=5),
    st.sampled_from(EFFORTS),
)
def test_steps_compose_to_what_comparing_the_ends_gives(dtype: str, seed: int, densities: list[float], effort: Effort) -> None:
    rng = np.random.default_rng(seed)
    nbytes = 8 * int(rng.integers(1, 500))
    row = [_bits(rng, nbytes, dtype, "weights")]
    for density in densities:
        row.append(_changed(rng, row[-1], density, "step", dtype))
    row.append(row[-2].copy())  # and one step is taken back
    shard, base = shard_of(dtype, row[0])
    encoding = Delta(effort)
    direct = encoding.record(shard, base, row[-1])
    steps = [encoding.record(shard, *pair) for pair in pairwise(row)]
    assert _plain(compose(shard, base, steps, encoding, "shard 0")) == _plain(direct)
    kept = [Delta("fast").record(shard, *pair) for pair in pairwise(row)]
    if all(record.mode in {3, 4} for record in kept):
        assert _plain(squash(shard, row[-1], kept, encoding, "shard 0")) == _plain(direct)


def _plain(record: Record) -> tuple[int, bytes]:
    return record.mode, bytes(view(record.blob))


@examples(60)
@given(versions(), st.sampled_from(EFFORTS))
def test_apply_and_undo_in_place_are_inverse(
    case: tuple[list[Tensor], NDArray[np.uint8], NDArray[np.uint8], int], effort: Effort
) -> None:
    tensors, base, new, most = case
    for shard in shards(tensors, most_elements=most):
        span = slice(shard.offset, shard.offset + shard.nbytes)
        held = base[span].copy()
        done = delta.apply(shard, Delta(effort).record(shard, base[span], new[span]), held, "shard 0")
        assert held.tobytes() == new[span].tobytes()
        assert np.all(np.diff(done.positions.astype(np.int64)) > 0)
        delta.undo(shard, done, held)
        assert held.tobytes() == base[span].tobytes()


def test_tied_weights_travel_once() -> None:
    """A tensor that others alias lies in the layout once; every reader of it sees the new bits."""
    head = _tensor("embed", "BF16", (64, 8))
    base = _bits(np.random.default_rng(0), head.nbytes, "BF16", "weights")
    new = _changed(np.random.default_rng(1), base, 0.1, "step", "BF16")
    (shard,) = shards([head])
    edge = [bytes(c) for c in Delta("dense").encode([(shard, gather(shard, lambda _: new))], lambda _: base)]
    (decoded,) = Delta().decode(edge, [shard], lambda _: base)
    assert decoded.tobytes() == new.tobytes()
