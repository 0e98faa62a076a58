"""Counters kept as masks, against counters kept one by one."""

from random import Random

from hypothesis import given
from hypothesis import strategies as st

from p2p.domain.swarm_copies import Copies, indices, pick

MASKS = st.lists(st.integers(0, (1 << 70) - 1), max_size=20)


@given(MASKS, st.data())
def test_counters_agree_with_plain_counting(masks: list[int], data: st.DataObject) -> None:
    copies = Copies()
    for mask in masks:
        copies.add(mask)
    gone = data.draw(st.lists(st.sampled_from(masks), unique_by=id, max_size=len(masks))) if masks else []
    left = list(masks)
    for mask in gone:
        copies.remove(mask)
        left.remove(mask)
    counts = [sum(mask >> piece & 1 for mask in left) for piece in range(70)]
    assert [copies.of(piece) for piece in range(70)] == counts
    assert copies.anywhere() == sum(1 << piece for piece in range(70) if counts[piece])


@given(MASKS, st.integers(1, (1 << 70) - 1))
def test_rarest_are_those_with_the_lowest_count(masks: list[int], choice: int) -> None:
    copies = Copies()
    for mask in masks:
        copies.add(mask)
    counts = {piece: sum(mask >> piece & 1 for mask in masks) for piece in indices(choice)}
    fewest = min(counts.values())
    assert set(indices(copies.rarest(choice))) == {piece for piece, count in counts.items() if count == fewest}


@given(st.integers(1, (1 << 1200) - 1), st.integers())
def test_pick_takes_a_set_bit(mask: int, seed: int) -> None:
    assert mask >> pick(mask, Random(seed)) & 1


def test_pick_is_uniform() -> None:
    mask = 0b1000_0000_0000_0111_0000_1000_0001
    rng = Random(1)
    seen = [pick(mask, rng) for _ in range(6000)]
    counts = [seen.count(piece) for piece in indices(mask)]
    assert sum(counts) == 6000
    assert all(850 < count < 1150 for count in counts)


def test_indices_are_the_set_bits_lowest_first() -> None:
    assert list(indices(0b10110)) == [1, 2, 4]
    assert list(indices(0)) == []
