"""Rows of a dataset file: JSON Lines or Parquet, with limits, and errors that name file, row, column and fix.

A JSONL file is read once to check every line and then by offset, so that memory does not grow with the text. A Parquet file's
declared sizes are checked before a column is decoded. A prompt is text, or a list of chat messages.
"""

from __future__ import annotations

import io
import json
import mmap
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from coordinator.environments.base import Completion, EnvironmentBroken, PromptValue, Scores

FILE_LIMIT_BYTES = 512 << 20
LINE_LIMIT_BYTES = 4 << 20
ROWS_LIMIT = 2_000_000
COLUMNS_LIMIT = 1000
PARQUET_LIMIT_BYTES = 512 << 20
DEFAULT_PROMPT_COLUMN = "prompt"
QUESTION_COLUMN = "question"
_SUFFIX_PARQUET = b"PAR1"


@dataclass(frozen=True, slots=True)
class Row:
    """One row: where it stands (for error words) and its columns."""

    place: str
    values: dict[str, Any]


class Table(Protocol):
    """Rows by index."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...


RowCheck = Callable[[Row], None]


class Rows(Protocol):
    """The rows of one split, as scoring sees them."""

    @property
    def columns(self) -> Sequence[str]:
        """Names that any row has."""
        ...

    def __len__(self) -> int: ...

    def row(self, index: int) -> Row: ...

    def prompt(self, index: int) -> PromptValue: ...


class RowPrompts:
    """An environment whose prompts are rows. Subclasses score them; where other parts do, this is all that there is."""

    def __init__(self, splits: Mapping[str, Rows]) -> None:
        self._splits = splits

    def size(self, split: str) -> int | None:
        rows = self._splits.get(split)
        return 0 if rows is None else len(rows)

    def prompt(self, split: str, index: int) -> PromptValue:
        return self._splits[split].prompt(index)

    def score(self, split: str, index: int, completions: Sequence[Completion]) -> Scores:
        raise AssertionError(f"these rows are not scored here: {split} {index} {len(completions)}")


class Dataset:
    """The rows of one split, each with a valid prompt.

    Every row is checked when the file is opened, by `check` too; a bad row stops the job before it costs money.
    """

    def __init__(self, path: Path, *, prompt_column: str, check: RowCheck | None = None) -> None:
        self._table = open_table(path)
        if len(self._table) == 0:
            raise EnvironmentBroken(f"{path.name} holds no rows: give a file with at least one")
        self.prompt_column = prompt_column_of(self._table.row(0), prompt_column)
        columns: dict[str, None] = {}
        for index in range(len(self._table)):
            row = self._table.row(index)
            columns |= dict.fromkeys(row.values)
            if len(columns) > COLUMNS_LIMIT:
                raise EnvironmentBroken(f"{row.place}: more than {COLUMNS_LIMIT} different columns; give every row the same ones")
            check_text(row, prompt_of(row, self.prompt_column))
            if check is not None:
                check(row)
        self.columns = tuple(columns)  # of all rows

    def __len__(self) -> int:
        return len(self._table)

    def row(self, index: int) -> Row:
        """Raises IndexError outside the file."""
        if not 0 <= index < len(self._table):
            raise IndexError(f"prompt {index} does not exist: the file holds {len(self._table)} rows")
        return self._table.row(index)

    def prompt(self, index: int) -> PromptValue:
        return prompt_of(self.row(index), self.prompt_column)


def open_table(path: Path) -> Table:
    """Open a file by its content: Parquet by its magic, else JSON Lines. Raises EnvironmentBroken."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise _unreadable(path, error) from error
    if size > FILE_LIMIT_BYTES:
        raise EnvironmentBroken(f"{path.name} holds {size} bytes, above the limit of {FILE_LIMIT_BYTES}: split it or drop columns")
    return _ParquetTable(path) if magic == _SUFFIX_PARQUET else _JsonLines(path)


def _unreadable(path: Path, error: OSError) -> EnvironmentBroken:
    return EnvironmentBroken(f"{path.name} cannot be read: {error.strerror}; check the name and the file's permissions")


def prompt_of(row: Row, column: str) -> PromptValue:
    """The prompt of a row. Raises EnvironmentBroken."""
    if column not in row.values:
        raise EnvironmentBroken(
            f"{row.place}: no column {column!r} (columns: {', '.join(sorted(row.values))}); set environment.prompt_column"
        )
    value = row.values[column]
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return value
    raise EnvironmentBroken(
        f"{row.place}: column {column!r} holds {str(value)[:60]!r}; a prompt is non-empty text, or a list of messages "
        'such as {"role": "user", "content": "..."}'
    )


def check_text(row: Row, prompt: PromptValue) -> None:
    r"""Raise EnvironmentBroken for text that is no Unicode (a lone surrogate, as JSON's \ud800 spells one): it has no tokens."""
    try:
        json.dumps(prompt, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise EnvironmentBroken(
            f"{row.place}: the prompt holds half a surrogate pair at character {error.start}: write the file as valid UTF-8"
        ) from error
    except RecursionError as error:
        raise EnvironmentBroken(
            f"{row.place}: the prompt is nested too deeply: a message's content is text, or a list of parts"
        ) from error
    except (TypeError, ValueError):
        return  # a Parquet column of another type inside a message: the chat template says what it makes of it


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), (str, list))


def prompt_column_of(first: Row, wanted: str) -> str:
    """The configured column; with the default name, `question` serves where there is no `prompt` (as in GSM8K)."""
    if wanted == DEFAULT_PROMPT_COLUMN and wanted not in first.values and QUESTION_COLUMN in first.values:
        return QUESTION_COLUMN
    return wanted


def parse_line(line: bytes, place: str) -> Row:
    """A line of a JSONL file. Raises EnvironmentBroken."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise EnvironmentBroken(f"{place} is not JSON: {error}; each line must be one JSON object") from error
    if not isinstance(values, dict):
        raise EnvironmentBroken(f"{place} holds {type(values).__name__}; each line must be one JSON object with named columns")
    return Row(place, values)


def first_json_row(path: Path) -> Row | None:
    """The first row of a JSONL file; None for Parquet, and where none begins and ends within one line's limit. Raises EnvironmentBroken."""
    try:
        with path.open("rb") as file:
            head = file.read(LINE_LIMIT_BYTES)
            is_whole = not file.read(1)
    except OSError as error:
        raise _unreadable(path, error) from error
    if head.startswith(_SUFFIX_PARQUET):
        return None
    for number, line in enumerate(io.BytesIO(head), 1):
        if line.strip():
            return parse_line(line, f"{path.name} line {number}") if is_whole or line.endswith(b"\n") else None
    return None


class _JsonLines:
    """Offsets of the non-blank lines in a mapped file; a row is parsed again when asked for."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        self._starts = array("Q")
        self._numbers = array("L")
        if path.stat().st_size > 0:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._index()

    def __len__(self) -> int:
        return len(self._starts)

    def row(self, index: int) -> Row:
        start = self._starts[index]
        return parse_line(self._data[start : self._end(start)], f"{self._name} line {self._numbers[index]}")

    def _end(self, start: int) -> int:
        """Where the line that begins at `start` ends: past its line break, or at the end of the file."""
        return self._data.find(b"\n", start) + 1 or len(self._data)

    def _index(self) -> None:
        start, number = 0, 0
        while start < len(self._data):
            end, number = self._end(start), number + 1
            if end - start > LINE_LIMIT_BYTES:
                raise EnvironmentBroken(
                    f"{self._name} line {number} is longer than {LINE_LIMIT_BYTES} bytes: shorten it (one JSON object a line)"
                )
            if self._data[start:end].strip():
                self._starts.append(start)
                self._numbers.append(number)
            start = end
        if len(self) > ROWS_LIMIT:
            raise EnvironmentBroken(f"{self._name} holds {len(self)} rows, above the limit of {ROWS_LIMIT}: split it")


class _ParquetTable:
    """A Parquet file in memory, in Arrow's layout."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._name = path.name
        try:
            with pq.ParquetFile(io.BytesIO(path.read_bytes())) as file:
                self._check(file.metadata)
                self._table = file.read(use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise EnvironmentBroken(f"{path.name} is not a readable Parquet file: {error}; write it again") from error

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def row(self, index: int) -> Row:
        return Row(f"{self._name} row {index}", self._table.slice(index, 1).to_pylist()[0])

    def _check(self, metadata: Any) -> None:
        """Limits on what the file declares, before anything is decoded."""
        size = sum(metadata.row_group(place).total_byte_size for place in range(metadata.num_row_groups))
        if metadata.num_rows > ROWS_LIMIT:
            raise EnvironmentBroken(f"{self._name} holds {metadata.num_rows} rows, above the limit of {ROWS_LIMIT}: split it")
        if size > PARQUET_LIMIT_BYTES:
            raise EnvironmentBroken(
                f"{self._name} unpacks to {size} bytes, above the limit of {PARQUET_LIMIT_BYTES}: split it or drop columns"
            )
