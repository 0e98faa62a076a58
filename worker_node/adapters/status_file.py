"""The status file and the lock of a running worker: what `echo2-worker status` and `drain` read."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from worker_node.errors import ConfigError

STATUS_FILE = "status.json"
LOCK_FILE = "lock"
_LOCK_TRIES = 10
_LOCK_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class Status:
    """One look at a running worker. Times are Unix seconds of its own clock, money micro-dollars."""

    pid: int
    started_at: float
    updated_at: float
    url: str
    name: str
    worker_id: str
    price_uusd_per_hour: int
    engine: str
    working: bool
    because: str
    phase: str
    coordinator_state: str = ""
    coordinator_reason: str = ""
    loaded: str = ""
    newest: str = ""
    live_leases: int = 0
    generating: int = 0
    unsent: int = 0
    tokens_per_s: float = 0.0
    fetch_percent: float | None = None
    control: str = ""  # which way control messages go
    neighbours: str = ""  # what they say they hold
    accepted_here: int = 0  # completions accepted since this process started, each under a checked receipt
    account: dict[str, Any] | None = None  # wire Account; None: not asked yet
    notes: list[dict[str, Any]] = field(default_factory=list)  # newest last: what did not go as it should
    ended: str | None = None  # why the worker stopped
    price_refused: str = ""  # why the price that its owner asked for is not taken


class Lock:
    """Held while a worker runs on a state directory; the kernel frees it when the process ends, however it ends.

    The file names the process that holds it: whoever signals the worker must never hit another process of that number.
    """

    def __init__(self, state_dir: Path) -> None:
        self._path = state_dir / LOCK_FILE
        self._file: int | None = None

    def take(self, *, tries: int = _LOCK_TRIES) -> None:
        """Raises ConfigError when another worker runs here. More than one try, because `is_running` holds it for a moment."""
        descriptor = self._open()
        for left in reversed(range(tries)):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if left == 0:
                    os.close(descriptor)
                    raise ConfigError(
                        f"another worker already runs on --state-dir {self._path.parent}: stop it, or give this one a directory of its own"
                    ) from error
                time.sleep(_LOCK_PAUSE_S)
        with suppress(OSError):  # a full disk: `drain` cannot find this worker, which works all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        self._file = descriptor

    def release(self) -> None:
        """Let others in."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self) -> int:
        try:
            return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be opened: {error.strerror}; choose a --state-dir you may write") from error


def is_running(state_dir: Path) -> bool:
    """Whether a live process holds the lock."""
    try:
        descriptor = os.open(state_dir / LOCK_FILE, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def holder(state_dir: Path) -> int | None:
    """The process that holds the lock; None when none does, or when it could not write its number."""
    if not is_running(state_dir):
        return None
    text = (state_dir / LOCK_FILE).read_text("ascii", "replace").strip()
    return int(text) if text.isdecimal() and len(text) < 10 else None


def write_status(state_dir: Path, status: Status) -> None:
    """Replace the file atomically; it need not survive a power cut, so it is not synced."""
    path = state_dir / STATUS_FILE
    temporary = path.with_name(f".{STATUS_FILE}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(status)), "utf-8")
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


def read_status(state_dir: Path) -> Status | None:
    """The newest status, or None when no worker ever ran here. Raises ConfigError when it cannot be read."""
    path = state_dir / STATUS_FILE
    try:
        return Status(**json.loads(path.read_text("utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; it is written anew by the next `echo2-worker join`") from error
