"""Filters, orders and figures of `ports.Reader`: compared with the same question asked of a list."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.domain.model import Group, GroupState, Refusal, Rollout
from coordinator.store.errors import InvalidQuery, InvalidRow

STATES = list(GroupState)


@pytest.fixture
async def groups(store, make, putting):
    """Twelve groups of mixed states, steps and times."""
    rows = [
        make.group(n, state=STATES[n % 4], step=None if n % 3 else n, issued_at=n / 2, oldest_version=n % 5 or None)
        for n in range(12)
    ]
    await store.write(putting(*reversed(rows)))
    return rows


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, lambda g: True),
        ({"number": 3}, lambda g: g.number == 3),
        ({"state": GroupState.READY}, lambda g: g.state is GroupState.READY),
        ({"state": "ready"}, lambda g: g.state is GroupState.READY),
        ({"step": None}, lambda g: g.step is None),
        ({"step": 0}, lambda g: g.step == 0),
        ({"state": [GroupState.READY, "issued"]}, lambda g: g.state in ("ready", "issued")),
        ({"number": (1, 2, 99)}, lambda g: g.number in (1, 2)),
        ({"number": frozenset()}, lambda g: False),
        ({"step": [None, 3]}, lambda g: g.step in (None, 3)),
        ({"step": [None]}, lambda g: g.step is None),
        ({"number__le": 4}, lambda g: g.number <= 4),
        ({"number__lt": 4}, lambda g: g.number < 4),
        ({"number__ge": 4}, lambda g: g.number >= 4),
        ({"number__gt": 4}, lambda g: g.number > 4),
        ({"issued_at__ge": 2, "issued_at__lt": 3.5}, lambda g: 2 <= g.issued_at < 3.5),
        ({"issued_at": [0.5, 1.0]}, lambda g: g.issued_at in (0.5, 1.0)),
        ({"step__ge": 3}, lambda g: g.step is not None and g.step >= 3),
        ({"id__gt": "group_2"}, lambda g: g.id > "group_2"),
        ({"job_id": "job", "state": [GroupState.READY], "number__gt": 1, "step": None}, lambda g: g.number in (5,)),
        ({"job_id": "another"}, lambda g: False),
    ],
)
async def test_filters_select_what_they_say(store, groups, filters, expected):
    wanted = [group for group in groups if expected(group)]
    assert await store.read(lambda r: r.select(Group, order_by="number", **filters)) == wanted
    assert await store.read(lambda r: r.count(Group, **filters)) == len(wanted)
    assert await store.read(lambda r: r.total(Group, "number", **filters)) == sum(group.number for group in wanted)
    assert await store.read(lambda r: r.highest(Group, "number", **filters)) == max((g.number for g in wanted), default=None)


async def test_booleans_are_filtered(store, putting):
    rows = [Refusal(f"r{n}", "w", "j", "l", "g", 0, "code", "reason", "worker", n == 1, 5, 1.0) for n in range(3)]
    await store.write(putting(*rows))
    assert await store.read(lambda r: r.select(Refusal, paid=True)) == [rows[1]]
    assert await store.read(lambda r: r.select(Refusal, paid=[False])) == [rows[0], rows[2]]


async def test_rows_come_by_primary_key_unless_ordered(store, groups):
    found = await store.read(lambda r: r.select(Group))
    assert [group.id for group in found] == sorted(group.id for group in groups)


@pytest.mark.parametrize("limit", [None, 0, 5, 100])
async def test_orders_and_limits(store, groups, limit):
    up = await store.read(lambda r: r.select(Group, order_by="number", limit=limit))
    assert [group.number for group in up] == list(range(12))[:limit]
    down = await store.read(lambda r: r.select(Group, order_by="-number", limit=limit))
    assert [group.number for group in down] == list(range(11, -1, -1))[:limit]


async def test_none_sorts_first_and_ties_break_by_key(store, groups):
    found = await store.read(lambda r: r.select(Group, order_by="step"))
    none = sorted(group.id for group in groups if group.step is None)
    assert [group.id for group in found] == [*none, "group_0", "group_3", "group_6", "group_9"]
    assert await store.read(lambda r: r.select(Group, order_by="-step")) == found[::-1]


async def test_text_compares_by_code_point(store, make, putting):
    names = ["Z", "a", "é", "_", "B", "zz", "10", "9", "\U0001f600", "\uffff"]
    await store.write(putting(*(make.group(n, id=name) for n, name in enumerate(names))))
    found = await store.read(lambda r: r.select(Group, order_by="id"))
    assert [group.id for group in found] == sorted(names)
    assert {g.id for g in await store.read(lambda r: r.select(Group, id__lt="a"))} == {name for name in names if name < "a"}


async def test_figures_over_nothing(store):
    assert await store.read(lambda r: r.total(Rollout, "length")) == 0
    assert await store.read(lambda r: r.highest(Rollout, "length")) is None
    assert await store.read(lambda r: r.highest(Rollout, "oldest_version")) is None


async def test_sums_pass_32_bits(store, make, putting):
    await store.write(putting(*(make.rollout(slot, length=2**40) for slot in range(8))))
    assert await store.read(lambda r: r.total(Rollout, "length", job_id="job")) == 2**43


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"colour": 1}, r"Group has no field 'colour' \(filter colour\): use one of id, job_id"),
        ({"colour__le": 1}, r"Group has no field 'colour' \(filter colour__le\)"),
        ({"number__ne": 1}, r"filter number__ne: the suffix must be one of le, lt, ge, gt"),
        ({"number__le": None}, r"number__le=None compares with nothing"),
        ({"prompt_ids": (1,)}, r"Group.prompt_ids is stored as JSON"),
        ({"order_by": "colour"}, r"Group has no field 'colour' \(order_by 'colour'\)"),
        ({"order_by": "-prompt_ids"}, r"Group.prompt_ids is stored as JSON"),
    ],
)
async def test_what_cannot_be_asked_is_refused_in_words(store, filters, message):
    with pytest.raises(InvalidQuery, match=message):
        await store.read(lambda r: r.select(Group, **filters))


async def test_a_filter_value_of_the_wrong_type_is_refused_in_words(store):
    with pytest.raises(InvalidRow, match=r"Group.number cannot be 'three': an integer is needed"):
        await store.read(lambda r: r.select(Group, number="three"))
    with pytest.raises(InvalidRow, match=r"Group.state cannot be 'done': use one of issued"):
        await store.read(lambda r: r.count(Group, state=["ready", "done"]))


async def test_figures_need_integer_fields(store):
    with pytest.raises(InvalidQuery, match=r"Group.issued_at is not an integer \(sum\)"):
        await store.read(lambda r: r.total(Group, "issued_at"))
    with pytest.raises(InvalidQuery, match=r"Group has no field 'odd' \(max\)"):
        await store.read(lambda r: r.highest(Group, "odd"))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    states=st.lists(st.sampled_from(STATES), max_size=3),
    low=st.integers(-1, 12),
    high=st.integers(-1, 12),
    order=st.sampled_from(["number", "-number", "state", "-issued_at"]),
    limit=st.one_of(st.none(), st.integers(0, 12)),
)
async def test_any_question_has_the_answer_of_a_list(store, groups, states, low, high, order, limit):
    key, descending = order.removeprefix("-"), order.startswith("-")
    wanted = [g for g in groups if g.state in states and low <= g.number < high]
    wanted.sort(key=lambda g: (getattr(g, key), g.id), reverse=descending)
    found = await store.read(lambda r: r.select(Group, state=states, number__ge=low, number__lt=high, order_by=order, limit=limit))
    assert found == wanted[:limit]
