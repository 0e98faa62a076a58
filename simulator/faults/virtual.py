"""An asyncio event loop in virtual time: nothing waits, and the same program runs in the same order every time.

When nothing is ready, time jumps to the next timer. What asyncio would hand to threads runs at once. Tasks hash by the order of
their creation and watchers are woken in the order of their watching, so that no order depends on addresses or on the hash seed.
"""

from __future__ import annotations

import asyncio
from asyncio import base_events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from heapq import heappop
from typing import Any

from coordinator.service.deps import Wakeups

MOST_TURNS = 3_000_000  # of one run; more is a loop that never waits


class Stuck(Exception):
    """The program waits for something that no timer and no task will bring."""


class _Task(asyncio.Task[Any]):
    """A task that hashes by its number."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, **rest: Any) -> None:
        self._number = number
        super().__init__(coroutine, **rest)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(base_events.BaseEventLoop):
    """Use with `run_until_complete`, then `close`. Time starts at 0 seconds."""

    _ready: deque[Any]  # asyncio's own
    _scheduled: list[Any]
    _stopping: bool

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._turns = 0
        self._tasks = 0
        self.set_task_factory(self._make_task)

    def time(self) -> float:
        """Virtual seconds."""
        return self._now

    def _run_once(self) -> None:
        """One turn: what is ready now, or else what the next timer brings. Raises Stuck."""
        ready, timers = self._ready, self._scheduled
        self._turns += 1
        if self._turns > MOST_TURNS:
            raise Stuck(f"{MOST_TURNS} turns of the loop, now at {self._now:.3f} s: something never waits")
        while timers and timers[0]._cancelled:
            heappop(timers)._scheduled = False
        if not ready and not self._stopping:
            if not timers:
                raise Stuck("every task waits and no timer is set")
            self._now = max(self._now, timers[0]._when)
        while timers and timers[0]._when <= self._now:
            timer = heappop(timers)
            timer._scheduled = False
            ready.append(timer)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]  # noqa: ARG002
        """Run it now."""
        answer = self.create_future()
        try:
            answer.set_result(func(*args))
        except Exception as error:  # the caller's to see, as from a thread
            answer.set_exception(error)
        return answer

    def _make_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, context: Any = None) -> asyncio.Task[Any]:
        self._tasks += 1
        return _Task(coroutine, self._tasks, loop=loop, context=context)

    def _write_to_self(self) -> None:
        """Nobody calls from another thread."""


class _Ordered:
    """A set that iterates in the order of adding."""

    def __init__(self) -> None:
        self._items: dict[asyncio.Event, None] = {}

    def add(self, item: asyncio.Event) -> None:
        self._items[item] = None

    def discard(self, item: asyncio.Event) -> None:
        self._items.pop(item, None)

    def __iter__(self) -> Iterator[asyncio.Event]:
        return iter(list(self._items))

    def __len__(self) -> int:
        return len(self._items)


class _Topics(dict[str, Any]):
    """Waiters by topic."""

    def setdefault(self, topic: str, default: Any = None) -> Any:  # noqa: ARG002 (always an ordered set)
        return super().setdefault(topic, _Ordered())


class OrderedWakeups(Wakeups):
    """Wakes in a fixed order: topics told at one moment are sorted, and their waiters come as they began to watch."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._waiters = _Topics()
        self._loop = loop
        self._told: dict[str, None] = {}

    def notify(self, topic: str) -> None:
        """Wake those who wait on `topic`, after what runs now."""
        if not self._told:
            self._loop.call_soon(self._wake)
        self._told[topic] = None

    def _wake(self) -> None:
        told, self._told = sorted(self._told), {}
        for topic in told:
            super().notify(topic)
