"""The thread of a bulk node that may wait: it writes and reads pieces, and tells the owner what happened, all in the order given.

A disk that hangs holds up this thread and no connection: pieces wait in memory, and when there is no room left, peers wait too.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from p2p.adapters.bulk.events import NodeEvent

log = logging.getLogger(__name__)
JOIN_S = 5.0
Job = Callable[[], None]


class Clerk:
    """`start` begins its thread; what is given before that waits."""

    def __init__(self, tell: Callable[[NodeEvent], None]) -> None:
        self._tell = tell
        self._due: deque[NodeEvent | Job] = deque()
        self._go: queue.SimpleQueue[bool] = queue.SimpleQueue()  # False: end
        self._is_called = False
        self._thread = threading.Thread(target=self._run, name="bulk-clerk", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def do(self, job: Job) -> None:
        """Something to write or read; `call` follows when there is no more for now."""
        self._due.append(job)

    def emit(self, event: NodeEvent) -> None:
        """Something to tell the owner."""
        self._due.append(event)
        self.call()

    def call(self) -> None:
        """See to what is due. Waking a thread costs more than what it does, so that it is done once for many jobs."""
        if self._due and not self._is_called:
            self._is_called = True
            self._go.put(True)

    def close(self) -> None:
        """Do what waits, then end. A disk that hangs is not waited for longer than a few seconds."""
        if self._thread.is_alive():
            self._go.put(False)
            self._thread.join(JOIN_S)

    def tell(self, event: NodeEvent) -> None:
        """Tell the owner at once; only from this thread."""
        try:
            self._tell(event)
        except Exception:  # a defect of the owner's: pieces must go on being written
            log.exception("the owner of a bulk node failed to take in %s", type(event).__name__)

    def _run(self) -> None:
        is_on = True
        while is_on:
            is_on = self._go.get()
            self._is_called = False  # whoever adds to the row from here on calls again
            while self._due:
                self._see_to(self._due.popleft())

    def _see_to(self, due: NodeEvent | Job) -> None:
        if not callable(due):
            self.tell(due)
            return
        try:
            due()
        except Exception:
            log.exception("a bulk node failed to write or read a piece")
