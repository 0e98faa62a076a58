"""Forecast, effort and threads of the delta codec."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from p2p.adapters.threads import decode_threads, encode_threads, in_order
from p2p.codec.changes import Changes, Part
from p2p.codec.delta import Delta
from p2p.codec.effort import Auto, fast_bytes, known_bytes
from p2p.codec.forecast import changed_share, exponents, forecast
from p2p.codec.layout import Bytes, Shard, shards
from p2p.codec.records import DENSE, FAST, GROUPED, HEADER
from p2p.codec.words import WordKind, Words
from p2p.domain.manifest import Tensor
from p2p.errors import ApplyFailed
from tests.factories_deltas import real_shard, shard_of, version

MEAN_UPDATE_AT_STEP_7 = 0.28  # between the 0.36 at step 5 and the 0.19 at step 40 that were measured in the same run


@pytest.mark.parametrize(("name", "rate", "measured"), [("w1_v06", 1e-6, 0.0135), ("w3_v06", 3e-6, 0.0340)])
def test_forecast_of_the_changed_share_matches_real_steps(name: str, rate: float, measured: float) -> None:
    """One |u| explains both learning rates within 5 %."""
    found = forecast(exponents([real_shard(name)]), rate, mean_update=MEAN_UPDATE_AT_STEP_7)
    assert found.elements == 1 << 21
    assert found.changed == pytest.approx(measured, rel=0.05)


def test_forecast_by_exponent_is_the_measured_table() -> None:
    """P(change) at 2^-5, 2^-6, ... of a run at 1e-6: 0.08 %, doubling, 79 % at 2^-16; the formula saturates a little sooner."""
    (one,) = exponents([real_shard("w1_v06")])
    share = changed_share(one, 1e-6)
    for power, measured in zip(range(-5, -14, -1), [0.08, 0.16, 0.31, 0.64, 1.3, 2.5, 5.0, 10, 20], strict=True):
        assert share[127 + power] == pytest.approx(measured / 100, rel=0.06)
    assert share[127 - 14] == pytest.approx(0.40, rel=0.06)
    assert share[127 - 20] == 1.0
    assert share[0] == share[1]  # subnormals have the same unit in the last place


@pytest.mark.parametrize(("pair", "rate"), [(("w1_v06", "w1_v07"), 1e-6), (("w3_v06", "w3_v07"), 3e-6)])
def test_forecast_of_bytes_is_within_10_percent(pair: tuple[str, str], rate: float) -> None:
    shard, base = real_shard(pair[0])
    _, new = real_shard(pair[1])
    found = forecast(exponents([(shard, base)]), rate, mean_update=MEAN_UPDATE_AT_STEP_7)
    for effort, expected in (("fast", found.fast_bytes), ("grouped", found.grouped_bytes), ("dense", found.dense_bytes)):
        size = len(Delta(effort).record(shard, base, new).blob)
        assert expected == pytest.approx(size, rel=0.10), effort


def test_forecast_of_skipped_versions_grows_as_measured() -> None:
    """W1 of the study: 0.77 % in a step, 1.36, 2.39 and 4.03 % in 2, 4 and 8."""
    held = exponents([real_shard("w1_v06")])
    single = forecast(held, 1e-6).changed
    for steps, measured in ((2, 1.36), (4, 2.39), (8, 4.03)):
        assert forecast(held, 1e-6, steps=steps).changed / single == pytest.approx(measured / 0.77, rel=0.05)


def test_forecast_of_nothing_and_of_other_dtypes() -> None:
    assert forecast(exponents([shard_of("I64", np.zeros(8, "<i8"))]), 1e-6).elements == 0
    f16 = exponents([shard_of("F16", np.full(8, 1.0, "<f2"))])
    assert forecast(f16, 1.0, mean_update=2.0**-10).changed == 1.0
    assert forecast(f16, 0.5, mean_update=2.0**-10).changed == 0.5
    assert forecast(f16, 0.0).changed == 0.0


BF16 = WordKind(16, 7, 256)
ELEMENTS = 1 << 20


def changed(share: float, *, told_by_exponents: bool) -> tuple[Words, Part]:
    """Words of 16 exponents, and a part of which a share changes: everywhere alike, or only where the exponent is small."""
    rng = np.random.default_rng(5)
    words = (rng.integers(112, 128, ELEMENTS).astype("<u2") << 7) + rng.integers(0, 128, ELEMENTS).astype("<u2")
    may = (words >> 7) < 114 if told_by_exponents else np.ones(ELEMENTS, bool)
    positions = np.flatnonzero(may & (rng.random(ELEMENTS) < share / may.mean())).astype(np.uint32)
    return words, Part(0, ELEMENTS, Changes(positions, np.ones(len(positions), "<u2")))


@pytest.mark.parametrize(
    ("megabits", "cores", "mode"), [(10_000, 1, FAST), (50, 8, DENSE), (100, 8, DENSE), (10, 1, DENSE), (10_000, 64, FAST)]
)
def test_auto_takes_dense_where_the_link_is_the_limit_and_fast_on_a_lan(megabits: float, cores: int, mode: int) -> None:
    assert Auto(megabits * 125_000, cores)(BF16, *changed(0.01, told_by_exponents=True)) == mode


def test_auto_takes_grouped_between() -> None:
    what = changed(0.02, told_by_exponents=True)
    chosen = [Auto(rate, 1)(BF16, *what) for rate in np.geomspace(1e5, 1e9, 60)]
    assert [mode for mode, _ in groupby(chosen)] == [DENSE, GROUPED, FAST]


def test_auto_takes_fast_where_the_exponents_tell_nothing() -> None:
    """A few bytes fewer would not pay for seconds of applying: 50 Mbit/s, two cores."""
    assert Auto(50 * 125_000, 2)(BF16, *changed(0.2, told_by_exponents=False)) == FAST
    assert Auto(50 * 125_000, 2)(BF16, *changed(0.02, told_by_exponents=True)) == DENSE


def test_what_the_exponents_tell_is_their_mutual_information_with_the_change() -> None:
    """Two of sixteen exponents change with 8 %, the others never: H(0.01) - H(0.08) / 8 bits an element."""
    words, part = changed(0.01, told_by_exponents=True)
    expected = (entropy(0.01) - entropy(0.08) / 8) * ELEMENTS / 8
    assert known_bytes(BF16, words, part.changes) == pytest.approx(expected, rel=0.05)
    assert known_bytes(BF16, *_words_and_changes(0.01)) == pytest.approx(0, abs=0.02 * expected)
    assert known_bytes(WordKind(16), words, part.changes) == 0  # one class


def test_fast_bytes_of_nothing_and_of_all() -> None:
    assert fast_bytes(0, 100) == 0
    assert fast_bytes(100, 100) == pytest.approx(100 * 1.5 / 8)


def entropy(share: float) -> float:
    """Of a coin, in bits."""
    return -share * math.log2(share) - (1 - share) * math.log2(1 - share)


def _words_and_changes(share: float) -> tuple[Words, Changes]:
    words, part = changed(share, told_by_exponents=False)
    return words, part.changes


def small_shards() -> tuple[list[Shard], Bytes, Bytes]:
    base, new = (version(name)[: 8 * 4096].view(np.uint8) for name in ("w3_v06", "w3_v14"))
    return shards([Tensor("w", "BF16", (8 * 4096,), base.nbytes)], most_elements=4096), base, new


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_give_the_bytes_of_one(threads: int) -> None:
    plan, base, new = small_shards()

    def of(data: Bytes, shard: Shard) -> Bytes:
        return data[shard.offset : shard.offset + shard.nbytes]

    pairs = [(shard, of(new, shard)) for shard in plan]
    one = [bytes(chunk) for chunk in Delta("dense").encode(pairs, lambda shard: of(base, shard))]
    many = list(encode_threads(pairs, lambda shard: of(base, shard), effort=Delta("dense"), threads=threads))
    assert [bytes(chunk) for chunk in many] == one
    decoded = decode_threads(one, plan, lambda shard: of(base, shard), threads=threads)
    assert b"".join(data.tobytes() for data in decoded) == new.tobytes()
    with pytest.raises(ApplyFailed, match="1 bytes short in shard 7"):
        list(decode_threads([b"".join(one)[:-1]], plan, lambda shard: of(base, shard), threads=threads))


def test_the_first_record_leaves_before_the_last_shard_is_read() -> None:
    plan, base, new = small_shards()
    drawn: list[int] = []

    def source() -> Iterator[tuple[Shard, Bytes]]:
        for number, shard in enumerate(plan):
            drawn.append(number)
            yield shard, new[shard.offset : shard.offset + shard.nbytes]

    stream = encode_threads(source(), lambda one: base[one.offset :][: one.nbytes], effort=Delta("fast"), threads=2)
    assert len(bytes(next(stream))) == HEADER.size
    assert drawn == [0, 1, 2]  # threads + 1: no more is held
    stream.close()


def test_work_runs_side_by_side_and_failures_come_in_their_place() -> None:
    both = threading.Barrier(2, timeout=10)

    def work(item: int) -> int:
        both.wait()
        if item == 3:
            raise ApplyFailed("three")
        return item

    results = in_order(work, range(4), 2)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ApplyFailed, match="three"):
        next(results)


def test_importing_the_codec_imports_no_compiler(tmp_path: Path) -> None:
    code = "import sys, p2p.codec.encodings, p2p.codec.compose, p2p.codec.forecast, p2p.adapters.threads; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[3], check=False).returncode == 0
