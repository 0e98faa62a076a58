"""The queue of waiting lease requests of each job: one pump a job answers many of them in one transaction.

Without it every change of a job would wake every waiting worker into a transaction of its own. The pump alone resolves
requests. It waits for (1) a new request, (2) a change of the job's rows, woken by `Wakeups`, (3) the end of the next
request's patience, at most RECHECK_S. It ends when nobody waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from coordinator.service.deps import Deps, Watch
from coordinator.service.leasing import Ask, Outcome, grant_round, workers_awaited

log = structlog.get_logger()
RECHECK_S = 1.0
COALESCE_S = 0.02  # changes within this time are looked at together
ROUND_MOST = 32  # requests answered in one transaction
STOPPING = Outcome(reason="the coordinator is stopping", retry_after_s=5.0)
FAILED = Outcome(reason="the coordinator could not read its rows; it goes on trying", retry_after_s=5.0)


@dataclass(slots=True)
class Waiting:
    """A request at the desk."""

    ask: Ask
    until: float  # of the event loop's clock
    is_open: Callable[[], bool]  # whether its connection still stands
    answer: asyncio.Future[Outcome]
    last: Outcome = STOPPING  # what the newest look said
    newest: int = -1  # the job's newest version at the first look


@dataclass(slots=True)
class Queue:
    """One job's waiting requests, by worker, oldest first."""

    waiting: dict[str, Waiting] = field(default_factory=dict)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    pump: asyncio.Task[None] | None = None
    newest: int = -1  # the job's newest published version, as the newest look found it

    def resolve(self, waiting: Waiting, outcome: Outcome) -> None:
        """Answer a request and let it go."""
        if self.waiting.get(waiting.ask.worker_id) is waiting:
            del self.waiting[waiting.ask.worker_id]
        if not waiting.answer.done():
            waiting.answer.set_result(outcome)


class LeaseDesk:
    """All jobs' queues. At most one request a worker and job waits."""

    def __init__(self, deps: Deps) -> None:
        self._deps = deps
        self._queues: dict[str, Queue] = {}
        self._is_closed = False

    async def ask(self, ask: Ask, *, is_open: Callable[[], bool]) -> Outcome:
        """Work as soon as there is some; after `wait_s` the reason why there is none. A newer request replaces an older one."""
        if self._is_closed:
            return STOPPING
        loop = asyncio.get_running_loop()
        queue = self._queues.setdefault(ask.request.job_id, Queue())
        older = queue.waiting.get(ask.worker_id)
        if older is not None:
            queue.resolve(older, Outcome(reason="a newer request of this worker took its place"))
        waiting = Waiting(ask, loop.time() + ask.request.wait_s, is_open, loop.create_future())
        queue.waiting[ask.worker_id] = waiting
        queue.arrived.set()
        if queue.pump is None or queue.pump.done():
            queue.pump = loop.create_task(self._pump(ask.request.job_id, queue))
        return await waiting.answer

    def hasten(self, job_id: str, worker_id: str) -> None:
        """The worker confirmed newer weights: its waiting request names old ones and is answered at the next look, so that it asks anew."""
        queue = self._queues.get(job_id)
        waiting = queue.waiting.get(worker_id) if queue is not None else None
        if queue is not None and waiting is not None:
            waiting.until = 0.0
            queue.arrived.set()

    async def close(self) -> None:
        """Answer everyone and grant no more."""
        self._is_closed = True
        for queue in list(self._queues.values()):
            if queue.pump is not None:
                queue.pump.cancel()
                await asyncio.gather(queue.pump, return_exceptions=True)
            for waiting in list(queue.waiting.values()):
                queue.resolve(waiting, STOPPING)

    async def _pump(self, job_id: str, queue: Queue) -> None:
        with self._deps.wake.watch(job_id) as watch:
            while queue.waiting:
                queue.arrived.clear()
                try:
                    await self._round(job_id, queue)
                except Exception:
                    log.exception("grant_failed", job=job_id)
                    for waiting in list(queue.waiting.values()):
                        queue.resolve(waiting, FAILED)
                await _sleep(queue, watch)
        if self._queues.get(job_id) is queue:
            del self._queues[job_id]

    async def _round(self, job_id: str, queue: Queue) -> None:
        """Those that turns wait for, then those that waited first, newest weights first, until a look gives nothing; then those that just came."""
        for waiting in list(queue.waiting.values()):
            if not waiting.is_open():
                queue.resolve(waiting, STOPPING)
        known = sorted((w for w in queue.waiting.values() if w.ask.judged), key=lambda w: -w.ask.request.version)
        fresh = [w for w in queue.waiting.values() if not w.ask.judged]
        awaited = await self._awaited(job_id, known)
        for batch in _chunks([w for w in known if w.ask.worker_id in awaited]):
            await self._grant(job_id, queue, batch)
        for batch in _chunks([w for w in known if w.ask.worker_id not in awaited]):
            if not await self._grant(job_id, queue, batch):
                break
        for batch in _chunks(fresh):
            await self._grant(job_id, queue, batch)
        now = asyncio.get_running_loop().time()
        for waiting in list(queue.waiting.values()):
            # A version published meanwhile ends the wait too: the worker should fetch it now, not at its next beat.
            if waiting.ask.judged and (now >= waiting.until or waiting.newest < queue.newest):
                queue.resolve(waiting, replace(waiting.last, newest=queue.newest))

    async def _awaited(self, job_id: str, known: Sequence[Waiting]) -> frozenset[str]:
        """Workers whose turns must not wait for a look at all others; none where one look is at everybody."""
        if len(known) <= ROUND_MOST:
            return frozenset()
        return await self._deps.store.read(lambda r: workers_awaited(r, job_id, now=self._deps.clock.now()))

    async def _grant(self, job_id: str, queue: Queue, batch: Sequence[Waiting]) -> bool:
        """One transaction; whether it granted anything."""
        asks = [waiting.ask for waiting in batch]
        outcomes = await self._deps.store.write(lambda tx: grant_round(tx, self._deps, job_id, asks))
        self._deps.reach("lease.rows_written")
        for waiting in batch:
            outcome = outcomes[waiting.ask.worker_id]
            queue.newest = max(queue.newest, outcome.newest)
            if outcome.leases and waiting.answer.done():  # replaced meanwhile: the newer request gets the work
                waiting = queue.waiting.get(waiting.ask.worker_id, waiting)  # noqa: PLW2901
            if outcome.leases or outcome.final:
                queue.resolve(waiting, outcome)
            else:
                if not waiting.ask.judged:
                    waiting.newest = outcome.newest
                waiting.ask = replace(waiting.ask, judged=True)
                waiting.last = outcome
        granted = any(outcome.leases for outcome in outcomes.values())
        if granted:
            self._deps.wake.notify(job_id)
        return granted


def _chunks(waiting: Sequence[Waiting]) -> list[Sequence[Waiting]]:
    return [waiting[start : start + ROUND_MOST] for start in range(0, len(waiting), ROUND_MOST)]


async def _sleep(queue: Queue, watch: Watch) -> None:
    """Until something changed or the next request's patience ends."""
    if not queue.waiting:
        return
    now = asyncio.get_running_loop().time()
    soonest = min(waiting.until for waiting in queue.waiting.values())
    timeout_s = min(max(soonest - now, 0.0), RECHECK_S)
    changed = asyncio.ensure_future(watch.wait(timeout_s))
    arrived = asyncio.ensure_future(queue.arrived.wait())
    try:
        await asyncio.wait([changed, arrived], return_when=asyncio.FIRST_COMPLETED)
    finally:
        changed.cancel()
        arrived.cancel()
        await asyncio.gather(changed, arrived, return_exceptions=True)
    await asyncio.sleep(COALESCE_S)
