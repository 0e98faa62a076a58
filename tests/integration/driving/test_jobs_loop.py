"""The jobs loop: which jobs run, what it survives; and budgets of money and time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from coordinator import jobs_loop
from coordinator.domain.model import Event, Job, JobState, QuoteRow
from coordinator.domain.states import JOB, move, resumed_event
from coordinator.jobs_loop import JobsLoop
from coordinator.service import spending
from coordinator.service.deps import Deps
from coordinator.service.driving import Tools
from coordinator.service.job_ports import LearnerHostFault
from coordinator.service.ledger import Books, fund
from coordinator.store.errors import StoreBusy, StoreEnded
from pricing import ledger
from pricing.ledger import Claim
from tests.integration.driving.pretend import PretendLearners, PretendPlane, PretendPublisher, pretend_workers
from tests.integration.driving.scene import STEPS, check, config, row, submit


@asynccontextmanager
async def looping(deps: Deps, learners: PretendLearners | None = None) -> AsyncIterator[asyncio.Task[None]]:
    tools = Tools(learners or PretendLearners(), PretendPublisher(), PretendPlane())
    task = asyncio.create_task(JobsLoop(deps, tools).run())
    workers = [asyncio.create_task(pretend_workers(deps, job_id)) for job_id in ("j1", "j2")]
    try:
        yield task
    finally:
        for one in (task, *workers):
            one.cancel()
        await asyncio.gather(task, *workers, return_exceptions=True)


async def until(deps: Deps, job_id: str, *states: JobState) -> None:
    async with asyncio.timeout(10):
        while (await row(deps, job_id)).state not in states:
            await asyncio.sleep(0.02)


async def second(deps: Deps) -> None:
    """A younger job beside the first."""
    job = replace(await row(deps, "j1"), id="j2", created_at=deps.clock.now())
    await deps.store.write(lambda tx: tx.put(job))


async def test_two_jobs_at_once(deps: Deps) -> None:
    """Each has its learner, prompts, batches and versions of its own."""
    deps = replace(deps, settings=replace(deps.settings, max_running_jobs=2))
    await submit(deps, config())
    await second(deps)
    async with looping(deps):
        for job_id in ("j1", "j2"):
            await until(deps, job_id, JobState.COMPLETED)
    for job_id in ("j1", "j2"):
        job = await row(deps, job_id)
        assert job.committed_steps == STEPS
        await check(deps, job)


@pytest.mark.parametrize("step", [5, STEPS])
async def test_a_host_that_refuses_its_learner_pauses_the_job_in_words(deps: Deps, step: int) -> None:
    """A full disk is no internal error; resumed, the job makes the checkpoint that it lacks, the last one too, and goes on."""

    async def full() -> None:
        raise LearnerHostFault(
            "checkpoint failed: [Errno 28] No space left on device; make room or repair the path, then ask again"
        )

    await submit(deps, config())
    async with looping(deps, PretendLearners(hooks={f"checkpoint:{step}": full})):
        await until(deps, "j1", JobState.PAUSED)
        job = await row(deps, "j1")
        assert job.committed_steps == step
        assert job.reason.startswith("the learner's host refused, nothing is lost: checkpoint failed: [Errno 28] No space left")
        await deps.store.write(_resume)
        await until(deps, "j1", JobState.COMPLETED)
    events = await deps.store.read(lambda r: r.select(Event, job_id="j1", kind="checkpointed", order_by="seq"))
    assert [event.data["step"] for event in events] == [5, 10, STEPS]
    await check(deps, await row(deps, "j1"))


async def _resume(tx) -> None:
    job = await tx.get(Job, "j1")
    await tx.put(replace(job, state=move(JOB, job.state, resumed_event(job.resume_state)), reason=""))


async def test_a_paused_job_does_not_keep_others_waiting(deps: Deps) -> None:
    """Its driver gives its place to the next job; resumed, it has its turn again."""
    deps = replace(deps, settings=replace(deps.settings, paused_learner_s=0.0))
    await submit(deps, config(budget={"steps": 100_000}))
    await second(deps)
    await deps.store.write(lambda tx: _steps(tx, "j2", STEPS))
    async with looping(deps):
        async with asyncio.timeout(10):
            while (await row(deps, "j1")).committed_steps < 2:
                await asyncio.sleep(0.02)
        job = await row(deps, "j1")
        await deps.store.write(lambda tx: _pause(tx, deps))
        await until(deps, "j2", JobState.COMPLETED)
        assert (await row(deps, "j1")).state is JobState.PAUSED
        assert job.state is JobState.RUNNING


async def _steps(tx, job_id: str, steps: int) -> None:
    job = await tx.get(Job, job_id)
    await tx.put(replace(job, config=config(budget={"steps": steps})))


async def _pause(tx, deps: Deps) -> None:
    job = await tx.get(Job, "j1")
    await tx.put(replace(job, state=JobState.PAUSED, resume_state=job.state, state_since=deps.clock.now()))


async def test_a_busy_store_is_no_end_and_a_dead_one_is(deps: Deps, monkeypatch: pytest.MonkeyPatch) -> None:
    """What passes is waited for; a store that has ended ends the loop, so that the process does."""
    errors: list[Exception] = [StoreBusy("a"), OSError(28, "No space left on device")]

    async def failing(_: JobsLoop) -> None:
        if errors:
            raise errors.pop(0)
        raise StoreEnded("the lock is gone")

    monkeypatch.setattr(JobsLoop, "_turn", failing)
    monkeypatch.setattr("coordinator.jobs_loop.TURN_S", 0.01)
    async with looping(deps) as task:
        async with asyncio.timeout(5):
            with pytest.raises(StoreEnded):
                await task


async def test_what_the_ledger_holds_as_spent_pauses_a_job(deps: Deps) -> None:
    """`budget.usd` of 0.01 is 10,000 uUSD: paused at the last of them, not before."""
    job_id = await submit(deps, config(budget={"usd": 0.01}))
    job = replace(await row(deps, job_id), state=JobState.RUNNING)
    quote, claim = QuoteRow("q", job_id, "w", 1, "active", 1_000_000, 0, 0.0, 1e9, "cheap"), Claim(job_id, "q")

    async def pay(tx, owed: int, paid: int) -> None:
        books = await Books.open(tx, job_id, ("reserved/q", "earned/q"))
        fund(books, job)
        books.must(ledger.reserve(books.balances, job_id, "q", uusd=owed - paid, reason="to be spent"))
        books.must(ledger.settle(books.balances, claim, owed=owed, paid=paid, reason="spent"))
        await books.save(tx, now=1.0)

    await deps.store.write(lambda tx: tx.put(job, quote))
    await deps.store.write(lambda tx: pay(tx, 9_999, 0))
    assert not await spending.over_budget(deps, job)
    await deps.store.write(lambda tx: pay(tx, 10_000, 9_999))
    assert await spending.over_budget(deps, job)
    assert "budget.usd" in (await row(deps, job_id)).reason


async def test_a_deadline_pauses(deps: Deps) -> None:
    """`budget.deadline_hours` counts from the submission."""
    job_id = await submit(deps, config(budget={"deadline_hours": 1.0}))
    job = replace(await row(deps, job_id), state=JobState.RUNNING)
    await deps.store.write(lambda tx: tx.put(job))
    assert not await spending.over_budget(deps, job)
    late = replace(job, created_at=job.created_at - 3700)
    await deps.store.write(lambda tx: tx.put(late))
    assert await spending.over_budget(deps, late)
    paused = await row(deps, job_id)
    assert (paused.state, "deadline_hours" in paused.reason) == (JobState.PAUSED, True)


class Late(PretendPlane):
    """A plane whose prompts are late, as after a suspended host: the first `times` calls from the second on."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.calls = 0
        self.times = times

    async def prompts(self, split, indices):
        self.calls += 1
        if 1 < self.calls <= 1 + self.times:
            raise TimeoutError("a read did not finish in time")
        return await super().prompts(split, indices)


@pytest.mark.parametrize(("times", "end"), [(1, JobState.COMPLETED), (100, JobState.PAUSED)])
async def test_a_passed_deadline_is_no_fault_of_the_job(deps: Deps, monkeypatch, times: int, end: JobState) -> None:
    """The driver starts again, and the job goes on; when that does not help, the job pauses with the words."""
    monkeypatch.setattr(jobs_loop, "TURN_S", 0.02)
    await submit(deps, config())
    plane = Late(times)
    loop = asyncio.create_task(JobsLoop(deps, Tools(PretendLearners(), PretendPublisher(), plane)).run())
    workers = asyncio.create_task(pretend_workers(deps, "j1"))
    try:
        await until(deps, "j1", end)
    finally:
        for task in (loop, workers):
            task.cancel()
        await asyncio.gather(loop, workers, return_exceptions=True)
    job = await row(deps, "j1")
    assert plane.calls > 2
    assert job.reason.startswith("internal error, nothing is lost: TimeoutError") is (end is JobState.PAUSED)
    await check(deps, job)
