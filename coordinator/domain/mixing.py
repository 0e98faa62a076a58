"""Which prompt a group carries when a job mixes sources, or works through stages of difficulty: functions of seed and number alone.

Nothing is remembered, so a restart gives each group the prompt that it had, and the sources' shares hold over any run of BLOCK groups.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from random import Random

from coordinator.domain.seeds import derive

BLOCK = 1000  # numbers in which the sources' shares come out exactly; a smaller share cannot be kept


@dataclass(frozen=True, slots=True)
class Place:
    """Where a number leads: which part (source or stage), and how many numbers went to that part before it."""

    part: int
    ordinal: int


@dataclass(frozen=True, slots=True)
class Band:
    """Difficulties that count: both ends are included. `until` is the first group number that no longer belongs; None: the last stage."""

    low: float
    high: float
    until: int | None = None


def shares(weights: Sequence[float]) -> tuple[int, ...]:
    """How many of BLOCK numbers each source gets: its weight's part, rounded by largest remainder, at least one.

    Raises ValueError in words for weights that are not positive, or too small to be kept.
    """
    total = sum(weights)
    for place, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight {place} is {weight}: give a positive number")
        if weight / total * BLOCK < 1:
            raise ValueError(f"weight {place} is {weight} of {total}: a source needs at least 1/{BLOCK} of the whole")
    exact = [weight / total * BLOCK for weight in weights]
    counts = [int(value) for value in exact]
    order = sorted(range(len(exact)), key=lambda place: (counts[place] - exact[place], place))
    for place in order[: BLOCK - sum(counts)]:
        counts[place] += 1
    return tuple(counts)


def source_of(seed: int, number: int, counts: tuple[int, ...]) -> Place:
    """The source of a number: each block holds the same counts in an order of its own."""
    block, place = divmod(number, sum(counts))
    order, earlier = _block(derive(seed, "mixture", block), counts)
    part = order[place]
    return Place(part, block * counts[part] + earlier[place])


@lru_cache(maxsize=8)
def _block(seed: int, counts: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The sources of one block in order, and for each how often its source came before in the block."""
    order = [part for part, count in enumerate(counts) for _ in range(count)]
    Random(seed).shuffle(order)  # noqa: S311 (seeded on purpose)
    seen = [0] * len(counts)
    earlier = []
    for part in order:
        earlier.append(seen[part])
        seen[part] += 1
    return tuple(order), tuple(earlier)


def stage_of(number: int, bands: Sequence[Band]) -> Place:
    """The stage of a number, and its place in it. The last stage never ends."""
    ends = [band.until for band in bands[:-1] if band.until is not None]
    part = bisect_right(ends, number)
    return Place(part, number - (ends[part - 1] if part else 0))


def within(difficulty: float, band: Band) -> bool:
    """Whether a row of that difficulty belongs to the band; what is no number never does."""
    return band.low <= difficulty <= band.high


def round_robin(sizes: Sequence[int], number: int) -> Place:
    """The place of `number` when finite parts take turns until each is used up. Raises IndexError past the end.

    So the first few hold something of every part: an evaluation asks for those.
    """
    if not 0 <= number < sum(sizes):
        raise IndexError(f"prompt {number} does not exist: the parts hold {sum(sizes)}")
    levels = sorted({0, *sizes})
    spans = [(high - low) * sum(size >= high for size in sizes) for low, high in pairwise(levels)]
    ends = [0, *accumulate(spans)]
    level = bisect_right(ends, number) - 1
    living = [part for part, size in enumerate(sizes) if size > levels[level]]
    turn, place = divmod(number - ends[level], len(living))
    return Place(living[place], levels[level] + turn)
