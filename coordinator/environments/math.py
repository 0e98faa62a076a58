"""Questions with a numeric answer: the number is taken out of the completion and compared exactly with the reference."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, PromptValue, Scores, scored
from coordinator.environments.datasets import Dataset, Row
from coordinator.environments.number_text import Number, final_number, matches


class Math:
    """Rows of (prompt, answer); an answer may be a number or a worked solution that ends in ``#### number``."""

    def __init__(self, splits: dict[str, Dataset], *, answer_column: str) -> None:
        self._splits = splits
        self._answer_column = answer_column

    def size(self, split: str) -> int | None:
        dataset = self._splits.get(split)
        return len(dataset) if dataset else 0

    def prompt(self, split: str, index: int) -> PromptValue:
        return self._splits[split].prompt(index)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        reference = reference_number(self._splits[split].row(index), self._answer_column)
        return Scores([_outcome(done.text, reference) for done in completions])


def reference_number(row: Row, column: str) -> Number:
    """The number of a row's answer. Raises EnvironmentBroken naming file, row and column."""
    answer = row.values.get(column)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise EnvironmentBroken(
            f"{row.place}: column {column!r} holds {type(answer).__name__}; environment 'math' needs a text or a number there "
            f"(columns: {', '.join(sorted(row.values))}; name another with environment.answer_column)"
        )
    number = final_number(repr(answer) if isinstance(answer, float) else str(answer))
    if number is None:
        raise EnvironmentBroken(
            f"{row.place}: column {column!r} holds no number ({str(answer)[:80]!r}): environment 'math' compares numbers; "
            "drop the row, or score it with a python: reward"
        )
    return number


def _outcome(text: str, reference: Number) -> Outcome:
    answer = final_number(text)
    return scored(1.0 if answer is not None and matches(answer, reference) else 0.0)
