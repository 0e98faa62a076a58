"""The demo task: sort the digits. Procedural; reward 1 for exactly the sorted digits, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.digit_sort import problem
from coordinator.environments.base import Completion, Scores, check_index, scored

EVAL_PROMPTS = 1024


class DigitSort:
    """An endless train split; a held-out split of 1,024 distinct problems drawn from another stream."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._held_out = _distinct(seed, EVAL_PROMPTS)

    def size(self, split: str) -> int | None:
        return None if split == "train" else EVAL_PROMPTS

    def prompt(self, split: str, index: int) -> str:
        return self._problem(split, index)[0]

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        answer = self._problem(split, index)[1]
        return Scores([scored(1.0 if done.text.strip() == answer else 0.0) for done in completions])

    def _problem(self, split: str, index: int) -> tuple[str, str]:
        check_index(split, index, self.size(split))
        return problem(self._seed, split, index) if split == "train" else self._held_out[index]


def _distinct(seed: int, count: int) -> list[tuple[str, str]]:
    """The first `count` different problems of the eval stream, in its order."""
    found: dict[str, tuple[str, str]] = {}
    index = 0
    while len(found) < count:
        drawn = problem(seed, "eval", index)
        found.setdefault(drawn[0], drawn)
        index += 1
    return list(found.values())
