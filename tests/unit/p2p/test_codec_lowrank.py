"""Low-rank edges: the bits are those of the definition on any processor, what decodes is what was encoded, nothing is believed."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from blake3 import blake3

from p2p.codec.layout import Bytes, Shard, gather, shards
from p2p.codec.lowrank import Factors, LowRank, merge_into, merged
from p2p.domain.manifest import Tensor
from p2p.errors import ApplyFailed
from tests.factories_lowrank import Halves, defined, drawn, floats, halves, matrix

ROOT = Path(__file__).parents[3]
ODD = np.array([0x8000, 0, 0x7F80, 0xFF80, 0x7FC1, 1, 0x8001, 0x0D80, 0x0D7F, 0x7F7F, 0x3F80], "<u2")  # infinities, faint ones, ...


def base_of(rows: int, columns: int, seed: int = 0) -> Halves:
    """Weights, and some of every odd kind among them."""
    rng = np.random.default_rng(seed)
    words = halves(rng.normal(0, 0.02, (rows, columns)).astype("<f4"))
    words.reshape(-1)[: 3 * ODD.size] = np.resize(ODD, 3 * ODD.size)[: words.size]
    return words


def made(words: Halves, factors: Factors, scale: float) -> Halves:
    result = words.copy()
    merge_into(result.reshape(-1), factors, scale)
    return result


@pytest.mark.parametrize("rank", [1, 2, 3, 4, 5, 16, 33])
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (37, 5), (3, 4100), (64, 48)])
@pytest.mark.parametrize("scale", [2.0, 1.5, 1 / 3, 2.0**-10, 65536.0])
def test_the_bits_are_those_of_the_definition(rank: int, rows: int, columns: int, scale: float) -> None:
    words, factors = base_of(rows, columns, rank), drawn(matrix("w", rows, columns), rank, rows)
    assert np.array_equal(made(words, factors, scale), defined(words, factors, scale))


def test_rounding_is_to_even_and_what_gets_nothing_stays() -> None:
    """1 + 2^-8 lies midway between 1 and its successor, 1 + 3 * 2^-8 midway to the next; -0 and a NaN's payload stay where nothing is added."""
    one = np.array([[0x3F80]], "<u2")
    for adds, expected in (
        ((2.0**-8, 0), 0x3F80),
        ((2.0**-8, 2.0**-16), 0x3F81),
        ((3 * 2.0**-8, 0), 0x3F82),
        ((-(2.0**-9), 0), 0x3F80),
    ):
        factors = Factors(halves(np.ones((1, 2), "<f4")), halves(np.array(adds, "<f4").reshape(2, 1)))
        assert made(one, factors, 1.0)[0, 0] == expected
    odd = ODD.reshape(1, -1)
    nothing = Factors(np.zeros((1, 2), "<u2"), drawn(matrix("w", 1, ODD.size), 2, 0).down)
    assert np.array_equal(made(odd, nothing, 2.0), odd)


def test_no_number_is_one_number_and_infinity_stays() -> None:
    something = Factors(halves(np.ones((1, 1), "<f4")), halves(np.ones((1, 3), "<f4")))
    words = np.array([[0x7FC5, 0x7F80, 0xFF80]], "<u2")
    assert made(words, something, 1.0).tolist() == [[0x7FC0, 0x7F80, 0xFF80]]


def test_faint_numbers_count_as_nothing() -> None:
    """So no sum falls among the subnormal numbers, which some threads flush to zero."""
    faint = halves(np.array([[2.0**-49]], "<f4"))
    one = halves(np.ones((1, 1), "<f4"))
    assert made(one, Factors(faint, one), 65536.0)[0, 0] == 0x3F80
    tiny = np.array([[0x0D00]], "<u2")  # 2^-101
    small = Factors(halves(np.array([[2.0**-48]], "<f4")), halves(np.array([[2.0**-48]], "<f4")))
    assert floats(made(tiny, small, 2.0**-10))[0, 0] == 2.0**-106


FIXED = """
import numpy as np
from blake3 import blake3
from p2p.codec.lowrank import Factors, merge_into
state = blake3()
for number, (rows, columns, rank) in enumerate(((40, 333, 16), (7, 2500, 5), (3, 8, 1))):
    rng = np.random.default_rng(number)
    draw = lambda *shape: (rng.normal(0, 0.05, shape).astype("<f4").view("<u4") >> 16).astype("<u2")
    words, up, down = draw(rows, columns), draw(rows, rank), draw(rank, columns)
    merge_into(words.reshape(-1), Factors(up, down), 1.7)
    state.update(words.tobytes())
print(state.hexdigest())
"""


def test_other_processors_make_the_same_bits(capsys: pytest.CaptureFixture[str]) -> None:
    """The loop compiled for this processor's widest registers, and for the oldest of its kind, which has neither AVX nor FMA."""
    exec(FIXED, {})
    own = capsys.readouterr().out
    env = {**os.environ, "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "OMP_NUM_THREADS": "1"}
    other = subprocess.run([sys.executable, "-c", FIXED], cwd=ROOT, env=env, check=True, capture_output=True, text=True)
    assert other.stdout == own


def test_the_compiled_loop_holds_no_fused_operation() -> None:
    """A fused multiply-add rounds once where the definition rounds twice. Compiled anew: what comes from the cache cannot be read."""
    from p2p.codec import lowrank_loops

    loop: Any = lowrank_loops.merge
    fresh = numba.njit(nogil=True, _nrt=False)(loop.py_func)
    some = np.zeros((2, 8), np.float32)
    fresh(np.zeros(8, "<u2"), 0, 8, some[:, :2].copy(), some, np.float32(1), np.zeros(8, np.float32))
    ((listing),) = fresh.inspect_asm().values()
    assert "mul" in listing
    for fused in ("fmadd", "fnmadd", "fmsub", "fmla", "fmls"):
        assert fused not in listing


# --- edges


TENSORS = [
    matrix("model.layers.0.q_proj.weight", 48, 32),
    matrix("model.layers.1.q_proj.weight", 24, 40),
    matrix("model.embed.weight", 50, 32),
    Tensor("model.norm.weight", "BF16", (32,), 64),
    Tensor("scale", "F32", (3, 3), 36),
    Tensor("none", "BF16", (0, 3), 0),
]
TARGETS = TENSORS[:2]
RANK, SCALE = 4, 2.0


class Line:
    """A base and what factors make of it, tensor by tensor."""

    def __init__(self, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.factors = {one.name: drawn(one, RANK, seed + 5) for one in TARGETS}
        self.base = {one.name: np.frombuffer(rng.bytes(one.nbytes), np.uint8) for one in TENSORS}
        self.new = dict(self.base)
        for one in TARGETS:
            words = base_of(*one.shape, seed)
            self.base[one.name] = words.reshape(-1).view(np.uint8)
            self.new[one.name] = defined(words, self.factors[one.name], SCALE).reshape(-1).view(np.uint8)

    def encode(self, plan: list[Shard], edge: LowRank | None = None) -> bytes:
        chosen = LowRank(self.factors, SCALE) if edge is None else edge
        stream = ((shard, gather(shard, self.new.__getitem__)) for shard in plan)
        return b"".join(bytes(chunk) for chunk in chosen.encode(stream, self.held))

    def held(self, shard: Shard) -> Bytes:
        return gather(shard, self.base.__getitem__)

    def decode(self, stream: bytes, plan: list[Shard]) -> list[bytes]:
        return [one.tobytes() for one in LowRank().decode([stream], plan, self.held)]


LINE = Line()
PLAN = shards(TENSORS)


@pytest.mark.parametrize("most", [8, 64, 1000, 1 << 24])
def test_an_edge_leads_to_the_very_bits_however_shards_are_cut(most: int) -> None:
    plan = shards(TENSORS, most_elements=most)
    stream = LINE.encode(plan)
    assert LINE.decode(stream, plan) == [gather(shard, LINE.new.__getitem__).tobytes() for shard in plan]
    assert stream == LINE.encode(PLAN), "the bytes do not depend on the shards"


def test_an_edge_takes_no_more_than_its_factors_and_heads() -> None:
    factors = 2 * RANK * (48 + 32 + 24 + 40)
    assert len(LINE.encode(PLAN)) <= 8 + factors + 9 * (2 * 2 + 3)


def test_what_nothing_touches_is_not_copied() -> None:
    plan = shards(TENSORS[2:3])
    held = LINE.held(plan[0])
    assert merged(plan[0], held, LINE.factors, SCALE) is held


def with_factors(**changed: Any) -> Mapping[str, Factors]:
    first = TARGETS[0].name
    return {**LINE.factors, first: Factors(**{"up": LINE.factors[first].up, "down": LINE.factors[first].down, **changed})}


@pytest.mark.parametrize(
    ("factors", "scale", "words"),
    [
        (with_factors(up=LINE.factors[TARGETS[0].name].up ^ 1), SCALE, "do not make the shard at byte"),
        (LINE.factors, 2.5, "do not make the shard at byte"),
        (with_factors(up=np.zeros((48, 5), "<u2"), down=np.zeros((5, 32), "<u2")), SCALE, r"ranks \[4, 5\]"),
        (with_factors(up=np.zeros((47, 4), "<u2")), SCALE, r"has shape \(47, 4\); \(48, 4\) is due"),
        (with_factors(up=np.full((48, 4), 0x7FC0, "<u2")), SCALE, "2\\^48 or more"),
        (with_factors(down=np.full((4, 32), 0x5780, "<u2")), SCALE, "2\\^48 or more"),
        ({TENSORS[3].name: drawn(matrix("x", 4, 4), 2, 0)}, SCALE, r"it is BF16 \[32\]"),
        ({TENSORS[4].name: drawn(matrix("x", 3, 3), 1, 0)}, SCALE, r"it is F32 \[3, 3\]"),
        ({TARGETS[1].name: drawn(TARGETS[1], 16, 0)}, SCALE, "no smaller than their factors"),
        (LINE.factors, 2.0**-11, "scale"),
        (LINE.factors, float("nan"), "scale nan"),
    ],
)
def test_a_publisher_makes_no_edge_that_leads_elsewhere(factors: Mapping[str, Factors], scale: float, words: str) -> None:
    with pytest.raises(ApplyFailed, match=words):
        LINE.encode(PLAN, LowRank(factors, scale))


def test_both_ends_need_the_base() -> None:
    for action in (lambda: list(LowRank().encode([], None)), lambda: list(LowRank().decode([], PLAN, None))):
        with pytest.raises(ApplyFailed, match="needs its base version"):
            action()
    with pytest.raises(ApplyFailed, match="of the base holds 0 bytes"):
        list(LowRank().decode([LINE.encode(PLAN)], PLAN, lambda _: np.empty(0, np.uint8)))


HONEST = LINE.encode(PLAN)
FIRST = HONEST.index(struct.pack("<I", RANK * 32), 8) - 1  # the first tensor with factors: its record's mode


def written(at: int, data: bytes) -> bytes:
    return HONEST[:at] + data + HONEST[at + len(data) :]


@pytest.mark.parametrize(
    ("stream", "words"),
    [
        (written(0, struct.pack("<I", 0)), "declares rank 0; 1 to 1024"),
        (written(0, struct.pack("<I", 2**32 - 1)), "declares rank 4294967295"),
        (written(4, struct.pack("<f", float("inf"))), "declares scale inf"),
        (written(4, struct.pack("<f", float("nan"))), "declares scale nan"),
        (written(4, struct.pack("<f", 0.0)), "declares scale 0"),
        (written(0, struct.pack("<I", 5)), "declares a factor of 128 elements"),
        (written(0, struct.pack("<I", 20)), "no smaller than their factors"),
        (written(FIRST, b"\x07"), "has mode 7"),
        (written(FIRST, b"\x03"), "is unchanged and declares 128 elements"),
        (written(FIRST + 1, struct.pack("<I", 2**32 - 1)), "declares a factor of 4294967295 elements"),
        (written(FIRST + 5, struct.pack("<I", 2**31)), "in 2147483648 bytes; 128 in at most 256 are due"),
        (HONEST[:-1], "ends 1 bytes short"),
        (HONEST + b"x", "bytes follow"),
        (b"", "ends 8 bytes short in the head"),
    ],
)
def test_a_receiver_believes_nothing(stream: bytes, words: str) -> None:
    with pytest.raises(ApplyFailed, match=words):
        LINE.decode(stream, PLAN)


def test_numbers_that_are_none_are_refused_on_arrival() -> None:
    bits = np.full((RANK, 32), 0x7F80, "<u2")
    head = struct.pack("<If", RANK, SCALE)
    record = struct.pack("<BII", 0, bits.size, bits.nbytes) + bits.tobytes()
    (shard,) = shards(TARGETS[:1])
    with pytest.raises(ApplyFailed, match="2\\^48 or more, or that is none"):
        list(LowRank().decode([head + record], [shard], LINE.held))


def test_a_version_is_the_same_whoever_makes_it() -> None:
    """The digest that a learner's bits and a worker's have; by the definition alone."""
    ours = blake3(b"".join(LINE.decode(HONEST, PLAN))).hexdigest()
    assert ours == blake3(b"".join(gather(shard, LINE.new.__getitem__).tobytes() for shard in PLAN)).hexdigest()
