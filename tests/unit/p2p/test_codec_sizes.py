"""Bytes on real versions: against the entropy bound, computed here, and against an independent study's figures."""

from __future__ import annotations

import pytest

from p2p.codec.delta import Delta, new_bytes
from p2p.codec.effort import Effort
from p2p.codec.records import Record
from tests.factories_deltas import ELEMENTS, exponent_bound, real_shard, version

# changed share, study's plain, study's grouped, bound: bytes a parameter (tests/data/deltas/README.md)
PAIRS = {
    ("w1_v06", "w1_v07"): (0.0135, 0.01675, 0.01308, 0.01095),
    ("w1_v06", "w1_v14"): (0.0593, 0.05692, 0.04699, 0.03975),
    ("w3_v06", "w3_v07"): (0.0340, 0.03563, 0.02865, 0.02455),
    ("w3_v06", "w3_v14"): (0.138, 0.11423, 0.10163, 0.08172),
}


def record_of(pair: tuple[str, str], effort: Effort) -> Record:
    shard, base = real_shard(pair[0])
    _, new = real_shard(pair[1])
    record = Delta(effort).record(shard, base, new)
    assert bytes(new_bytes(shard, record, base, "shard 0")) == bytes(new)
    return record


@pytest.mark.parametrize("pair", PAIRS)
def test_the_bound_here_is_the_readmes(pair: tuple[str, str]) -> None:
    base, new = version(pair[0]), version(pair[1])
    assert (base != new).mean() == pytest.approx(PAIRS[pair][0], rel=0.01)
    assert exponent_bound(base, new) / ELEMENTS == pytest.approx(PAIRS[pair][3], abs=0.00001)


@pytest.mark.parametrize("pair", PAIRS)
def test_fast_is_as_small_as_the_study_within_3_percent(pair: tuple[str, str]) -> None:
    assert len(record_of(pair, "fast").blob) / ELEMENTS == pytest.approx(PAIRS[pair][1], rel=0.03)


@pytest.mark.parametrize("pair", PAIRS)
def test_grouped_is_as_small_as_the_study_within_3_percent(pair: tuple[str, str]) -> None:
    assert len(record_of(pair, "grouped").blob) / ELEMENTS == pytest.approx(PAIRS[pair][2], rel=0.03)


@pytest.mark.parametrize("pair", PAIRS)
def test_dense_is_within_2_percent_of_the_entropy_bound(pair: tuple[str, str]) -> None:
    bound = exponent_bound(version(pair[0]), version(pair[1]))
    size = len(record_of(pair, "dense").blob)
    assert 0.99 * bound < size < 1.02 * bound  # adaptive, so it may beat the order-0 bound a little, not much
