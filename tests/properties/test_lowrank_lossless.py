"""A low-rank edge leads to the definition's bits, whatever base, factors, scale, shapes and shards; 5,000 cases with --long."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2p.codec.layout import Bytes, Shard, gather, shards
from p2p.codec.lowrank import Factors, LowRank
from p2p.domain.manifest import Tensor
from tests.factories_lowrank import Halves, defined, matrix


@st.composite
def factor(draw: st.DrawFn, shape: tuple[int, int]) -> Halves:
    """bf16 bits below 2^48: normal ones, any, or all alike (zeros of both signs, faint ones, the largest)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    match draw(st.integers(0, 2)):
        case 0:
            return (rng.normal(0, 0.05, shape).astype("<f4").view("<u4") >> 16).astype("<u2")
        case 1:
            exponents = rng.integers(0, 175, shape, dtype=np.uint16)
            return (
                rng.integers(0, 2, shape, dtype=np.uint16) << 15 | exponents << 7 | rng.integers(0, 128, shape, dtype=np.uint16)
            ).astype("<u2")
    return np.full(shape, draw(st.sampled_from([0, 0x8000, 0x0001, 0x277F, 0x2780, 0x577F, 0xD77F, 0x3F80])), "<u2")


@st.composite
def lines(draw: st.DrawFn) -> tuple[list[Tensor], dict[str, Bytes], dict[str, Factors], float]:
    """Tensors, the base's bytes, factors for some of them, and the scale."""
    rank = draw(st.integers(1, 6))
    shapes = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4))
    tensors = [matrix(f"{number}.weight", *shape) for number, shape in enumerate(shapes)]
    tensors.append(Tensor("norm", draw(st.sampled_from(["F32", "BF16", "BOOL"])), (8,), 0))
    tensors[-1] = Tensor("norm", tensors[-1].dtype, (8,), {"F32": 32, "BF16": 16, "BOOL": 8}[tensors[-1].dtype])
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = {one.name: np.frombuffer(rng.bytes(one.nbytes), np.uint8) for one in tensors}
    factors = {}
    for one in tensors[:-1]:
        rows, columns = one.shape
        if rank * (rows + columns) <= rows * columns and draw(st.booleans()):
            factors[one.name] = Factors(draw(factor((rows, rank))), draw(factor((rank, columns))))
    return tensors, base, factors, draw(st.sampled_from([1.0, 2.0, 0.3, 2.0**-10, 65536.0]))


def _check(case: tuple[list[Tensor], dict[str, Bytes], dict[str, Factors], float], most: int, cut: int) -> None:
    tensors, base, factors, scale = case
    new = dict(base)
    for one in tensors:
        if one.name in factors:
            words = base[one.name].view("<u2").reshape(one.shape)
            new[one.name] = defined(words, factors[one.name], scale).reshape(-1).view(np.uint8)
    plan = shards(tensors, most_elements=most)

    def held(shard: Shard) -> Bytes:
        return gather(shard, base.__getitem__)

    stream = ((shard, gather(shard, new.__getitem__)) for shard in plan)
    edge = b"".join(bytes(chunk) for chunk in LowRank(factors, scale).encode(stream, held))
    chunks = [edge[start : start + cut] for start in range(0, len(edge), cut)]
    decoded = [one.tobytes() for one in LowRank().decode(chunks, plan, held)]
    assert decoded == [gather(shard, new.__getitem__).tobytes() for shard in plan]


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines(), st.sampled_from([8, 64, 1 << 24]), st.sampled_from([3, 100, 1 << 20]))
def test_every_bit_is_the_definitions(
    case: tuple[list[Tensor], dict[str, Bytes], dict[str, Factors], float], most: int, cut: int
) -> None:
    _check(case, most, cut)


@pytest.mark.long
@settings(max_examples=5000, deadline=None, suppress_health_check=list(HealthCheck))
@given(lines(), st.sampled_from([8, 64, 1 << 24]), st.sampled_from([3, 100, 1 << 20]))
def test_every_bit_is_the_definitions_at_length(
    case: tuple[list[Tensor], dict[str, Bytes], dict[str, Factors], float], most: int, cut: int
) -> None:
    _check(case, most, cut)
