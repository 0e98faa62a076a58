"""Programs in completions, tests in rows, and how output is compared."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.code_tasks import TESTS_LIMIT, program_of, row_tests
from coordinator.environments.datasets import Row
from coordinator.environments.programs import tidy


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("print(1)", "print(1)"),
        ("Here:\n```python\nprint(1)\n```\nDone", "print(1)\n"),
        ("```py\na\n```\n```\nb\n```", "b\n"),
        ("```Python3 \r\na\n```", "a\n"),
        ("```\nopen", "```\nopen"),
        ("```json\n{}\n```\nso\n```python\na\n```", "a\n"),
        ("```python\na\n```\nwhich prints\n```text\n3\n```", "a\n"),
    ],
)
def test_the_program_is_the_last_fenced_block_or_all(text: str, program: str) -> None:
    assert program_of(text) == program


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1", "output": "2"}, {"output": "3"}],
        '[{"input": "1", "output": "2"}, {"output": "3"}]',
        {"inputs": ["1", ""], "outputs": ["2", "3"]},
    ],
)
def test_tests_come_in_either_form(tests: Any) -> None:
    assert row_tests(Row("line 1", {"tests": tests})) == [("1", "2"), ("", "3")]


@pytest.mark.parametrize(
    "tests",
    [
        None,
        [],
        "no json",
        "{}",
        [1],
        [{"input": "1"}],
        [{"input": 1, "output": "2"}],
        {"inputs": ["1"], "outputs": []},
        [{"output": "1"}] * (TESTS_LIMIT + 1),
        [{"output": "x" * ((1 << 20) + 1)}],
        [{"output": "x" * (1 << 20)}] * 5,
    ],
)
def test_other_tests_are_refused_by_their_row(tests: Any) -> None:
    with pytest.raises(EnvironmentBroken, match=r"line 7.*tests"):
        row_tests(Row("line 7", {"tests": tests}))


def test_white_space_at_ends_does_not_count() -> None:
    assert tidy("a \nb\n\n") == tidy("a\nb") != tidy("a\n b")
    assert tidy("") == tidy("\n")
