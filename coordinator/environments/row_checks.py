"""What a dataset's rows must hold, by what scores them. Light to import: the coordinator's own process looks at first rows too."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from coordinator.environments.code_tasks import row_tests
from coordinator.environments.datasets import Row, RowCheck, check_text, first_json_row, prompt_column_of, prompt_of
from coordinator.environments.math import reference_answer

if TYPE_CHECKING:  # jailed children import this module, and must not hold pydantic
    from coordinator.wire.environment import EnvironmentConfig, NamedFile


def row_check(kinds: Sequence[str], *, answer_column: str) -> RowCheck | None:
    """What to look for in every row beside its prompt; None: nothing. `kinds`: the types that score the rows."""
    if "math" in kinds:
        return partial(_check_answer, answer_column)
    return _check_tests if "code" in kinds else None


def check_first_row(environment: EnvironmentConfig, named: NamedFile, path: Path) -> None:
    """Look at the first row of a job's dataset as a learner's start would look at all of them. Raises EnvironmentBroken.

    JSON Lines only: Parquet is decoded in jailed processes, which is where the job learns what is wrong with it.
    """
    row = first_json_row(path)
    if row is None:
        return
    kinds = [reward.type for reward in environment.rewards] or [named.type]
    check_text(row, prompt_of(row, prompt_column_of(row, environment.prompt_column)))
    if (check := row_check(kinds, answer_column=environment.answer_column)) is not None:
        check(row)


def _check_answer(column: str, row: Row) -> None:
    reference_answer(row, column)


def _check_tests(row: Row) -> None:
    row_tests(row)
