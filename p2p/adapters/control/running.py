"""The crossing between an asyncio program and one life of the trio thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

import trio

from p2p.adapters.control.node import Node
from p2p.errors import ControlDown, ControlError, ControlTimeout, ControlUnreachable

_BEAT_S = 0.5
T = TypeVar("T")


class Running:
    """A node that runs, and what is being asked of it. Made in the trio thread; `soon`, `call`, `end` and `fail_all` are for other threads."""

    def __init__(self, node: Node, nursery: trio.Nursery) -> None:
        self.node = node
        self.beat_at = time.monotonic()
        self.connections = 0
        self._nursery = nursery
        self._token = trio.lowlevel.current_trio_token()
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._why_down: ControlDown | None = None

    def soon(self, act: Callable[[], object]) -> None:
        """Do this in the trio thread, in the order of the calls; nothing happens when the thread is down."""
        with contextlib.suppress(trio.RunFinishedError):
            self._token.run_sync_soon(self._do, act)

    def spawn(self, work: Callable[[], Awaitable[None]]) -> None:
        """Start a task of the node. In the trio thread only."""
        self._nursery.start_soon(work)

    async def call(self, work: Callable[[], Awaitable[T]], timeout_s: float) -> T:
        """What `work` returns, run in the trio thread. Raises its ControlError, ControlDown, or ControlTimeout."""
        future: Future[T] = Future()
        scope = trio.CancelScope()
        self._enlist(future)
        self.soon(lambda: self._nursery.start_soon(self._perform, work, future, scope))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            raise ControlTimeout(f"the control thread reports nothing for {timeout_s:g} s") from error
        finally:
            self._waiting.discard(future)
            self.soon(scope.cancel)

    def end(self) -> None:
        """Stop this life of the thread."""
        self.soon(self._nursery.cancel_scope.cancel)

    def fail_all(self, error: ControlDown) -> None:
        """The thread is down: nobody waits for it any longer."""
        with self._lock:
            self._why_down = error
            waiting = list(self._waiting)
        for future in waiting:
            _settle(future, None, error)

    async def ask_loop(self, loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, bytes]) -> bytes:
        """What `work` returns, run on an asyncio loop. Raises its ControlError, or ControlUnreachable for anything else."""
        done = trio.Event()
        try:
            future = asyncio.run_coroutine_threadsafe(work, loop)
        except RuntimeError as error:
            work.close()
            raise ControlUnreachable("this node is closing") from error
        future.add_done_callback(lambda _: self.soon(done.set))
        try:
            await done.wait()
        finally:
            future.cancel()
        try:
            return future.result()
        except ControlError:
            raise
        except Exception as error:
            raise ControlUnreachable("this node failed to answer") from error

    async def beat(self) -> None:
        """Show that the loop turns, for ever."""
        while True:
            self.beat_at = time.monotonic()
            self.connections = len(self.node.connected())
            await trio.sleep(_BEAT_S)

    def _enlist(self, future: Future[Any]) -> None:
        with self._lock:
            if self._why_down is not None:
                raise ControlDown(str(self._why_down))
            self._waiting.add(future)

    def _do(self, act: Callable[[], object]) -> None:
        """An exception here would end trio's loop without a word; in a task it ends the node with one."""
        try:
            act()
        except Exception as error:
            with contextlib.suppress(RuntimeError):  # the nursery is closed: it is ending already
                self._nursery.start_soon(_raise, error)

    async def _perform(self, work: Callable[[], Awaitable[T]], future: Future[T], scope: trio.CancelScope) -> None:
        try:
            with scope:
                _settle(future, await work(), None)
        except ControlError as error:
            _settle(future, None, error)
        except Exception as error:  # a fault inside libp2p costs this call, not the node
            _settle(future, None, ControlUnreachable(f"libp2p failed: {error!r}"))


def _settle(future: Future[Any], result: object, error: ControlError | None) -> None:
    with contextlib.suppress(InvalidStateError):  # nobody waits any more
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


async def _raise(error: Exception) -> None:
    raise error
