"""A time limit on one piece of work in a process's main thread, by SIGALRM. Python code cannot swallow it by catching Exception.

The limit holds between bytecodes: a single long call into C is ended only by the process's own limits, from outside.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# Nothing can be raised out of the callback of a weak reference or a finaliser: an alarm that falls there rings again, after this long.
RING_AGAIN_S = 0.001


class OutOfTime(BaseException):
    """The limit was reached."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise OutOfTime in the body once it has run for `seconds`. Raises RuntimeError outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("a time limit by signal works in the main thread only")

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise OutOfTime(f"not finished after {seconds:g} s")

    def swallowed(unraisable: sys.UnraisableHookArgs) -> None:
        if isinstance(unraisable.exc_value, OutOfTime):
            signal.setitimer(signal.ITIMER_REAL, RING_AGAIN_S, seconds)
        else:
            report(unraisable)

    before, report = signal.signal(signal.SIGALRM, ring), sys.unraisablehook
    sys.unraisablehook = swallowed
    signal.setitimer(signal.ITIMER_REAL, seconds, seconds)  # again and again, should a library catch everything
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = report
