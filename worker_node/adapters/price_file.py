"""The price that an owner asks of a running worker: a small file in its state directory, which every heartbeat looks at."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from worker_node.errors import ConfigError

PRICE_FILE = "price"
MOST_UUSD = 10**10  # an hour; no beat carries more
_MOST_BYTES = 32


def ask(state_dir: Path, uusd_per_hour: int) -> None:
    """Put the price where the worker finds it. Raises ConfigError when it cannot be written."""
    path = state_dir / PRICE_FILE
    temporary = path.with_name(f".{PRICE_FILE}.{os.getpid()}")
    try:
        temporary.write_text(f"{uusd_per_hour}\n", "ascii")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"--state-dir {state_dir} cannot be written: {error.strerror}") from error


def asked(state_dir: Path) -> int | None:
    """Micro-USD an hour; None when nothing was asked since the worker started, or when the file holds no price."""
    try:
        with (state_dir / PRICE_FILE).open("rb") as file:
            text = file.read(_MOST_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() and int(text) <= MOST_UUSD else None


def forget(state_dir: Path) -> None:
    """A worker that starts asks what it was started with."""
    with suppress(OSError):
        (state_dir / PRICE_FILE).unlink()
