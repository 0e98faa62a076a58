"""N jailed children behind one bounded queue. A child that is lost, spent or old is replaced in the background.

The queue is bounded in requests and in bytes; a request that does not fit is refused in words. A slot whose restart fails is tried
again by the next request, after a back-off, and that request gets the reason: nothing waits without end.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coordinator.domain.retry import delay_s
from coordinator.environments.base import EnvironmentBroken, EnvironmentSpec
from coordinator.environments.jail import JailLimits
from coordinator.environments.link import FRAME_LIMIT_BYTES
from coordinator.environments.process import ChildLost, JailedProcess

QUEUE_REQUESTS = 65_536
QUEUE_BYTES = 4 << 30


class PoolFull(Exception):
    """The queue's bound is reached: ask again later."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """How many children, how long one may take to start, how long it may serve."""

    processes: int = 2
    start_timeout_s: float = 120.0
    requests_per_child: int = 5000
    backoff_first_s: float = 0.2
    backoff_most_s: float = 5.0


@dataclass(slots=True, eq=False)
class _Slot:
    """A child, or the failures since there was one."""

    child: JailedProcess | None = None
    failures: int = 0


class Pool:
    """Children of one environment."""

    def __init__(self, spec: EnvironmentSpec, limits: JailLimits, settings: PoolSettings) -> None:
        self._spec = spec
        self._limits = limits
        self._settings = settings
        self._idle: asyncio.Queue[_Slot] = asyncio.Queue()
        self._slots: list[_Slot] = []
        self._revivals: set[asyncio.Task[None]] = set()
        self._waiting = 0
        self._waiting_bytes = 0
        self._rng = random.Random()  # noqa: S311 (jitter of back-off)
        self._is_closed = False
        self.restarts = 0

    async def start(self) -> JailedProcess:
        """Start every child; the first is returned for its info and jail report. Raises EnvironmentBroken."""
        starts = [self._start_child() for _ in range(self._settings.processes)]
        results = await asyncio.gather(*starts, return_exceptions=True)
        children = [result for result in results if isinstance(result, JailedProcess)]
        self._slots = [_Slot(child) for child in children]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await self.close()
            raise (
                errors[0] if not isinstance(errors[0], ChildLost) else EnvironmentBroken(f"environment did not start: {errors[0]}")
            )
        for slot in self._slots:
            self._idle.put_nowait(slot)
        return children[0]

    async def ask(
        self, request: Mapping[str, Any], *, size: int, timeout_s: float, most: int = FRAME_LIMIT_BYTES
    ) -> dict[str, Any]:
        """One request of about `size` bytes to any child, answered by at most `most`; the deadline counts from when a child takes it.

        Raises ChildLost (the child was lost with it), PoolFull.
        """
        slot = await self._next_slot(size)
        try:
            child = await self._child_of(slot)
            answer = await child.ask(request, timeout_s=timeout_s, cpu_s=self._limits.cpu_s or timeout_s, most=most)
        except BaseException:
            self._release(slot, is_fit=False)
            raise
        self._release(slot, is_fit=not answer.get("spent") and child.requests < self._settings.requests_per_child)
        return answer

    async def close(self) -> None:
        """Kill every child; waiting requests get ChildLost. Idempotent."""
        self._is_closed = True
        for _ in range(self._waiting):
            self._idle.put_nowait(_Slot())
        revivals, self._revivals = self._revivals, set()
        for task in revivals:
            task.cancel()
        await asyncio.gather(*revivals, return_exceptions=True)
        slots, self._slots = self._slots, []
        await asyncio.gather(*(slot.child.kill() for slot in slots if slot.child is not None))

    async def _next_slot(self, size: int) -> _Slot:
        self._check_open()
        if self._waiting >= QUEUE_REQUESTS or self._waiting_bytes + size > QUEUE_BYTES:
            raise PoolFull(
                f"{self._waiting} requests of {self._waiting_bytes} bytes wait for grading (limits {QUEUE_REQUESTS} and {QUEUE_BYTES}): "
                "send again later"
            )
        self._waiting += 1
        self._waiting_bytes += size
        try:
            slot = await self._idle.get()
        finally:
            self._waiting -= 1
            self._waiting_bytes -= size
        self._check_open()
        return slot

    def _check_open(self) -> None:
        if self._is_closed:
            raise ChildLost("the data plane is closed", is_timeout=False)

    async def _child_of(self, slot: _Slot) -> JailedProcess:
        """The slot's child, started now when it was killed while idle, or (after the back-off) its restart had failed."""
        if slot.child is not None and slot.child.has_ended:
            await slot.child.kill()
            slot.child = None
        if slot.child is None:
            await self._refill(slot)
        if slot.child is None:
            raise ChildLost("no grading process could be started", is_timeout=False)
        return slot.child

    def _release(self, slot: _Slot, *, is_fit: bool) -> None:
        if is_fit:
            self._idle.put_nowait(slot)
        elif slot in self._slots:
            task = asyncio.get_running_loop().create_task(self._revive(slot))
            self._revivals.add(task)
            task.add_done_callback(self._revivals.discard)

    async def _revive(self, slot: _Slot) -> None:
        """Replace the slot's child; the slot is handed out again whether or not that worked."""
        if slot.child is not None:
            await slot.child.kill()
            slot.child = None
        try:
            await self._refill(slot)
        except (ChildLost, EnvironmentBroken, OSError):
            pass  # the next request tries again, and gets the reason
        finally:
            self._idle.put_nowait(slot)

    async def _refill(self, slot: _Slot) -> None:
        """A new child for an empty slot, after the back-off its failures earn. Raises ChildLost with the reason."""
        settings = self._settings
        if slot.failures:
            await asyncio.sleep(
                delay_s(slot.failures, first_s=settings.backoff_first_s, most_s=settings.backoff_most_s, rng=self._rng)
            )
        slot.failures += 1
        self.restarts += 1
        try:
            child = await self._start_child()
        except (EnvironmentBroken, OSError) as error:
            raise ChildLost(f"no grading process could be started: {error}", is_timeout=False) from error
        if self._is_closed:
            await child.kill()
        self._check_open()
        slot.child, slot.failures = child, 0

    async def _start_child(self) -> JailedProcess:
        return await JailedProcess.start(self._spec, self._limits, timeout_s=self._settings.start_timeout_s)
