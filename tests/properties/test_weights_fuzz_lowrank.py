"""The bytes of low-rank edges, damaged or made up, as `test_weights_fuzz.py` does it with the others. 10,000 with --long."""

from __future__ import annotations

import struct

import numpy as np
from hypothesis import strategies as st

from p2p.codec.layout import Bytes, Shard, gather, shards
from p2p.codec.lowrank import LowRank
from p2p.domain.manifest import Tensor
from p2p.errors import ApplyFailed
from tests.factories_fuzz import COUNTS, bounded, damaged, fuzz, in_one_line, scaled
from tests.factories_lowrank import defined, drawn, halves, matrix

TENSORS = [matrix("a.weight", 40, 30), Tensor("b", "F32", (4, 2), 32), matrix("c.weight", 24, 36), Tensor("d", "BF16", (12,), 24)]
RANK, SCALE = 3, 1.5
FACTORS = {one.name: drawn(one, RANK, seed) for seed, one in enumerate((TENSORS[0], TENSORS[2]))}
BASE: dict[str, Bytes] = {one.name: np.random.default_rng(7).integers(0, 256, one.nbytes, dtype=np.uint8) for one in TENSORS}
for tensor in (TENSORS[0], TENSORS[2]):
    BASE[tensor.name] = halves(np.random.default_rng(8).normal(0, 0.02, tensor.shape).astype("<f4")).reshape(-1).view(np.uint8)
NEW = BASE | {
    one.name: defined(BASE[one.name].view("<u2").reshape(one.shape), FACTORS[one.name], SCALE).reshape(-1).view(np.uint8)
    for one in (TENSORS[0], TENSORS[2])
}
PLAN = shards(TENSORS, most_elements=1024)
DECLARED = sum(one.nbytes for one in TENSORS)


def held(shard: Shard) -> Bytes:
    return gather(shard, BASE.__getitem__)


HONEST = b"".join(
    bytes(chunk) for chunk in LowRank(FACTORS, SCALE).encode(((shard, gather(shard, NEW.__getitem__)) for shard in PLAN), held)
)


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """A stream with every record in its place and every number anything."""
    rank = draw(st.sampled_from([RANK, RANK, 1, 0, 1024, *COUNTS]))
    scale = draw(st.sampled_from([SCALE, 0.0, -1.0, float("nan"), float("inf"), 65537.0]))
    stream = struct.pack("<If", rank, scale)
    for one in sorted(TENSORS, key=lambda one: (one.dtype != "F32", one.name)):
        if draw(st.booleans()):
            stream += struct.pack("<BII", 3, draw(st.sampled_from([0, 0, 0, 1])), 0)
            continue
        sides = one.shape if len(one.shape) == 2 else (*one.shape, 1)
        for side in reversed(sides):
            count = draw(st.sampled_from([min(rank, 64) * side] * 4 + COUNTS))
            words = draw(st.sampled_from([0x3F80, 0x7F80, 0x5780, 0, 0xFFFF]))
            blob = np.full(min(count, 4000), words, "<u2").tobytes()
            length = draw(st.sampled_from([len(blob)] * 4 + COUNTS))
            stream += struct.pack("<BII", draw(st.sampled_from([0, 0, 1, 2, 3, 255])), count, length) + blob
    return stream + draw(st.sampled_from([b"", b"", b"x"]))


def streams() -> st.SearchStrategy[bytes]:
    heads = st.integers(8, 60).flatmap(lambda stop: damaged(HONEST[:stop]).map(lambda data: data + HONEST[stop:]))
    return damaged(HONEST) | heads | made_up()


def test_the_honest_stream_decodes() -> None:
    decoded = [one.tobytes() for one in LowRank().decode([HONEST], PLAN, held)]
    assert decoded == [gather(shard, NEW.__getitem__).tobytes() for shard in PLAN]


@scaled(400)
def test_streams(cases: int) -> None:
    """Refused in one line, or so many bytes as the plan declares; tensors that nothing may touch as they were."""
    test_the_honest_stream_decodes()  # compiles the loop, which is nobody's declared size

    @fuzz(cases, streams())
    def check(stream: bytes) -> None:
        with bounded(20 * DECLARED + 2 * len(stream)):
            try:
                found = b"".join(one.tobytes() for one in LowRank().decode([stream], PLAN, held))
            except ApplyFailed as error:
                return in_one_line(error)
        assert len(found) == DECLARED
        assert found[:32] == BASE["b"].tobytes()
        assert found[-24:] == BASE["d"].tobytes()
        return None
