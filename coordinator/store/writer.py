"""Group commit: one task runs queued actions in turn, each undoable alone, and commits many of them at once.

A caller's future resolves only after the commit that holds its rows is durable. The queue is bounded; an action has a
deadline; once the lock or the connection is lost the writer ends and every later call raises StoreEnded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from coordinator.store.errors import StoreBusy, StoreEnded, StoreError
from coordinator.store.links import Link
from coordinator.store.lock import WriterLock
from coordinator.store.queries import Queries
from coordinator.store.transaction import Writing

T = TypeVar("T")
Action = Callable[[Writing], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class WriterLimits:
    """Bounds of the writer."""

    queued: int = 4096  # actions waiting
    enqueue_s: float = 30.0  # a caller waits this long for a place
    action_s: float = 30.0  # one action may take this long
    commit_s: float = 60.0  # BEGIN, COMMIT and ROLLBACK may take this long
    group_actions: int = 256  # actions per commit
    group_s: float = 0.05  # no further action joins a commit after this


@dataclass(frozen=True, slots=True)
class _Queued:
    action: Action
    done: asyncio.Future[Any]


@dataclass(frozen=True, slots=True)
class _Ran:
    """An action that waits for the commit."""

    done: asyncio.Future[Any]
    result: Any


class GroupWriter:
    """The one writer of a store. `run` is its life; `write` is called by everyone else."""

    def __init__(self, link: Link, queries: Queries, lock: WriterLock, limits: WriterLimits) -> None:
        self._link = link
        self._queries = queries
        self._lock = lock
        self._limits = limits
        self._queue: asyncio.Queue[_Queued] = asyncio.Queue(limits.queued)
        self._ended: str = ""
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to run actions."""
        self._task = asyncio.create_task(self._run(), name="store writer")

    async def write(self, action: Callable[[Writing], Awaitable[T]]) -> T:
        """Run `action` and return its result once durable.

        Raises what the action raised (it is undone, alone), StoreBusy, StoreFull or StoreEnded. A caller that is cancelled
        does not know whether its action was written.
        """
        if asyncio.current_task() is self._task:
            raise StoreError("write was called from inside an action: use the transaction that the action was given")
        queued = _Queued(action, asyncio.get_running_loop().create_future())
        try:
            async with asyncio.timeout(self._limits.enqueue_s):
                await self._enqueue(queued)
        except TimeoutError:
            raise StoreBusy(f"{self._limits.queued} writes are queued and none moved for {self._limits.enqueue_s} s") from None
        result: T = await queued.done
        return result

    async def close(self) -> None:
        """Finish what is queued, then refuse."""
        if not self._ended:
            self._ended = "the store was closed"
            await self._queue.join()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _enqueue(self, queued: _Queued) -> None:
        if self._ended:
            raise StoreEnded(self._ended)
        await self._queue.put(queued)
        if self._task is None or self._task.done():
            self._refuse_queued(self._ended or "the store's writer does not run")

    async def _run(self) -> None:
        why = "the store's writer was stopped"
        try:
            while True:
                await self._group(await self._queue.get())
        except StoreEnded as error:
            why = str(error)
        except Exception as error:  # becomes the reason of every later refusal
            why = f"the store's writer failed: {error!r}"
        finally:
            self._ended = self._ended or why
            self._refuse_queued(self._ended)

    async def _group(self, first: _Queued) -> None:
        """One transaction, its actions and its commit. Raises StoreEnded when the writer must end."""
        ran: list[_Ran] = []
        taken: list[_Queued] = []
        try:
            self._lock.check()
            await self._run_group(first, taken, ran)
        except BaseException as error:
            await self._give_up(ran, taken or [first], error)
        else:
            for one in ran:
                _resolve(one.done, one.result)
        finally:
            for _ in taken or [first]:
                self._queue.task_done()

    async def _run_group(self, first: _Queued, taken: list[_Queued], ran: list[_Ran]) -> None:
        await self._bounded(self._link.begin_write(), "begin a transaction")
        until = time.monotonic() + self._limits.group_s
        queued: _Queued | None = first
        while queued is not None:
            taken.append(queued)
            if not queued.done.done():  # else its caller has gone
                await self._run_action(queued, ran)
            queued = self._next(len(taken), until)
        await self._bounded(self._link.commit(), "commit")

    def _next(self, taken: int, until: float) -> _Queued | None:
        if taken >= self._limits.group_actions or self._queue.empty() or time.monotonic() > until:
            return None
        return self._queue.get_nowait()

    async def _run_action(self, queued: _Queued, ran: list[_Ran]) -> None:
        """Run one action; its own failure goes to its caller and is undone. Raises only when the transaction is lost."""
        transaction = Writing(self._link, self._queries)
        try:
            async with asyncio.timeout(self._limits.action_s):
                await transaction.start()
                result = await queued.action(transaction)
            if transaction.is_spoilt:
                raise StoreError("a statement of this action failed and the action hid the error: nothing of it was kept")
        except asyncio.CancelledError as error:
            if _is_being_cancelled():
                raise
            await self._undo(transaction, queued, StoreError(f"the action awaited something that was cancelled: {error!r}"))
        except Exception as error:
            await self._undo(transaction, queued, self._in_words(error))
        else:
            ran.append(_Ran(queued.done, result))
        finally:
            transaction.end("this transaction has ended: use the one that the running action was given")

    async def _undo(self, transaction: Writing, queued: _Queued, error: Exception) -> None:
        """Undo one action and tell its caller. Raises when its neighbours are lost with it."""
        _fail(queued.done, error)
        await self._bounded(transaction.undo(), "undo an action")
        if not self._link.in_transaction():
            raise StoreError(f"the database gave up the whole transaction because of another write: {error}") from error

    def _in_words(self, error: Exception) -> Exception:
        if isinstance(error, TimeoutError) and not str(error):
            return StoreBusy(f"the action did not finish or a call in it timed out ({self._limits.action_s} s): it was undone")
        return error

    async def _bounded(self, work: Awaitable[None], what: str) -> None:
        try:
            async with asyncio.timeout(self._limits.commit_s):
                await work
        except TimeoutError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreEnded(f"the database did not {what} within {self._limits.commit_s} s: restart the coordinator") from None

    async def _give_up(self, ran: list[_Ran], taken: list[_Queued], error: BaseException) -> None:
        """The group's transaction failed as a whole: roll back, tell every caller, go on unless the writer has ended."""
        told = error if isinstance(error, Exception) else StoreEnded("the store's writer was stopped")
        for done in (*(queued.done for queued in taken), *(one.done for one in ran)):
            _fail(done, told)
        if not isinstance(error, StoreError) or isinstance(error, StoreEnded):
            raise error
        try:
            await self._bounded(self._link.rollback(), "roll back")
        except StoreError as failed:
            raise StoreEnded(f"a failed transaction could not be rolled back ({failed}): restart the coordinator") from failed

    def _refuse_queued(self, why: str) -> None:
        while not self._queue.empty():
            _fail(self._queue.get_nowait().done, StoreEnded(why))
            self._queue.task_done()


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _resolve(done: asyncio.Future[Any], result: Any) -> None:
    if not done.done():
        done.set_result(result)


def _fail(done: asyncio.Future[Any], error: Exception) -> None:
    if not done.done():
        done.set_exception(error)
