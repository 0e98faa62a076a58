"""Job files: what is read, overridden and refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.commands.job_file import JobFileWrong, read_job

JOB = """
name = "one"
model = "/models/m"
[environment]
type = "digit_sort"
[budget]
steps = 10
"""


def write(tmp_path: Path, text: str) -> Path:
    """A job file."""
    path = tmp_path / "job.toml"
    path.write_text(text)
    return path


def test_overrides(tmp_path: Path) -> None:
    """Values in TOML's syntax, bare words as strings, sections made on the way."""
    job = read_job(write(tmp_path, JOB), ["budget.steps=20", "staleness.max=2", "name=two", "algorithm.betas=[0.9, 0.99]"])
    assert job["budget"]["steps"] == 20
    assert job["staleness"] == {"max": 2}
    assert job["name"] == "two"
    assert job["algorithm"]["betas"] == [0.9, 0.99]


@pytest.mark.parametrize(
    ("text", "overrides", "words"),
    [
        (JOB.replace("[budget]", "[budgets]"), [], "budgets is no known key; did you mean budget?"),
        (JOB, ["algorithm.groupsize=3"], "algorithm.groupsize is no known key; did you mean algorithm.group_size?"),
        (JOB, ["budget.steps=0"], "budget.steps: Input should be greater than or equal to 1 (it is 0)"),
        (JOB, ["budget.steps"], "does not read section.key=value"),
        (JOB, ["name.x=1"], "'name' is a value, not a section"),
        (JOB, ["sampling.top_p=0.9"], "sampling.top_p is no known key; training takes no sampling filters"),
        (JOB, ["algorithm.min_group=99"], "algorithm.min_group is 99, above algorithm.group_size 16"),
        ("name = ", [], "is not TOML"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, text: str, overrides: list[str], words: str) -> None:
    """One clear error with the key in it."""
    with pytest.raises(JobFileWrong) as caught:
        read_job(write(tmp_path, text), overrides)
    assert words in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    """The path and the reason."""
    with pytest.raises(JobFileWrong, match="cannot be read: No such file"):
        read_job(tmp_path / "none.toml", [])
