"""Child processes of the demo: the same programs that operators and GPU owners run, ended by their own handles."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from coordinator.adapters.child import child_environment
from coordinator.errors import CoordinatorError

END_S = 15.0


class DemoFailed(CoordinatorError):
    """The demo cannot go on; the words name the log to read."""


def program(name: str) -> str:
    """The installed command beside this interpreter."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise DemoFailed(f"{path} is missing: install the distribution into this environment (make setup)")
    return str(path)


class Child:
    """One running program with its log."""

    def __init__(self, name: str, command: Sequence[str], log: Path, variables: dict[str, str] | None = None) -> None:
        self.name = name
        self.log = log
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**child_environment(), **(variables or {})},
            )

    @property
    def ended(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._process.poll()

    def last_words(self) -> str:
        """The last line of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    def wait(self) -> None:
        """Until it ended; it must have ended well."""
        if self._process.wait(END_S) != 0:
            raise DemoFailed(f"{self.name} failed: {self.last_words()}; its log is {self.log}")

    def kill(self) -> None:
        """As kill -9."""
        self._process.kill()
        self._process.wait()

    def ask_to_end(self) -> None:
        """SIGTERM."""
        if self.ended is None:
            self._process.terminate()

    def end(self) -> None:
        """SIGTERM, then SIGKILL after END_S."""
        self.ask_to_end()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
