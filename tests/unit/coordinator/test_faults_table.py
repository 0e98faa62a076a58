"""docs/faults.md: every fault has its row, and every test that it names is there."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[2]
TABLE = (TESTS.parent / "docs" / "faults.md").read_text()


def test_each_of_the_faults_has_one_row() -> None:
    assert re.findall(r"^\| (\d+) \|", TABLE, flags=re.MULTILINE) == [str(number) for number in range(1, 26)]


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", TABLE)
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not re.search(rf"^(async )?def {name}\(", (TESTS / path).read_text(), flags=re.MULTILINE)
    ]
    assert len(named) > 50
    assert missing == []


def test_every_test_of_a_fault_is_in_its_row() -> None:
    """A test named after a number stands in the row of that number."""
    rows = dict(re.findall(r"^\| (\d+) \| (.*)$", TABLE, flags=re.MULTILINE))
    named = re.findall(r"^def (test_fault_(\d\d)_\w+)\(", (TESTS / "unit/learner/test_faults.py").read_text(), flags=re.MULTILINE)
    assert named
    assert [name for name, number in named if name not in rows[str(int(number))]] == []
