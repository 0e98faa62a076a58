"""Dataset files: both formats, and errors that name file, line, column and fix."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from coordinator.environments import datasets
from coordinator.environments.base import EnvironmentBroken, EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.environments.datasets import Dataset

ROWS = [
    {"prompt": "one", "answer": "1", "level": 3},
    {"prompt": [{"role": "user", "content": "zwei ü"}], "answer": "2", "level": None},
]


def test_jsonl_rows_are_read_by_index_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    """Text and message prompts; any order; non-ASCII."""
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "one"}\n\n{"prompt": [{"role": "user", "content": "zwei ü"}], "level": 3}')
    data = Dataset(path, prompt_column="prompt")
    assert len(data) == 2
    assert data.prompt(1) == [{"role": "user", "content": "zwei ü"}]
    assert data.prompt(0) == "one"
    assert data.row(1).place == "rows.jsonl line 4"


def test_parquet_is_known_by_its_content(tmp_path: Path) -> None:
    """Whatever the name; nested messages come back as lists of objects."""
    path = tmp_path / "upload-without-suffix"
    messages = [[{"role": "user", "content": "a"}], [{"role": "system", "content": "s"}, {"role": "user", "content": "b"}]]
    pq.write_table(pa.table({"prompt": messages, "answer": [1, 2]}), path)
    data = Dataset(path, prompt_column="prompt")
    assert [data.prompt(index) for index in range(2)] == messages
    assert data.row(1).values["answer"] == 2
    assert data.columns == ("prompt", "answer")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "rows.jsonl holds no rows"),
        ('{"prompt": "a"}\n{"prompt": ', "rows.jsonl line 2 is not JSON"),
        ('{"prompt": "a"}\n[1]\n', "rows.jsonl line 2 holds list"),
        (
            '{"prompt": "a"}\n\n{"question": "b"}\n',
            r"rows.jsonl line 3: no column 'prompt' \(columns: question\); set environment.prompt_column",
        ),
        ('{"prompt": ""}', "rows.jsonl line 1: column 'prompt' holds ''; a prompt is non-empty text"),
        ('{"prompt": 5}', "line 1: column 'prompt' holds '5'"),
        ('{"prompt": []}', "column 'prompt' holds"),
        ('{"prompt": [{"role": "user"}]}', "list of messages"),
        ('{"prompt": "\\u0000' + "[" * 9 + '"}\n' + "[" * 100_000, "line 2 is not JSON"),
    ],
)
def test_a_bad_file_is_named_with_line_column_and_fix(tmp_path: Path, text: str, words: str) -> None:
    """Found when the file is opened, before the job costs anything."""
    path = tmp_path / "rows.jsonl"
    path.write_text(text)
    with pytest.raises(EnvironmentBroken, match=words):
        Dataset(path, prompt_column="prompt")


def test_bytes_that_are_not_utf8_are_named(tmp_path: Path) -> None:
    """As what they are: no JSON."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"prompt": "\xff"}\n')
    with pytest.raises(EnvironmentBroken, match="line 1 is not JSON"):
        Dataset(path, prompt_column="prompt")


def test_absent_and_broken_files_are_named(tmp_path: Path) -> None:
    """A cut Parquet file too."""
    with pytest.raises(EnvironmentBroken, match=r"gone\.jsonl cannot be read: No such file"):
        Dataset(tmp_path / "gone.jsonl", prompt_column="prompt")
    path = tmp_path / "cut.parquet"
    pq.write_table(pa.table({"prompt": ["a"] * 100}), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(EnvironmentBroken, match=r"cut\.parquet is not a readable Parquet file"):
        Dataset(path, prompt_column="prompt")


def test_limits_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: ModuleType) -> None:
    """Rows, line length, file size, and what a Parquet file unpacks to, each with its figure."""
    path = made.write_rows(tmp_path / "rows.jsonl", [{"prompt": "x" * 100}] * 10)
    packed = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"{number}" * 100 for number in range(10)]}), packed)
    for name, value, file in [
        ("ROWS_LIMIT", 9, path),
        ("ROWS_LIMIT", 9, packed),
        ("LINE_LIMIT_BYTES", 50, path),
        ("FILE_LIMIT_BYTES", 50, path),
        ("PARQUET_LIMIT_BYTES", 50, packed),
    ]:
        with monkeypatch.context() as patch:
            patch.setattr(datasets, name, value)
            with pytest.raises(EnvironmentBroken, match=rf"{file.name}.*{value}"):
                Dataset(file, prompt_column="prompt")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"type": "maths"}, "environment.type is 'maths'; it must be"),
        ({"type": "math"}, "environment.train is absent"),
        ({"type": "digit_sort", "train": "x"}, "must be absent for 'digit_sort'"),
        ({"type": "python:rewards.py"}, "python:FILE:FUNCTION"),
        ({"type": "python:rewards.py:a-b", "code": "x"}, "python:FILE:FUNCTION"),
        ({"type": "python:rewards.py:reward"}, "was not uploaded"),
    ],
)
def test_a_wrong_spec_is_refused_with_the_fix(spec: dict[str, str], words: str) -> None:
    """Before anything is read."""
    with pytest.raises(EnvironmentBroken, match=words):
        build_environment(EnvironmentSpec(**{"seed": 0, "tokenizer_dir": "", **spec}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "words"),
    [(None, "holds NoneType"), ("none at all", "holds no number"), (True, "holds bool"), ([1], "holds list")],
)
def test_math_needs_a_number_in_every_row(tmp_path: Path, made: ModuleType, answer: object, words: str) -> None:
    """The row and the column are named at the start."""
    path = made.write_rows(tmp_path / "t.jsonl", [{"question": "a", "answer": 0.5}, {"question": "b", "answer": answer}])
    with pytest.raises(EnvironmentBroken, match=rf"t.jsonl line 2: column 'answer' {words}"):
        build_environment(EnvironmentSpec("math", 0, "", train=str(path)))


def test_another_answer_column_can_be_named(tmp_path: Path, made: ModuleType) -> None:
    """And another prompt column."""
    path = made.write_rows(tmp_path / "t.jsonl", [{"q": "1+1", "solution": 2}])
    spec = EnvironmentSpec("math", 0, "", train=str(path), prompt_column="q", answer_column="solution")
    assert build_environment(spec).prompt("train", 0) == "1+1"


@pytest.mark.parametrize("prompt", [r'"half \ud800"', r'[{"role": "user", "content": "\udfff"}]'])
def test_half_a_surrogate_pair_is_named_with_its_line(tmp_path: Path, prompt: str) -> None:
    """JSON can spell what no text can hold, and no tokenizer reads."""
    (tmp_path / "rows.jsonl").write_text(f'{{"prompt": "fine"}}\n{{"prompt": {prompt}}}\n')
    with pytest.raises(EnvironmentBroken, match=r"rows.jsonl line 2: .*half a surrogate pair"):
        Dataset(tmp_path / "rows.jsonl", prompt_column="prompt")


def test_rows_with_ever_new_columns_are_refused(tmp_path: Path, made: ModuleType) -> None:
    """What is kept of a file is bounded."""
    rows = [{"prompt": "p", f"column{number}": 1} for number in range(1100)]
    with pytest.raises(EnvironmentBroken, match="more than 1000 different columns"):
        Dataset(made.write_rows(tmp_path / "rows.jsonl", rows), prompt_column="prompt")
