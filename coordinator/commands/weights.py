"""What `echo2 weights` does: a version as a change to another, on plain Hugging Face directories and files."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast, get_args

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from coordinator.commands.output import console, errors, plain, show_json, show_table
from coordinator.errors import CoordinatorError
from p2p.adapters.weights_apply import apply as apply_file
from p2p.adapters.weights_check import ENCODING, Checked, Summary, check, summarise
from p2p.adapters.weights_diff import Diffed
from p2p.adapters.weights_diff import diff as diff_directories
from p2p.adapters.weights_file import Watch
from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.errors import SwarmError

SHOWN_TENSORS = 8
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_FIXES = {
    errno.ENOENT: ": check the name",
    errno.EACCES: ": you may not; name another place, or give yourself the right",
    errno.EROFS: ": name a place that can be written",
    errno.EISDIR: ": name a file that `echo2 weights diff` wrote",
}


def diff(base: Path, new: Path, out: Path, *, effort: str, threads: int, as_json: bool) -> None:
    """Write the file, and say what it holds and what it does not."""
    if effort not in get_args(Effort):
        raise CoordinatorError(f"--effort is {effort!r}; it must be one of {', '.join(get_args(Effort))}")
    with _in_words(out), _progress() as watch:
        written = diff_directories(
            base, new, out, encoding=ENCODING, encoder=Delta(cast(Effort, effort), cores=threads), threads=threads, watch=watch
        )
        summary = summarise(out)
    for name in written.without_base[:SHOWN_TENSORS]:
        errors.print(
            f"tensor {name} has no counterpart of its dtype and shape in {base}: it travels whole", style="yellow", soft_wrap=True
        )
    if (more := len(written.without_base) - SHOWN_TENSORS) > 0:
        errors.print(f"and {more} more", style="yellow")
    if as_json:
        show_json(_figures(summary) | {"not_carried": written.not_carried, "without_base": written.without_base})
        return
    _say_not_carried(new, written)
    console.print(
        f"{out}: {summary.nbytes} bytes, {_per(summary):.5f} a parameter, {_times(summary)} times smaller than the weights; "
        f"changed {_changed(summary)}",
        soft_wrap=True,
    )
    console.print(f"from {written.head.base_digest}\nto   {written.head.result_digest}", soft_wrap=True)


def apply(base: Path, file: Path, out: Path, *, as_json: bool) -> None:
    """Make the directory, and say which version it is."""
    with _in_words(out), _progress() as watch:
        delta = apply_file(base, file, out, watch=watch)
    names = sorted([*(one.name for one in delta.head.weights), *(one.name for one in delta.head.files)])
    if as_json:
        show_json({"directory": str(out), "digest": delta.head.result_digest, "files": names})
        return
    console.print(f"{out}: version {delta.head.result_digest}, {len(names)} files, verified", soft_wrap=True)


def inspect(file: Path, *, as_json: bool) -> None:
    """What a weights delta file holds."""
    with _in_words(file), _progress() as watch:
        summary = summarise(file, watch=watch)
    if as_json:
        show_json(_figures(summary))
        return
    head = summary.delta.head
    rows = (
        ("applies to", head.base_digest),
        ("gives", head.result_digest),
        ("parameters", f"{summary.parameters} in {len(summary.delta.layout.tensors)} tensors"),
        ("weight files", len(head.weights)),
        ("changed", _changed(summary)),
        ("bytes", f"{summary.nbytes}, {_per(summary):.5f} a parameter"),
        ("against the raw weights", f"{_times(summary)} times smaller"),
        ("other files", ", ".join(f"{one.name} ({'carried' if one.packed else 'as in the base'})" for one in head.files) or "none"),
    )
    show_table(str(file), ("what", "figure"), rows)
    modes = ((name, mode.shards, mode.elements, mode.changed, mode.nbytes) for name, mode in summary.modes.items())
    show_table("Shards", ("mode", "shards", "parameters", "changed", "bytes"), modes)
    largest = ((one.name, one.dtype, "x".join(map(str, one.shape)), one.nbytes) for one in summary.largest(SHOWN_TENSORS))
    show_table("Largest tensors", ("name", "dtype", "shape", "bytes"), largest)


def verify(paths: Sequence[Path], *, as_json: bool) -> None:
    """Check files and directories; exit code 1 when one is not sound."""
    with _progress() as watch:
        checked = [check(path, watch=watch) for path in paths]
    if as_json:
        show_json([{**asdict(one), "path": str(one.path)} for one in checked])
    else:
        for one in checked:
            console.print(_verdict(one, checked), soft_wrap=True)
    if any(one.problem for one in checked):
        raise typer.Exit(1)


def _verdict(one: Checked, others: Sequence[Checked]) -> str:
    """A line about one path, and how it is related to the directories beside it."""
    if one.problem:
        return f"BROKEN {one.problem}"
    if one.base_digest is None:
        return f"sound  {one.path}: version {one.digest}"
    bases = [str(other.path) for other in others if other.base_digest is None and other.digest == one.base_digest]
    results = [str(other.path) for other in others if other.base_digest is None and other.digest == one.digest]
    related = "".join([f"; applies to {name}" for name in bases] + [f"; gives {name}" for name in results])
    if not related and any(other.base_digest is None and not other.problem for other in others):
        related = "; neither applies to a directory named here nor gives one"
    return f"sound  {one.path}: makes {one.digest} of {one.base_digest}{related}"


def _figures(summary: Summary) -> dict[str, Any]:
    head = summary.delta.head
    return {
        "file": str(summary.delta.path),
        "bytes": summary.nbytes,
        "encoding": head.encoding,
        "base_digest": head.base_digest,
        "result_digest": head.result_digest,
        "parameters": summary.parameters,
        "raw_bytes": summary.raw_bytes,
        "changed": summary.changed,
        "changed_share": _share(summary),
        "carried_whole": summary.whole,
        "bytes_per_parameter": _per(summary),
        "ratio": _ratio(summary),
        "modes": {name: asdict(mode) for name, mode in summary.modes.items()},
        "weights": [{"name": one.name, "bytes": one.size, "digest": one.digest} for one in head.weights],
        "files": [{"name": one.name, "bytes": one.size, "digest": one.digest, "carried": bool(one.packed)} for one in head.files],
        "largest": [asdict(one) for one in summary.largest(SHOWN_TENSORS)],
    }


def _per(summary: Summary) -> float:
    return summary.nbytes / max(1, summary.parameters)


def _ratio(summary: Summary) -> float:
    return summary.raw_bytes / summary.nbytes


def _times(summary: Summary) -> str:
    ratio = _ratio(summary)
    return f"{ratio:.0f}" if ratio >= 10 else f"{ratio:.1f}"


def _changed(summary: Summary) -> str:
    whole = f", and {summary.whole} parameters carried whole" if summary.whole else ""
    return f"{summary.changed} ({_share(summary):.3%}){whole}"


def _share(summary: Summary) -> float:
    return summary.changed / max(1, summary.parameters)


def _say_not_carried(new: Path, written: Diffed) -> None:
    if written.not_carried:
        errors.print(f"not carried, of {new}: {', '.join(written.not_carried)}", style="yellow", soft_wrap=True)


@contextmanager
def _in_words(target: Path) -> Iterator[None]:
    """What goes wrong, as one line that names the path and the fix."""
    try:
        yield
    except SwarmError as error:
        raise CoordinatorError(str(error)) from error
    except OSError as error:
        if error.errno in _NO_ROOM:
            raise CoordinatorError(f"the disk of {target} is full: make room, or name a place on another disk") from error
        raise CoordinatorError(f"{error.filename or target}: {error.strerror}{_FIXES.get(error.errno or 0, '')}") from error


@contextmanager
def _progress() -> Iterator[Watch]:
    """A bar for each stage, on standard error, if a person looks."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def watch(stage: str, done: int, total: int) -> None:
            if stage not in tasks or done < bars.tasks[tasks[stage]].completed:
                tasks[stage] = bars.add_task(plain(stage), total=total)
            bars.update(tasks[stage], completed=done)

        yield watch
