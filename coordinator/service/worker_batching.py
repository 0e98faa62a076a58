"""Many small requests, few transactions: while one call is under way, what arrives meanwhile forms the next.

Nothing is delayed when there is little to do, and the more there is to do, the larger the calls grow.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

A = TypeVar("A")
R = TypeVar("R")


class Batcher(Generic[A, R]):
    """Turns `ask` for one into `run` for many. `run` answers in order; what it raises, all of its askers get."""

    def __init__(self, run: Callable[[Sequence[A]], Awaitable[Sequence[R]]], *, most: int) -> None:
        self._run = run
        self._most = most
        self._waiting: deque[tuple[A, asyncio.Future[R]]] = deque()
        self._task: asyncio.Task[None] | None = None

    async def ask(self, what: A) -> R:
        """The answer for one."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[R] = loop.create_future()
        self._waiting.append((what, answer))
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._work())
        return await answer

    async def _work(self) -> None:
        while self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._most, len(self._waiting)))]
            try:
                results = await self._run([what for what, _ in batch])
            except BaseException as error:
                for _, answer in batch:
                    if not answer.done():
                        answer.set_exception(error if isinstance(error, Exception) else RuntimeError("the coordinator is stopping"))
                if not isinstance(error, Exception):
                    raise
                continue
            for (_, answer), result in zip(batch, results, strict=True):
                if not answer.done():
                    answer.set_result(result)
