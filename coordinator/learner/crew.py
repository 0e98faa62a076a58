"""The other ranks, as children of rank 0: started with the job, ended with it, and the end of one is the end of all.

Each gets on its standard input the lines that rank 0 gets from the coordinator, but for those that rank 0 deals with alone, and ends
when that pipe closes; so ranks need no collective to wait for work, and none is left behind when rank 0 dies in whatever way (a stopped
process reads no pipe: for that there is the kernel's signal, see `process.follow`). Where one ends unasked, rank 0 ends at once, in
the middle of a collective if need be: the coordinator sees the link close, and starts them all anew.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from coordinator.learner import team
from coordinator.learner.errors import RanksRefused
from coordinator.learner.team import Team

RANK_LOST = 4
END_S = 10.0
OWN_WORDS_S = 2.0  # what failed one rank often fails rank 0 as well, and then it can tell the coordinator so itself
WORDS_LIMIT = 200
PREFIX = "echo2-ranks-"


class Crew:
    """Rank 0's hold on the others."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._folder: Path | None = None
        self._others: list[subprocess.Popen[bytes]] = []
        self._ending = threading.Event()

    def start(self, size: int) -> None:
        """Start ranks 1 to `size` - 1; once only, and not where `join` will refuse them."""
        if self._others or size == 1 or team.refusal(size, self._device) is not None:
            return
        self._folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        for rank in range(1, size):
            self._others.append(self._spawn(rank, size, self._folder / "meeting"))
            threading.Thread(target=self._watch, args=(rank, self._others[-1]), name=f"rank {rank}", daemon=True).start()

    def forward(self, line: bytes) -> None:
        """Hand a request to the others. They read on while they compute, so a long one does not wait for them."""
        for process in self._others:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # it ended: its watcher ends this process
                process.stdin.write(line)
                process.stdin.flush()

    def join(self, size: int) -> Team:
        """Rank 0 of a team of `size`; waits for the others. Raises RanksRefused."""
        if (words := team.refusal(size, self._device)) is not None:
            raise RanksRefused(words)
        if self._folder is None:
            return Team(device=self._device)
        return team.join(0, size, meeting=self._folder / "meeting", device=self._device)

    def close(self) -> None:
        """End the others, whatever they do."""
        self._ending.set()
        for process in self._others:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._others:
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
        self._forget()

    def _spawn(self, rank: int, size: int, meeting: Path) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "coordinator.learner.process", "--rank", str(rank), "--ranks", str(size)]
        command += ["--meeting", str(meeting), "--device", self._device]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        if self._ending.wait(OWN_WORDS_S if code > 0 else 0.0):
            return
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}{self._words(rank)}"
        self._forget()
        sys.stderr.write(f"learner: rank {rank} ended {how}; all ranks end\n")
        sys.stderr.flush()
        _ended(RANK_LOST)

    def _words(self, rank: int) -> str:
        """Why it ended, where it could say so."""
        with contextlib.suppress(OSError):
            if self._folder is not None:
                return f" ({_words_of(self._folder, rank).read_text(errors='replace')})"
        return ""

    def _forget(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def _ended(code: int) -> None:
    """End this process at once, whatever its other threads are in."""
    os._exit(code)


def leave_words(folder: Path, rank: int, words: str) -> None:
    """Of a rank that ends, for rank 0, whose last line in the log is what the coordinator reads."""
    with contextlib.suppress(OSError):
        _words_of(folder, rank).write_text(words.partition("\n")[0][:WORDS_LIMIT])


def _words_of(folder: Path, rank: int) -> Path:
    return folder / f"words-{rank}"
