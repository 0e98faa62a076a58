"""Mixtures and stages: shares, order, restart, against counting by hand."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.domain.mixing import BLOCK, Band, Place, round_robin, shares, source_of, stage_of, within

WEIGHTS = st.lists(st.floats(0.05, 100), min_size=1, max_size=6).filter(lambda ws: min(ws) / sum(ws) * BLOCK >= 1)


@settings(max_examples=50, deadline=None)
@given(WEIGHTS)
def test_shares_are_the_weights_to_one_in_a_thousand(weights: list[float]) -> None:
    """They sum to the block, and none is off by one or more."""
    counts = shares(weights)
    assert sum(counts) == BLOCK
    for count, weight in zip(counts, weights, strict=True):
        assert abs(count - weight / sum(weights) * BLOCK) < 1 + 1e-9
        assert count >= 1


def test_equal_weights_share_a_block_that_does_not_divide() -> None:
    """The rounding goes to the first."""
    assert shares([1, 1, 1]) == (334, 333, 333)
    assert shares([2.0]) == (BLOCK,)
    assert shares([3, 1]) == (750, 250)


@pytest.mark.parametrize(
    ("weights", "words"),
    [
        ([1, 0], "weight 1 is 0"),
        ([-1], "positive"),
        ([float("inf"), 1], "positive"),
        ([1, 10_000], "at least 1/1000"),
        ([float("nan")], "nan"),
    ],
)
def test_weights_that_cannot_be_kept_are_refused(weights: list[float], words: str) -> None:
    """With the place and the value."""
    with pytest.raises(ValueError, match=words):
        shares(weights)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), weights=WEIGHTS)
def test_every_source_is_gone_through_in_order(seed: int, weights: list[float]) -> None:
    """Ordinals of each source count up without a gap over two blocks: no prompt is skipped, none comes twice."""
    counts = shares(weights)
    seen: Counter[int] = Counter()
    for number in range(2 * BLOCK):
        place = source_of(seed, number, counts)
        assert place.ordinal == seen[place.part]
        seen[place.part] += 1
    assert [seen[part] for part in range(len(counts))] == [2 * count for count in counts]


def test_the_order_is_the_seeds_alone() -> None:
    """Asked backwards, as after a restart, the same; another seed or block, another order."""
    counts = shares([2, 1])
    forward = [source_of(7, number, counts) for number in range(3000)]
    assert forward == [source_of(7, number, counts) for number in reversed(range(3000))][::-1]
    parts = [place.part for place in forward]
    assert parts[:1000] != parts[1000:2000]
    assert parts != [source_of(8, number, counts).part for number in range(3000)]


BANDS = [Band(0.5, 1.0, until=10), Band(0.2, 0.8, until=25), Band(0.0, 0.5)]


def test_stages_follow_each_other() -> None:
    """Each starts to count anew; the last never ends."""
    assert [stage_of(number, BANDS) for number in (0, 9, 10, 24, 25, 10**9)] == [
        Place(0, 0),
        Place(0, 9),
        Place(1, 0),
        Place(1, 14),
        Place(2, 0),
        Place(2, 10**9 - 25),
    ]
    assert stage_of(5, [Band(0, 1)]) == Place(0, 5)


def test_a_band_holds_its_ends_and_no_nan() -> None:
    band = Band(0.2, 0.8)
    assert [within(value, band) for value in (0.19, 0.2, 0.5, 0.8, 0.81, float("nan"))] == [False, True, True, True, False, False]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=5))
def test_turns_are_taken_until_each_part_is_used_up(sizes: list[int]) -> None:
    """Against taking turns by hand."""
    by_hand = [Place(part, turn) for turn in range(max(sizes)) for part, size in enumerate(sizes) if turn < size]
    assert [round_robin(sizes, number) for number in range(sum(sizes))] == by_hand
    for number in (-1, sum(sizes)):
        with pytest.raises(IndexError, match="does not exist"):
            round_robin(sizes, number)
