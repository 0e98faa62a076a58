"""Messages between workers and the coordinator: delayed, lost, repeated, reordered by their delays, cut off by partitions.

A call is a request and its reply. What is lost, either way, comes back as a CallError of the kind that the real client raises.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, TypeVar

from coordinator.service.worker_refusals import ProtocolRefusal
from simulator.faults.front import Front, Sender
from worker_node.adapters.replies import OUTCOMES
from worker_node.domain.events import Outcome
from worker_node.errors import CallError

if TYPE_CHECKING:
    from simulator.faults.host import Host

T = TypeVar("T")
TIMEOUT_S = 4.0
Work = Callable[[Front, Sender], Awaitable[T]]


@dataclass(slots=True)
class Line:
    """One worker's way to the coordinator. Its clock: what it believes the time is, corrected by what refusals told it."""

    host: Host
    rng: Random
    latency_s: float
    loss: float
    duplicates: float
    worker_id: str
    skew_s: float
    offset_s: float = 0.0
    cut_until: float = 0.0

    def wall(self) -> float:
        """The coordinator's time as this worker knows it."""
        return self.host.world_time() + self.skew_s + self.offset_s

    async def call(self, epoch: int, work: Work[T], *, timeout_s: float = TIMEOUT_S) -> T:
        """Send, wait, receive. Raises CallError."""
        sender = Sender(self.worker_id, epoch, self.wall(), f"{self.rng.getrandbits(128):032x}")
        loop = asyncio.get_running_loop()
        ends = loop.time() + timeout_s
        await self._travel(ends)
        front, life = self.host.front, self.host.life
        if front is None:
            raise CallError(Outcome.TRY_AGAIN, "no_answer", "connection refused")
        task = self.host.spawn(self._outcome(work(front, sender), life))
        if self.rng.random() < self.duplicates:
            loop.call_later(self.rng.uniform(0.0, 2.0), self._repeat, life, sender, work)
        done, _ = await asyncio.wait([task], timeout=ends - loop.time())
        if not done:
            raise CallError(Outcome.TRY_AGAIN, "no_answer", f"no answer within {timeout_s:.0f} s")
        if task.cancelled() or self.host.life != life:
            raise CallError(Outcome.TRY_AGAIN, "no_answer", "the connection ended")
        answer = task.result()
        await self._travel(ends)
        if isinstance(answer, ProtocolRefusal):
            raise self._refused(answer)
        if isinstance(answer, Exception):
            raise CallError(Outcome.TRY_AGAIN, "internal_error", str(answer))
        return answer

    async def _travel(self, ends: float) -> None:
        """One way, or not at all."""
        loop = asyncio.get_running_loop()
        if loop.time() < self.cut_until or self.rng.random() < self.loss:
            await asyncio.sleep(ends - loop.time())
            raise CallError(Outcome.TRY_AGAIN, "no_answer", "nothing came back")
        await asyncio.sleep(self.latency_s * self.rng.uniform(0.5, 2.0))

    def _repeat(self, life: int, sender: Sender, work: Work[T]) -> None:
        """The network delivers the very same request again; nobody waits for its answer."""
        if self.host.front is not None and self.host.life == life:
            self.host.spawn(self._outcome(work(self.host.front, sender), life))

    def _refused(self, refusal: ProtocolRefusal) -> CallError:
        """As the client reads it; the server's time corrects the clock."""
        if refusal.code in ("clock_skew", "before_restart"):
            self.offset_s = self.host.clock.now() - self.host.world_time() - self.skew_s
        outcome = OUTCOMES.get(refusal.code)
        if outcome is None:
            outcome = Outcome.TRY_AGAIN if refusal.status >= 500 or refusal.status in (408, 425, 429) else Outcome.REFUSED
        return CallError(outcome, refusal.code, refusal.detail, retry_after_s=min(refusal.retry_after_s or 0.0, 5.0))

    async def _outcome(self, work: Awaitable[T], life: int) -> T | Exception:
        """What came of it. A failure that is no refusal is the coordinator's own, unless it is dying."""
        try:
            return await work
        except ProtocolRefusal as refusal:
            return refusal
        except Exception as error:
            if self.host.front is not None and self.host.life == life:
                self.host.world.broke(f"the coordinator failed on a request of {self.worker_id}: {error!r}")
            return error
