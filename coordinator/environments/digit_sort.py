"""The demo task: sort the digits. Procedural; reward 1 for exactly the sorted digits, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.digit_sort import problem
from coordinator.environments.base import Completion, Scores, scored
from coordinator.environments.seeded import Seeded

EVAL_PROMPTS = 1024


class DigitSort(Seeded[tuple[str, str]]):
    """A problem is its prompt and its answer; 1,024 are held out."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, problem, held_out=EVAL_PROMPTS)

    def prompt(self, split: str, index: int) -> str:
        return self.problem(split, index)[0]

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        answer = self.problem(split, index)[1]
        return Scores([scored(1.0 if done.text.strip() == answer else 0.0) for done in completions])
