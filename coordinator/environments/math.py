r"""Questions with a mathematical answer, compared with the reference of the row.

A number is compared exactly, by our own reading (fractions, separators, units: `number_text`, `answers`). What is no plain number on either side
is compared as LaTeX by math-verify, within a time limit a completion: a limit reached is a `timeout`, an error is `failed`, and neither is
ever a score of 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.environments import algebra
from coordinator.environments.alarm import OutOfTime, time_limit
from coordinator.environments.answers import Answer, answer_of, reference_of
from coordinator.environments.base import Completion, EnvironmentBroken, Outcome, Scores, bounded, scored
from coordinator.environments.datasets import Row, RowPrompts, Rows
from coordinator.environments.number_text import matches

SHARE_OF_LIMIT = 0.8  # of the grading limit is for the completions; the rest is for what surrounds them


class Math(RowPrompts):
    r"""Rows of (prompt, answer): a number, LaTeX, or a worked solution that ends in ``#### number`` or has a ``\boxed{}``.

    `limit_s` bounds the grading of one prompt's completions together, wall-clock.
    """

    def __init__(self, splits: Mapping[str, Rows], *, answer_column: str, limit_s: float) -> None:
        super().__init__(splits)
        self._answer_column = answer_column
        self._limit_s = limit_s
        algebra.load()

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        reference = reference_answer(self._splits[split].row(index), self._answer_column)
        each_s = SHARE_OF_LIMIT * self._limit_s / max(1, len(completions))
        outcomes = [_outcome(done.text, reference, each_s) for done in completions]
        return Scores(outcomes, {}, any(one.kind == "timeout" for one in outcomes))  # what was interrupted may be half done


def reference_answer(row: Row, column: str) -> Answer:
    """The answer of a row. Raises EnvironmentBroken naming file, row and column."""
    answer = row.values.get(column)
    if isinstance(answer, bool) or not isinstance(answer, (str, int, float)):
        raise EnvironmentBroken(
            f"{row.place}: column {column!r} holds {type(answer).__name__}; environment 'math' needs a text or a number there "
            f"(columns: {', '.join(sorted(row.values))}; name another with environment.answer_column)"
        )
    found = reference_of(repr(answer) if isinstance(answer, float) else str(answer))
    if found is None or len(found.text) > algebra.TEXT_LIMIT_CHARS:
        raise EnvironmentBroken(
            f"{row.place}: column {column!r} holds no number or formula ({str(answer)[:80]!r}): environment 'math' compares those; "
            "drop the row, or score it with a python: reward"
        )
    return found


def _outcome(text: str, reference: Answer, limit_s: float) -> Outcome:
    answer = answer_of(text)
    if reference.number is not None and (answer.number is not None or not answer.is_marked):
        return scored(float(answer.number is not None and matches(answer.number, reference.number)))
    try:
        with time_limit(limit_s):
            return scored(float(algebra.is_same(reference.text, answer.text, is_marked=answer.is_marked)))
    except OutOfTime as late:
        return Outcome("timeout", None, f"comparing with the reference: {late} (a share of environment.grade_timeout_s)")
    except Exception as error:
        return Outcome("failed", None, bounded(f"comparing with the reference: {type(error).__name__}: {error}"))
