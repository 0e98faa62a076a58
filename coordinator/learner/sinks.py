"""Where a job's figures go: always metrics.jsonl in the job's directory; TensorBoard, trackio or wandb where the job names them.

Each of those is an extra of the installation, imported only when asked for. Figures come once a step, after its commit, so no sink
ever sees a step twice, a replay included. A sink that fails, as it is opened or later, costs no step: it says so on stderr and is left
out from then on. Only metrics.jsonl, whose step is then missing, is tried again at the next one.
"""

from __future__ import annotations

import errno
import importlib
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from coordinator.learner.errors import SinkMissing
from coordinator.wire.job import JobConfig

FILE = "metrics.jsonl"
Figures = Mapping[str, float]


class Sink(Protocol):
    """Takes the figures of one step."""

    def write(self, step: int, at: float, figures: Figures) -> None: ...

    def close(self) -> None: ...


class Sinks:
    """All sinks of a job."""

    def __init__(self, named: dict[str, Sink], *, logged: int | None) -> None:
        """`logged`: the first step that metrics.jsonl lacks; None: that file cannot tell."""
        self._named = named
        self.logged = logged

    def write(self, step: int, at: float, figures: Figures) -> None:
        """Hand the figures to each sink that still works."""
        for name, sink in list(self._named.items()):
            try:
                sink.write(step, at, figures)
            except Exception as error:
                what_now = "lacks that step" if name == FILE else "is left out from now on"
                sys.stderr.write(f"learner: metrics.sinks {name} failed at step {step} and {what_now}: {error}\n")
                if name != FILE:
                    del self._named[name]

    def close(self) -> None:
        """Let each sink bring its last figures to safety."""
        for name, sink in self._named.items():
            try:
                sink.close()
            except Exception as error:
                sys.stderr.write(f"learner: metrics.sinks {name} could not be closed: {error}\n")


class JsonLines:
    """One JSON object a step: "step", "at" (Unix seconds), and every figure by its name."""

    def __init__(self, path: Path) -> None:
        """Append to the file; a line that a crash cut off is removed. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.logged = _mended(path)
        self._path = path

    def write(self, step: int, at: float, figures: Figures) -> None:
        """The whole line or nothing of it. Raises OSError."""
        line = (json.dumps({"step": step, "at": at, **figures}) + "\n").encode()
        with self._path.open("ab", buffering=0) as file:
            end = file.tell()
            if file.write(line) < len(line):
                file.truncate(end)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoard:
    """Scalars by step under `tensorboard/` in the job's directory."""

    def __init__(self, directory: Path) -> None:
        module = _imported("torch.utils.tensorboard", extra="tensorboard")
        self._writer = module.SummaryWriter(log_dir=str(directory / "tensorboard"))

    def write(self, step: int, at: float, figures: Figures) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, global_step=step, walltime=at)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Tracker:
    """trackio, or wandb: the same calls, by trackio's design. A job keeps its place there across restarts."""

    def __init__(self, name: str, directory: Path, job_id: str, config: JobConfig) -> None:
        module = _imported(name, extra=name)
        place: dict[str, Any] = (
            {"name": job_id} if name == "trackio" else {"id": job_id, "name": config.name, "dir": str(directory)}
        )
        self._run = module.init(project=config.metrics.project, config=config.model_dump(mode="json"), resume="allow", **place)

    def write(self, step: int, at: float, figures: Figures) -> None:
        self._run.log({**figures, "at": at}, step=step)

    def close(self) -> None:
        self._run.finish()


def open_sinks(directory: Path | None, job_id: str, config: JobConfig) -> Sinks:
    """The job's sinks, none without a directory; one that cannot be opened is left out. Raises SinkMissing: a package is not installed."""
    if directory is None:
        return Sinks({}, logged=0)
    named: dict[str, Sink] = {}
    logged = None
    try:
        lines = JsonLines(directory / FILE)
        named[FILE], logged = lines, lines.logged
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f"learner: {directory / FILE} cannot be continued and is left out: {error}; move it away\n")
    openers: dict[str, Callable[[], Sink]] = {
        "tensorboard": lambda: TensorBoard(directory),
        "trackio": lambda: Tracker("trackio", directory, job_id, config),
        "wandb": lambda: Tracker("wandb", directory, job_id, config),
    }
    for name in config.metrics.sinks:
        try:
            named[name] = openers[name]()
        except SinkMissing:
            raise
        except Exception as error:  # no route, no key, a full disk
            sys.stderr.write(f"learner: metrics.sinks {name} could not be opened and is left out: {error}\n")
    return Sinks(named, logged=logged)


def _mended(path: Path) -> int:
    """Cut off what is no whole line; the first step that the file lacks."""
    if not path.exists():
        return 0
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    lines = whole.splitlines()
    return int(json.loads(lines[-1])["step"]) + 1 if lines else 0


def _imported(module: str, *, extra: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise SinkMissing(
            f"metrics.sinks names {extra!r}, which is not installed beside the learner ({error}): pip install 'echo2[{extra}]', "
            "or remove it from metrics.sinks"
        ) from error
