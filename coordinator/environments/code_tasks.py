"""`code`: rows with tests, and completions that are programs. A program passes a test when it prints what the test expects.

This side reads rows and completions; the programs run elsewhere, each in a jailed process of its own that knows no expected output
(`programs.py`), so there is nothing for them to forge.
"""

from __future__ import annotations

import json
import re
from typing import Any

from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.datasets import Row, RowPrompts

TESTS_LIMIT = 64
TEST_BYTES = 1 << 20
ROW_BYTES = 4 << 20  # of all tests of a row: they travel in one frame
_FENCE = re.compile(r"```([^`\n]*)\n(.*?)```", re.DOTALL)  # of any language: else the end of one block would begin another
_PYTHON = ("", "python", "python3", "py")

Tests = list[tuple[str, str]]


class Code(RowPrompts):
    """Dataset rows whose column `tests` says what a program is given and what it must print."""

    def tests(self, split: str, index: int) -> Tests:
        """The tests of a row."""
        return row_tests(self._splits[split].row(index))


def program_of(text: str) -> str:
    """The program in a completion: its last fenced block of Python, else all of it."""
    blocks = [block for language, block in _FENCE.findall(text) if language.strip().lower() in _PYTHON]
    return str(blocks[-1]) if blocks else text


def row_tests(row: Row) -> Tests:
    """(standard input, expected output) of each test. Raises EnvironmentBroken naming the row."""
    found = row.values.get("tests")
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError) as error:
            raise EnvironmentBroken(f"{row.place}: column 'tests' is text that is no JSON: {error}") from error
    tests = _pairs(found)
    if not tests or len(tests) > TESTS_LIMIT:
        raise EnvironmentBroken(
            f"{row.place}: column 'tests' holds {str(found)[:60]!r}; give 1 to {TESTS_LIMIT} tests as "
            '[{"input": "1 2", "output": "3"}, ...] or {"inputs": [...], "outputs": [...]}'
        )
    if any(len(text) > TEST_BYTES for test in tests for text in test):
        raise EnvironmentBroken(f"{row.place}: a test of column 'tests' holds more than {TEST_BYTES} characters: shorten it")
    if sum(len(text) for test in tests for text in test) > ROW_BYTES:
        raise EnvironmentBroken(f"{row.place}: column 'tests' holds more than {ROW_BYTES} characters in all: drop some tests")
    return tests


def _pairs(found: Any) -> Tests:
    """The tests in either form; none when it is of another one."""
    if isinstance(found, dict) and isinstance(found.get("inputs"), list) and isinstance(found.get("outputs"), list):
        both = list(zip(found["inputs"], found["outputs"], strict=False))
        found = (
            [{"input": given, "output": wanted} for given, wanted in both]
            if len(found["inputs"]) == len(found["outputs"])
            else None
        )
    if not isinstance(found, list) or not all(isinstance(test, dict) for test in found):
        return []
    pairs = [(test.get("input", ""), test.get("output")) for test in found]
    return pairs if all(isinstance(text, str) for pair in pairs for text in pair) else []
