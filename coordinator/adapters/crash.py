"""Commit points for crash tests: the process kills itself, as kill -9 would, when it reaches the named point for the nth time."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable


def _never(_: str) -> None:
    """No crash is planned."""


def crash_at(point: str | None) -> Callable[[str], None]:
    """A function to call at commit points. `point` is NAME or NAME:COUNT; None never crashes."""
    if point is None:
        return _never
    wanted, _, count = point.partition(":")
    nth = int(count or 1)
    seen: Counter[str] = Counter()

    def reach(name: str) -> None:
        seen[name] += 1
        if name == wanted and seen[name] == nth:
            os.kill(os.getpid(), signal.SIGKILL)

    return reach
