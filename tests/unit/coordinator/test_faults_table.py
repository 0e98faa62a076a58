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


def test_each_fault_has_a_test_of_its_number_and_each_such_test_stands_in_its_row() -> None:
    rows = dict(re.findall(r"^\| (\d+) \| (.*)$", TABLE, flags=re.MULTILINE))
    named = [
        (f"`{path.relative_to(TESTS)}::{name}`", str(int(number)))
        for path in sorted(TESTS.rglob("test_*.py"))
        for name, number in re.findall(r"^(?:async )?def (test_fault_(\d\d)_\w+)\(", path.read_text(), flags=re.MULTILINE)
    ]
    assert {number for _, number in named} == set(rows)
    assert [name for name, number in named if name not in rows[number]] == []
