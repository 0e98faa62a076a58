"""How commands speak: tables and words for people, one JSON document for scripts."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table

from pricing.money import uusd_to_usd

# What strangers wrote (completions, names, reasons) must not steer the reader's terminal: no escape sequence leaves here.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: object) -> str:
    """Text with control characters, and those that turn the direction of writing, spelled out; tab and line feed stay."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape", "surrogatepass").decode(), str(text))


class PlainConsole(Console):
    """A console that shows text and nothing else. Markup is off: prompts, completions and reasons hold brackets of their own."""

    def print(self, *objects: Any, **options: Any) -> None:
        """As `Console.print`; tables are built from plain text by `show_table`."""
        super().print(*(plain(thing) if isinstance(thing, str) else thing for thing in objects), **options)


_PIPE_WIDTH = 1000  # columns: what a script or grep reads is not folded in the middle of a word


def _console(stream: TextIO, *, stderr: bool) -> PlainConsole:
    return PlainConsole(stderr=stderr, markup=False, highlight=False, width=None if stream.isatty() else _PIPE_WIDTH)


console = _console(sys.stdout, stderr=False)
errors = _console(sys.stderr, stderr=True)


def show_json(value: Any) -> None:
    """One JSON document on standard output."""
    console.file.write(json.dumps(value, indent=2, sort_keys=True) + "\n")


def show_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table; an empty one says so. A first column "id" is never folded: it is there to be copied."""
    table = Table(title=plain(title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column == "id")
    count = 0
    for row in rows:
        table.add_row(*("" if cell is None else plain(cell) for cell in row))
        count += 1
    if count:
        console.print(table)
    else:
        console.print(f"{title}: none")


def when(seconds: float | None) -> str:
    """A time for people, UTC."""
    return "" if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")


def dollars(uusd: int | None) -> str:
    """Money for people."""
    return "" if uusd is None else f"${uusd_to_usd(uusd):.4f}"


def figure(value: float | None, digits: int = 3) -> str:
    """A figure for people."""
    return "" if value is None else f"{value:.{digits}f}"


def counts(by_name: Mapping[str, int]) -> str:
    """Counts by name, for people."""
    return ", ".join(f"{name} {count}" for name, count in by_name.items()) or "none"
