"""A time limit on one piece of work in a process's main thread, by SIGALRM. Python code cannot swallow it by catching Exception.

The limit holds between bytecodes: a single long call into C is ended only by the process's own limits, from outside.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class OutOfTime(BaseException):
    """The limit was reached."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body once it has run for `seconds`. Raises RuntimeError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a time limit by signal works in the main thread only")

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"not finished after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again and again, should a callback of a library swallow the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
