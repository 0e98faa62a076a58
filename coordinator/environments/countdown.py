"""Countdown: three numbers and a target; reward 1 for an expression of exactly these numbers that comes to it, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.countdown import Problem, is_right, problem
from coordinator.environments.base import Completion, Scores, check_index, scored

EVAL_PROMPTS = 256


class Countdown:
    """An endless train split; a held-out split of 256 distinct problems, of which training never sees one."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._held_out = _distinct(seed, EVAL_PROMPTS)

    def size(self, split: str) -> int | None:
        return None if split == "train" else EVAL_PROMPTS

    def prompt(self, split: str, index: int) -> str:
        return self._problem(split, index).prompt

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        asked = self._problem(split, index)
        return Scores([scored(1.0 if is_right(asked, done.text.strip()) else 0.0) for done in completions])

    def _problem(self, split: str, index: int) -> Problem:
        check_index(split, index, self.size(split))
        return problem(self._seed, split, index) if split == "train" else self._held_out[index]


def _distinct(seed: int, count: int) -> list[Problem]:
    """The first `count` different problems of the eval stream, in its order."""
    found: dict[Problem, None] = {}
    index = 0
    while len(found) < count:
        found.setdefault(problem(seed, "eval", index))
        index += 1
    return list(found)
