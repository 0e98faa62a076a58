"""What the fault simulator stands on: virtual time, the store in memory, and laws that can fail."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from coordinator.domain.model import ApiToken, Event, Group, GroupState, LedgerEntry, Rollout, RolloutState
from coordinator.service.ports import Reader, Tx
from coordinator.store.errors import Conflict
from coordinator.store.sql import SqlStore
from simulator.faults.endings import ENDINGS
from simulator.faults.network import TIMEOUT_S
from simulator.faults.schedule import schedule
from simulator.faults.store import Change, Died, MemoryStore, Process, Rows
from simulator.faults.virtual import OrderedWakeups, Stuck, VirtualLoop
from simulator.faults.world import LawBroken, run


async def no_wait() -> None:
    """A disk without delay."""


def process() -> tuple[Process, list[list[Change]]]:
    seen: list[list[Change]] = []
    return Process(no_wait, seen.append, lambda: None, lambda: None), seen


def test_time_jumps_to_the_next_timer_and_threads_run_at_once() -> None:
    loop = VirtualLoop()

    async def program() -> tuple[float, int]:
        await asyncio.sleep(86_400)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        return loop.time(), await asyncio.to_thread(lambda: 7)

    assert loop.run_until_complete(program()) == (86_405, 7)
    loop.close()


def test_waiting_for_nothing_is_an_error() -> None:
    loop = VirtualLoop()
    task = loop.create_task(asyncio.Event().wait())
    with pytest.raises(Stuck, match="no timer"):
        loop.run_until_complete(task)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()


def test_watchers_wake_in_the_order_of_their_watching() -> None:
    loop = VirtualLoop()
    wake, woken = OrderedWakeups(loop), []

    async def wait(name: str, topic: str) -> None:
        with wake.watch(topic) as watch:
            assert await watch.wait(10)
            woken.append(name)

    async def program() -> None:
        tasks = [asyncio.create_task(wait(name, topic)) for name, topic in (("c", "x"), ("a", "x"), ("b", "w"))]
        await asyncio.sleep(1)
        wake.notify("x")
        wake.notify("w")
        await asyncio.gather(*tasks)

    loop.run_until_complete(program())
    assert woken == ["b", "c", "a"]
    assert loop.time() == 1
    loop.close()


GROUPS = [
    Group(f"j/g{n}", "j", n, n, (2, 3), 2, GroupState.ISSUED, float(n), oldest_version=n if n % 2 else None) for n in range(12)
]
ROLLOUTS = [Rollout(f"j/g{n}", slot, "j", n, RolloutState.OPEN, length=n * slot) for n in range(12) for slot in range(2)]


async def answers(reader: Reader) -> list[object]:
    """What the service asks a store."""
    return [
        await reader.get(Group, "j/g3"),
        await reader.get(Rollout, "j/g3", 1),
        await reader.get(Group, "none"),
        await reader.select(Group, job_id="j", order_by="-number", limit=3),
        await reader.select(Group, id=["j/g7", "j/g2", "none"], state=GroupState.ISSUED, order_by="number"),
        await reader.select(Group, oldest_version__lt=5, order_by="number"),
        await reader.select(Group, oldest_version=None, number__ge=4, number__le=9, order_by="number"),
        await reader.select(Group, state=[GroupState.READY, GroupState.VOID]),
        await reader.count(Rollout, group_number__gt=8),
        await reader.total(Rollout, "length", slot=1),
        await reader.highest(Group, "oldest_version"),
        await reader.highest(Group, "number", job_id="other"),
    ]


async def test_the_store_in_memory_answers_like_the_one_on_disk(store: SqlStore) -> None:
    """SQLite and PostgreSQL are the oracles."""
    memory = MemoryStore(Rows(), process()[0])

    async def fill(tx: Tx) -> list[object]:
        await tx.put(*GROUPS)
        await tx.put(*ROLLOUTS)
        await tx.put(replace(GROUPS[4], number=40))
        inserted = [await tx.insert(GROUPS[5]), await tx.insert(replace(GROUPS[5], id="j/new"))]  # the number exists too
        return [*inserted, await tx.delete(Rollout, group_number=11), await tx.delete(Event, job_id="j")]

    assert await memory.write(fill) == await store.write(fill)
    assert await memory.read(answers) == await store.read(answers)


async def test_a_write_that_fails_changes_nothing_and_ledger_rows_are_never_replaced() -> None:
    rows = Rows()
    process_, seen = process()
    memory = MemoryStore(rows, process_)
    entry = LedgerEntry("e1", 0, "fund", "j", "", "j", "words", 0.0)

    async def good(tx: Tx) -> None:
        await tx.put(entry)

    async def bad(tx: Tx) -> None:
        await tx.put(GROUPS[0])
        await tx.put(replace(entry, reason="others"))

    await memory.write(good)
    with pytest.raises(Conflict):
        await memory.write(bad)
    assert rows.all(Group) == []
    assert seen == [[Change(LedgerEntry, None, entry)]]


async def test_an_action_that_waits_is_refused() -> None:
    memory = MemoryStore(Rows(), process()[0])

    async def waits(_tx: Tx) -> None:
        await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="law 9"):
        await memory.write(waits)


async def test_a_dead_process_writes_nothing() -> None:
    rows = Rows()
    process_, _ = process()
    memory = MemoryStore(rows, process_)
    process_.is_dead = True
    with pytest.raises(Died):
        await memory.write(lambda tx: tx.put(ApiToken("t", "n", "admin", "h", 0.0)))
    assert rows.all(ApiToken) == []


def test_a_broken_law_tells_its_story_and_how_to_replay_it() -> None:
    """A job that may not complete: its end breaks what was asked of it."""
    with pytest.raises(LawBroken) as broken:
        run(5, ends=frozenset({"failed"}))
    words = str(broken.value)
    assert words.startswith("law 8: the job is completed")
    assert "fault: partition" in words
    assert words.endswith("python -m simulator.faults --seed 5")
    assert len(words.splitlines()) <= 64
    assert broken.value.commits > 10


def test_schedules_differ_and_are_functions_of_their_seed() -> None:
    plans = [schedule(seed) for seed in range(50)]
    assert len(set(plans)) == 50
    assert plans == [schedule(seed) for seed in range(50)]
    assert all({"partition"} <= {fault.kind for fault in plan.faults} for plan in plans)
    assert all(any(fault.kind.endswith("crash") for fault in plan.faults) for plan in plans)
    assert len({ending.name for ending in ENDINGS}) == len(ENDINGS)
    assert 2 * max(kind.latency_s for plan in plans for kind in plan.workers) < TIMEOUT_S
