"""Die on purpose at a named commit point, for the tests that prove a crash there loses nothing."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

COMMIT_POINTS = (
    "learner.ready",
    "learner.trained",
    "learner.snapshot.before_rename",
    "learner.snapshot.done",
    "learner.checkpoint.before_rename",
    "learner.checkpoint.done",
)


@dataclass(slots=True)
class CrashPoint:
    """Kills the process with SIGKILL when `name` is reached for the `count`-th time; an empty name never fires."""

    name: str = ""
    count: int = 1

    def reached(self, name: str) -> None:
        """Called by the code that has just come to the commit point `name`."""
        if name != self.name:
            return
        self.count -= 1
        if self.count == 0:
            os.kill(os.getpid(), signal.SIGKILL)


def parse(text: str) -> CrashPoint:
    """`NAME:COUNT`. Raises ValueError, which lists the names."""
    name, _, count = text.partition(":")
    if name not in COMMIT_POINTS or not count.isdecimal() or int(count) < 1:
        raise ValueError(
            f"--crash-at is {text!r}, expected NAME:COUNT with a count from 1 and a name of {', '.join(COMMIT_POINTS)}"
        )
    return CrashPoint(name, int(count))
