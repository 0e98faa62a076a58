"""What `echo2 serve` says at its start about a disk that has too little room."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.commands import serving
from coordinator.config import Settings
from coordinator.errors import CannotServe

COMMAND = [sys.executable, "-c", "from coordinator.cli import main; main()", "serve", "--port", "0"]


def test_enough_room_is_not_worth_a_word(tmp_path: Path) -> None:
    assert serving._disk_warning(Settings(data_dir=tmp_path, minimum_free_bytes=0)) is None


def test_a_disk_below_the_minimum_is_told_at_the_start_and_logged(tmp_path: Path) -> None:
    """1 EiB is more than any disk has; the words are those of `echo2 doctor`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ECHO2_")}
    least = 1 << 60
    process = subprocess.Popen(
        [*COMMAND, "--data-dir", str(tmp_path / "data")],
        env={**kept, "OMP_NUM_THREADS": "1", "ECHO2_MINIMUM_FREE_BYTES": str(least), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    said = [process.stdout.readline() for _ in range(2)]
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said[0].startswith("warning: disk: ")
    assert f"at least {least >> 20} MiB are needed (ECHO2_MINIMUM_FREE_BYTES); jobs pause" in said[0]
    assert said[1].startswith("coordinator at http")
    (logged,) = [entry for line in errors.splitlines() if (entry := json.loads(line))["event"] == "disk_short"]
    assert (logged["level"], f"warning: {logged['reason']}\n") == ("warning", said[0])


@pytest.mark.parametrize(("number", "kind", "words"), [(28, CannotServe, "on a full disk: free some"), (5, OSError, "I/O error")])
def test_a_disk_without_any_room_is_one_line_and_another_fault_is_not_called_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, kind: type[Exception], words: str
) -> None:
    """Even the store's lock cannot be written then."""

    def cannot(*_: object) -> None:
        raise OSError(number, "I/O error")

    monkeypatch.setattr("coordinator.store.lock.os.pwrite", cannot)
    monkeypatch.setattr(serving.structlog, "configure", lambda **_: None)
    with pytest.raises(kind, match=words):
        serving.serve(Settings(data_dir=tmp_path / "data", port=0))
