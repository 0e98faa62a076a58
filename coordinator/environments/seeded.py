"""Problems that are made by a seed alone: what such environments share."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from coordinator.environments.base import check_index

P = TypeVar("P", bound=Hashable)


class Seeded(Generic[P]):
    """An endless train split, and a held-out one of so many different problems from the eval stream.

    `draw` is the problem of (seed, split, index).
    """

    def __init__(self, seed: int, draw: Callable[[int, str, int], P], *, held_out: int) -> None:
        self._seed = seed
        self._draw = draw
        self._held_out = _distinct(seed, draw, held_out)

    def size(self, split: str) -> int | None:
        return None if split == "train" else len(self._held_out)

    def problem(self, split: str, index: int) -> P:
        """Raises IndexError outside the split."""
        check_index(split, index, self.size(split))
        return self._draw(self._seed, split, index) if split == "train" else self._held_out[index]


def _distinct(seed: int, draw: Callable[[int, str, int], P], count: int) -> list[P]:
    """The first `count` different problems of the eval stream, in its order."""
    found: dict[P, None] = {}
    index = 0
    while len(found) < count:
        found.setdefault(draw(seed, "eval", index))
        index += 1
    return list(found)
