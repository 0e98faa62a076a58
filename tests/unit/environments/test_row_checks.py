"""A look at a dataset's first row, and at code that is no Python, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.environments import datasets
from coordinator.environments.author_code import load_function
from coordinator.environments.base import EnvironmentBroken
from coordinator.environments.row_checks import check_first_row
from coordinator.wire.environment import EnvironmentConfig, NamedFile

MATH = b'{"prompt": "1+1", "answer": "2"}'


def look(path: Path, kind: str, **more: Any) -> None:
    """Look at a file that a job of that type names."""
    environment = EnvironmentConfig(type=kind, train=path.name, **more)
    (named,) = environment.files()
    check_first_row(environment, named, path)


@pytest.mark.parametrize(
    ("text", "kind", "more", "words"),
    [
        (MATH, "code", {}, "t.jsonl line 1: column 'tests' holds 'None'"),
        (b"\n  \n" + MATH, "code", {}, "t.jsonl line 3: column 'tests'"),
        (b'{"prompt": "1+1"}\n', "math", {}, "line 1: column 'answer' holds NoneType"),
        (MATH, "math", {"answer_column": "solution"}, "column 'solution' holds NoneType"),
        (MATH, "dataset", {"rewards": [{"type": "math"}], "prompt_column": "ask"}, "no column 'ask'"),
        (b'{"prompt": "1+1"}', "dataset", {"rewards": [{"type": "math"}]}, "column 'answer'"),
        (b"not json\n", "math", {}, "line 1 is not JSON"),
    ],
)
def test_a_first_row_that_no_reward_can_use(tmp_path: Path, text: bytes, kind: str, more: dict[str, Any], words: str) -> None:
    """In the words of the learner's start."""
    (tmp_path / "t.jsonl").write_bytes(text)
    with pytest.raises(EnvironmentBroken) as caught:
        look(tmp_path / "t.jsonl", kind, **more)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", [MATH, b'{"question": "1+1", "answer": "2"}\n{"bad', b"", b"\n\n", b"PAR1 and so on"])
def test_what_is_left_to_the_start(tmp_path: Path, text: bytes) -> None:
    """A good first row, a file without one, and Parquet, which only jailed processes decode."""
    (tmp_path / "t.jsonl").write_bytes(text)
    look(tmp_path / "t.jsonl", "math")


def test_authors_code_judges_its_own_columns(tmp_path: Path) -> None:
    """Of its rows only the prompt is looked at."""
    (tmp_path / "t.jsonl").write_bytes(b'{"prompt": "1+1"}')
    environment = EnvironmentConfig(type="python:rewards.py:reward", train="t.jsonl")
    check_first_row(environment, next(environment.files()), tmp_path / "t.jsonl")


def test_a_file_that_went_away(tmp_path: Path) -> None:
    """As the start would say it."""
    with pytest.raises(EnvironmentBroken, match=r"gone\.jsonl cannot be read: No such file"):
        look(tmp_path / "gone.jsonl", "math")


def test_a_row_longer_than_the_limit_is_not_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start names its line; a look stays small."""
    monkeypatch.setattr(datasets, "LINE_LIMIT_BYTES", 16)
    (tmp_path / "t.jsonl").write_bytes(MATH)
    look(tmp_path / "t.jsonl", "code")


def test_sources_are_looked_at_by_their_own_type(tmp_path: Path) -> None:
    """A file of tests beside one of answers."""
    (tmp_path / "a.jsonl").write_bytes(MATH)
    environment = EnvironmentConfig(type="math", sources=({"train": "a.jsonl"}, {"type": "code", "train": "a.jsonl"}))  # type: ignore[arg-type]
    first, second = environment.files()
    check_first_row(environment, first, tmp_path / "a.jsonl")
    with pytest.raises(EnvironmentBroken, match="column 'tests'"):
        check_first_row(environment, second, tmp_path / "a.jsonl")
    assert (first, second.type) == (NamedFile("environment.sources.0.train", "a.jsonl", "dataset", "math"), "code")


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("x = 1\ndef reward(:\n", r"SyntaxError: .* \(rewards\.py line 2\)"),
        ("x = 1\n\n1 / 0\n", r"ZeroDivisionError: .* \(rewards\.py line 3\)"),
        ("exec('(')\n", r"SyntaxError: .* \(rewards\.py line 1\)"),
    ],
)
def test_code_that_cannot_be_loaded_is_named_with_its_line(tmp_path: Path, code: str, words: str) -> None:
    """No traceback names a file that never began to run."""
    (tmp_path / "rewards.py").write_text(code)
    with pytest.raises(EnvironmentBroken, match=words):
        load_function(tmp_path / "rewards.py", "reward")
