"""Many writes share one commit, and none of them notices: isolation, failure, limits, cancellation."""

from __future__ import annotations

import asyncio

import pytest

from coordinator.domain.model import Event, Worker
from coordinator.store.errors import Conflict, StoreBusy, StoreEnded, StoreError
from coordinator.store.readers import ReaderLimits
from coordinator.store.sql import StoreLimits, open_store
from coordinator.store.writer import WriterLimits


async def test_a_failing_action_is_undone_alone(store, make, putting):
    async def fails(tx, seq):
        await tx.put(make.event(seq))
        raise LookupError(f"action {seq}")

    writes = [
        store.write((lambda tx, seq=seq: fails(tx, seq)) if seq % 3 == 0 else putting(make.event(seq))) for seq in range(1, 31)
    ]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(outcome, LookupError) for outcome in outcomes] == [seq % 3 == 0 for seq in range(1, 31)]
    found = await store.read(lambda r: r.select(Event, order_by="seq"))
    assert [event.seq for event in found] == [seq for seq in range(1, 31) if seq % 3]


async def test_a_refused_statement_is_undone_alone_and_its_neighbours_stay(store, make, putting):
    writes = [store.write(putting(make.event(n), make.worker(str(n), public_key=f"key_{n // 2}"))) for n in range(8)]
    outcomes = await asyncio.gather(*writes, return_exceptions=True)
    assert [isinstance(outcome, Conflict) for outcome in outcomes] == [n % 2 == 1 for n in range(8)]
    assert await store.read(lambda r: r.count(Event)) == await store.read(lambda r: r.count(Worker)) == 4


async def test_actions_run_one_at_a_time_in_the_order_they_came(store, make):
    async def append(tx):
        last = await tx.highest(Event, "seq") or 0
        await tx.put(make.event(last + 1))
        return last + 1

    assert await asyncio.gather(*(store.write(append) for _ in range(50))) == list(range(1, 51))


async def test_an_action_that_hides_a_failed_statement_is_undone_all_the_same(store, make, putting):
    await store.write(putting(make.worker("a")))

    async def hides(tx):
        await tx.put(make.event(1))
        try:
            await tx.put(make.worker("b", public_key="key_a"))
        except Conflict:
            return "all well"

    with pytest.raises(StoreError, match="the action hid the error"):
        await store.write(hides)

    async def goes_on(tx):
        try:
            await tx.put(make.worker("b", public_key="key_a"))
        except Conflict:
            await tx.put(make.event(2))

    with pytest.raises(StoreError, match="failed before"):
        await store.write(goes_on)
    assert await store.read(lambda r: r.count(Event)) == 0


async def test_write_inside_an_action_is_refused_instead_of_hanging(store, make, putting):
    async def nested(tx):
        await store.write(putting(make.event(1)))

    with pytest.raises(StoreError, match="from inside an action"):
        await store.write(nested)
    await store.write(putting(make.event(2)))


async def test_a_caller_that_left_before_its_turn_writes_nothing(store, make, putting):
    gate = asyncio.Event()
    first = asyncio.create_task(store.write(lambda tx: gate.wait()))
    await asyncio.sleep(0)
    gone = asyncio.create_task(store.write(putting(make.event(1))))
    await asyncio.sleep(0)
    gone.cancel()
    gate.set()
    await first
    await store.write(putting(make.event(2)))
    assert [event.seq for event in await store.read(lambda r: r.select(Event))] == [2]


async def test_a_caller_that_leaves_in_its_turn_harms_nobody(store, make, putting):
    gate, begun = asyncio.Event(), asyncio.Event()

    async def slow(tx):
        begun.set()
        await gate.wait()
        await tx.put(make.event(1))

    gone = asyncio.create_task(store.write(slow))
    await begun.wait()
    gone.cancel()
    gate.set()
    await store.write(putting(make.event(2)))
    assert await store.read(lambda r: r.count(Event)) == 2  # it had begun: it is finished


async def test_an_action_whose_own_work_is_cancelled_fails_alone(store, make, putting):
    async def awaits_a_cancelled_task(tx):
        await tx.put(make.event(1))
        task = asyncio.create_task(asyncio.sleep(3600))
        task.cancel()
        await task

    with pytest.raises(StoreError, match="awaited something that was cancelled"):
        await store.write(awaits_a_cancelled_task)
    await store.write(putting(make.event(2)))
    assert [event.seq for event in await store.read(lambda r: r.select(Event))] == [2]


async def test_an_action_past_its_deadline_is_undone_and_the_next_one_runs(store_url, make, putting):
    store = await open_store(store_url, limits=StoreLimits(writer=WriterLimits(action_s=0.05)))

    async def hangs(tx):
        await tx.put(make.event(1))
        await asyncio.Event().wait()

    try:
        with pytest.raises(StoreBusy, match=r"0.05 s\): it was undone"):
            await store.write(hangs)
        await store.write(putting(make.event(2)))
        assert [event.seq for event in await store.read(lambda r: r.select(Event))] == [2]
    finally:
        await store.close()


async def test_a_full_queue_refuses_after_its_wait(store_url, putting, make):
    store = await open_store(store_url, limits=StoreLimits(writer=WriterLimits(queued=2, enqueue_s=0.05)))
    gate = asyncio.Event()
    try:
        first = asyncio.create_task(store.write(lambda tx: gate.wait()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        waiting = [asyncio.create_task(store.write(putting(make.event(seq)))) for seq in (1, 2)]
        await asyncio.sleep(0)
        with pytest.raises(StoreBusy, match=r"2 writes are queued and none moved for 0.05 s"):
            await store.write(putting(make.event(3)))
        gate.set()
        await asyncio.gather(first, *waiting)
        assert await store.read(lambda r: r.count(Event)) == 2
    finally:
        await store.close()


async def test_reads_have_deadlines_too(store_url):
    store = await open_store(store_url, limits=StoreLimits(reader=ReaderLimits(links=1, wait_s=0.05, read_s=0.2)))

    async def hangs(reader):
        await reader.count(Event)
        await asyncio.Event().wait()

    try:
        hanging = asyncio.create_task(store.read(hangs))
        await asyncio.sleep(0)
        with pytest.raises(StoreBusy, match=r"1 reads run and none ended within 0.05 s"):
            await store.read(lambda r: r.count(Event))
        with pytest.raises(StoreBusy, match=r"a read did not finish within 0.2 s"):
            await hanging
        assert await store.read(lambda r: r.count(Event)) == 0
    finally:
        await store.close()


async def test_an_error_of_the_actions_own_deadline_keeps_its_words(store):
    async def times_out(tx):
        raise TimeoutError("the peer")

    with pytest.raises(TimeoutError, match="the peer"):
        await store.write(times_out)
    with pytest.raises(TimeoutError, match="the peer"):
        await store.read(times_out)


async def test_more_writes_than_one_group_takes(store_url, make, putting):
    store = await open_store(store_url, limits=StoreLimits(writer=WriterLimits(group_actions=3)))
    try:
        await asyncio.gather(*(store.write(putting(make.event(seq))) for seq in range(1, 21)))
        assert await store.read(lambda r: r.total(Event, "seq")) == 210
    finally:
        await store.close()


async def test_closing_in_the_middle_of_an_action_ends_it_by_its_deadline(store_url, make):
    store = await open_store(store_url, limits=StoreLimits(writer=WriterLimits(action_s=0.1)))

    async def hangs(tx):
        await asyncio.Event().wait()

    hanging = asyncio.create_task(store.write(hangs))
    await asyncio.sleep(0)
    await store.close()
    with pytest.raises((StoreBusy, StoreEnded)):
        await hanging


def _once(original, error):
    """Replace a link's method: the first call raises (or hangs when `error` is None), later ones work."""
    calls = 0

    async def replaced():
        nonlocal calls
        calls += 1
        if calls > 1:
            return await original()
        if error is None:
            await asyncio.Event().wait()
        raise error

    return replaced


async def test_a_failed_commit_acknowledges_nothing_and_the_next_one_works(store, make, putting, monkeypatch):
    link = store._writer._link
    monkeypatch.setattr(link, "commit", _once(link.commit, StoreError("the disk said no")))
    outcomes = await asyncio.gather(*(store.write(putting(make.event(seq))) for seq in range(1, 5)), return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["the disk said no"] * 4
    assert await store.read(lambda r: r.count(Event)) == 0
    await store.write(putting(make.event(9)))
    assert [event.seq for event in await store.read(lambda r: r.select(Event))] == [9]


async def test_a_commit_that_never_answers_ends_the_writer(store_url, make, putting, monkeypatch):
    store = await open_store(store_url, limits=StoreLimits(writer=WriterLimits(commit_s=0.05)))
    link = store._writer._link
    monkeypatch.setattr(link, "commit", _once(link.commit, None))
    try:
        for _ in range(2):
            with pytest.raises(StoreEnded, match=r"did not commit within 0.05 s"):
                await store.write(putting(make.event(1)))
    finally:
        await store.close()


async def test_a_transaction_that_cannot_be_rolled_back_ends_the_writer(store_url, make, putting, monkeypatch):
    store = await open_store(store_url)
    link = store._writer._link
    monkeypatch.setattr(link, "commit", _once(link.commit, StoreError("no")))
    monkeypatch.setattr(link, "rollback", _once(link.rollback, StoreError("no again")))
    try:
        with pytest.raises(StoreError, match="no"):
            await store.write(putting(make.event(1)))
        with pytest.raises(StoreEnded, match=r"could not be rolled back \(no again\)"):
            await store.write(putting(make.event(2)))
    finally:
        await store.close()


async def test_a_fault_of_the_writer_itself_becomes_the_reason_of_every_refusal(store_url, make, putting, monkeypatch):
    store = await open_store(store_url)
    link = store._writer._link
    monkeypatch.setattr(link, "commit", _once(link.commit, ZeroDivisionError("a bug")))
    try:
        outcomes = await asyncio.gather(*(store.write(putting(make.event(seq))) for seq in range(1, 4)), return_exceptions=True)
        assert all(isinstance(outcome, ZeroDivisionError | StoreEnded) for outcome in outcomes)
        with pytest.raises(StoreEnded, match="the store's writer failed: ZeroDivisionError"):
            await store.write(putting(make.event(5)))
    finally:
        await store.close()


async def test_an_action_whose_undo_is_lost_takes_its_group_with_it(store, make, putting, monkeypatch):
    link = store._writer._link

    async def fails(tx):
        await tx.put(make.event(1))
        monkeypatch.setattr(link, "in_transaction", _false_once(link.in_transaction))  # as after SQLite's own rollback
        raise LookupError("mine")

    outcomes = await asyncio.gather(store.write(putting(make.event(7))), store.write(fails), return_exceptions=True)
    assert isinstance(outcomes[0], StoreError)
    assert "gave up the whole transaction" in str(outcomes[0])
    assert isinstance(outcomes[1], LookupError)
    assert await store.read(lambda r: r.count(Event)) == 0
    await store.write(putting(make.event(2)))


def _false_once(original):
    answers = [False]
    return lambda: answers.pop() if answers else original()
