"""What `ports.Store` promises, on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from coordinator.domain.model import Event, Group, GroupState, Rollout, RolloutState, Worker
from coordinator.store.errors import Conflict, InvalidQuery, InvalidRow, StoreEnded, StoreError
from coordinator.store.sql import open_store


async def test_a_row_put_is_read_back_equal(store, make, putting):
    group = make.group(7, oldest_version=3, reason="because")
    await store.write(putting(group))
    assert await store.read(lambda r: r.get(Group, "group_7")) == group


async def test_put_replaces_every_field_of_the_row_with_that_key(store, make, putting):
    await store.write(putting(make.group(0, reason="old", step=4)))
    after = make.group(0, state=GroupState.TRAINED, settled_at=99.5)
    await store.write(putting(after))
    assert await store.read(lambda r: r.select(Group)) == [after]


async def test_one_put_takes_rows_of_several_kinds_and_keeps_the_last_of_equal_keys(store, make, putting):
    first, last = make.rollout(0, text="first"), make.rollout(0, text="last")
    await store.write(putting(make.group(0), first, make.event(1), make.rollout(1), last))
    found = await store.read(lambda r: r.select(Rollout, order_by="slot"))
    assert found == [last, make.rollout(1)]
    assert await store.read(lambda r: r.count(Group)) == await store.read(lambda r: r.count(Event)) == 1


async def test_a_thousand_rows_go_in_one_put(store, make, putting):
    await store.write(putting(*(make.event(seq, data={"seq": seq}) for seq in range(1, 1001))))
    found = await store.read(lambda r: r.select(Event, order_by="seq"))
    assert [event.data["seq"] for event in found] == list(range(1, 1001))


async def test_put_of_nothing_is_nothing(store, putting):
    await store.write(putting())


async def test_get_of_an_absent_key_is_none(store):
    assert await store.read(lambda r: r.get(Rollout, "group_0", 0)) is None


async def test_get_with_the_wrong_number_of_key_values_names_the_key(store):
    with pytest.raises(InvalidQuery, match=r"Rollout has the key \(group_id, slot\): 1 values"):
        await store.read(lambda r: r.get(Rollout, "group_0"))


async def test_insert_answers_whether_the_row_is_new(store, make):
    async def action(tx):
        return await tx.insert(make.event(1, kind="first")), await tx.insert(make.event(1, kind="second"))

    assert await store.write(action) == (True, False)
    assert (await store.read(lambda r: r.get(Event, "job", 1))).kind == "first"


async def test_insert_is_false_when_another_row_has_the_unique_value(store, make):
    async def action(tx):
        return await tx.insert(make.worker("a")), await tx.insert(make.worker("b", public_key="key_a"))

    assert await store.write(action) == (True, False)
    assert [worker.id for worker in await store.read(lambda r: r.select(Worker))] == ["worker_a"]


async def test_put_of_a_unique_value_of_another_row_is_a_conflict_and_undone(store, make, putting):
    await store.write(putting(make.worker("a")))
    with pytest.raises(Conflict, match="public_key"):
        await store.write(putting(make.event(1), make.worker("b", public_key="key_a")))
    assert await store.read(lambda r: r.count(Event)) == 0


async def test_a_group_number_is_unique_within_its_job_only(store, make, putting):
    await store.write(putting(make.group(0), make.group(0, id="other", job_id="job_2")))
    with pytest.raises(Conflict):
        await store.write(putting(make.group(0, id="third")))


async def test_a_transaction_reads_its_own_writes(store, make):
    async def action(tx):
        await tx.put(make.group(1), make.group(2))
        before = await tx.count(Group)
        deleted = await tx.delete(Group, number=1)
        return before, deleted, [group.number for group in await tx.select(Group)]

    assert await store.write(action) == (2, 1, [2])


async def test_delete_answers_how_many_and_needs_a_filter(store, make, putting):
    await store.write(putting(*(make.event(seq) for seq in range(1, 6))))
    assert await store.write(lambda tx: tx.delete(Event, seq__le=3)) == 3
    with pytest.raises(InvalidQuery, match="needs a filter"):
        await store.write(lambda tx: tx.delete(Event))
    assert await store.read(lambda r: r.count(Event)) == 2


async def test_an_action_that_raises_leaves_nothing_and_its_error_reaches_the_caller(store, make):
    async def action(tx):
        await tx.put(make.event(1))
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        await store.write(action)
    assert await store.read(lambda r: r.count(Event)) == 0


async def test_what_the_action_returns_reaches_the_caller(store):
    async def action(tx):
        return {"answer": await tx.count(Event)}

    assert await store.write(action) == {"answer": 0}


async def test_a_value_that_cannot_be_stored_is_refused_by_name(store, make, putting):
    with pytest.raises(InvalidRow, match=r"Rollout.reward cannot be nan: NaN is not a measurement"):
        await store.write(putting(make.rollout(0, reward=float("nan"))))
    with pytest.raises(InvalidRow, match=r"Group.number cannot be 9223372036854775808: it must fit in 64 bits"):
        await store.write(putting(make.group(2**63)))
    with pytest.raises(InvalidRow, match=r"Event.data cannot be .*NaN|Event.data cannot be .*JSON"):
        await store.write(putting(make.event(1, data={"x": float("inf")})))
    with pytest.raises(InvalidRow, match=r"Group.state cannot be 'odd': use one of issued, ready"):
        await store.write(putting(make.group(0, state="odd")))
    with pytest.raises(InvalidRow, match=r"Group.reason cannot be None: text is needed"):
        await store.write(putting(make.group(0, reason=None)))


async def test_a_kind_without_a_table_is_refused_by_name(store):
    @dataclasses.dataclass(frozen=True)
    class Stranger:
        id: str

    with pytest.raises(InvalidQuery, match="Stranger is not a stored kind: use one of ApiToken"):
        await store.read(lambda r: r.select(Stranger))
    with pytest.raises(InvalidQuery, match="Stranger is not a stored kind"):
        await store.write(lambda tx: tx.put(Stranger("x")))


async def test_a_reader_sees_one_snapshot_while_writes_go_on(store, make, putting):
    await store.write(putting(make.event(1)))
    seen, go_on = asyncio.Event(), asyncio.Event()

    async def look_twice(reader):
        first = await reader.count(Event)
        seen.set()
        await go_on.wait()
        return first, await reader.count(Event)

    looking = asyncio.create_task(store.read(look_twice))
    await seen.wait()
    await store.write(putting(make.event(2)))  # does not wait for the reader
    go_on.set()
    assert await looking == (1, 1)
    assert await store.read(lambda r: r.count(Event)) == 2


async def test_a_write_is_seen_by_every_read_that_begins_after_it(store, make, putting):
    for seq in range(1, 20):
        await store.write(putting(make.event(seq)))
        counts = await asyncio.gather(*(store.read(lambda r: r.highest(Event, "seq")) for _ in range(4)))
        assert counts == [seq] * 4


async def test_more_reads_than_links_wait_their_turn(store):
    counts = await asyncio.gather(*(store.read(lambda r: r.count(Event)) for _ in range(50)))
    assert counts == [0] * 50


async def test_a_read_that_raises_leaves_the_link_fit_for_the_next(store):
    async def fail(reader):
        await reader.count(Event)
        raise LookupError("mine")

    for _ in range(10):
        with pytest.raises(LookupError, match="mine"):
            await store.read(fail)
    assert await store.read(lambda r: r.count(Event)) == 0


async def test_a_reader_cannot_be_used_after_its_action(store):
    async def keep(reader):
        return reader

    kept = await store.read(keep)
    with pytest.raises(StoreError, match="this read has ended"):
        await kept.count(Event)
    kept = await store.write(keep)
    with pytest.raises(StoreError, match="this transaction has ended"):
        await kept.put()


async def test_a_closed_store_refuses(store_url):
    store = await open_store(store_url)
    await store.close()
    await store.close()
    with pytest.raises(StoreEnded, match="closed"):
        await store.write(lambda tx: tx.count(Event))
    with pytest.raises(StoreEnded, match="closed"):
        await store.read(lambda r: r.count(Event))


async def test_rows_survive_a_close(store_url, make, putting):
    store = await open_store(store_url)
    await store.write(putting(make.rollout(0, state=RolloutState.SCORED, reward=1.0)))
    await store.close()
    store = await open_store(store_url)
    try:
        assert (await store.read(lambda r: r.get(Rollout, "group_0", 0))).reward == 1.0
    finally:
        await store.close()


async def test_close_finishes_what_is_queued(store_url, make, putting):
    store = await open_store(store_url)
    writes = [asyncio.create_task(store.write(putting(make.event(seq)))) for seq in range(1, 40)]
    await asyncio.sleep(0)
    await store.close()
    await asyncio.gather(*writes)
