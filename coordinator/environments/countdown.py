"""Countdown: three numbers and a target; reward 1 for an expression of exactly these numbers that comes to it, else 0."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.domain.countdown import Problem, is_right, problem
from coordinator.environments.base import Completion, Scores, scored
from coordinator.environments.seeded import Seeded

EVAL_PROMPTS = 256


class Countdown(Seeded[Problem]):
    """Training never sees a problem of the 256 held-out ones."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, problem, held_out=EVAL_PROMPTS)

    def prompt(self, split: str, index: int) -> str:
        return self.problem(split, index).prompt

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        asked = self.problem(split, index)
        return Scores([scored(1.0 if is_right(asked, done.text.strip()) else 0.0) for done in completions])
