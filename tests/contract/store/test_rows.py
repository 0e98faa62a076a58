"""Any row of any kind comes back equal: through the mapper, through SQLite and through PostgreSQL."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.domain import model
from coordinator.store.errors import InvalidQuery, InvalidRow
from coordinator.store.fields import FieldSpec, Storage, fields_of
from coordinator.store.rows import mapping
from coordinator.store.tables import APPEND_ONLY, TABLES
from coordinator.wire.job import BudgetConfig, EnvironmentConfig, JobConfig, StalenessConfig

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(), max_size=12) | st.sampled_from(["\x00", "\x1a", "\x1a0000", "\ud800", "a\x00b\udfffc", "\x1a\x1a"])
FINITE = st.floats(allow_nan=False, allow_infinity=False)
PLAIN_JSON = st.recursive(
    st.none() | st.booleans() | INT64 | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
CONFIGS = st.builds(
    lambda name, seed, steps, bound, prompt: JobConfig(
        name=name,
        model="m",
        seed=seed,
        environment=EnvironmentConfig(type="digit_sort", system_prompt=prompt),
        staleness=StalenessConfig(max=bound),
        budget=BudgetConfig(steps=steps, usd=0.1),
    ),
    st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,9}", fullmatch=True),
    st.integers(0, 2**63 - 1),
    st.integers(1, 10_000_000),
    st.integers(0, 64),
    st.none() | st.text(max_size=9),
)


def _inner(spec: FieldSpec) -> st.SearchStrategy[Any]:
    match spec.storage:
        case Storage.TEXT:
            return TEXT
        case Storage.INTEGER:
            return INT64
        case Storage.REAL:
            return st.floats(allow_nan=False)
        case Storage.BOOLEAN:
            return st.booleans()
        case Storage.STATE:
            return st.sampled_from(list(spec.type))
        case Storage.MODEL:
            return CONFIGS
        case Storage.TUPLE:
            part = {int: INT64, float: FINITE, str: TEXT}[get_args(spec.type)[0]]
            return st.lists(part, max_size=5).map(tuple)
        case Storage.DICT:
            values = {str: TEXT, int: INT64, Any: PLAIN_JSON}[get_args(spec.type)[1]]
            return st.dictionaries(TEXT, values, max_size=4)


def rows_of(kind: type[Any]) -> st.SearchStrategy[Any]:
    """Any row of a kind, as its field types allow."""
    fields = {spec.name: (st.none() | _inner(spec)) if spec.nullable else _inner(spec) for spec in fields_of(kind)}
    return st.builds(kind, **fields)


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_every_kind_maps_back_to_itself(kind):
    rows = mapping(kind)

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(rows_of(kind))
    def round_trip(row):
        values = rows.values(row)
        assert all(value is None or type(value) in (str, int, float, bool) for value in values)
        assert rows.row(values) == row

    round_trip()


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
async def test_every_kind_comes_back_equal_from_the_database(store, kind):
    rows = mapping(kind)

    @settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(st.lists(rows_of(kind), min_size=1, max_size=6))
    async def round_trip(drawn):
        async def there_and_back(tx):
            await _empty(tx, kind)
            kept = [row for row in drawn if await tx.insert(row)]
            if kind not in APPEND_ONLY:
                await tx.put(*kept)
            found = [(row, await tx.get(kind, *(getattr(row, name) for name in rows.key))) for row in kept]
            if kind in APPEND_ONLY:
                raise Undone(found)  # nothing else would empty the table again
            return found

        try:
            pairs = await store.write(there_and_back)
        except Undone as undone:
            pairs = undone.args[0]
        assert pairs
        for row, found in pairs:
            assert found == row

    await _as_coroutine(round_trip)


class Undone(Exception):
    """Carries what was read out of an action that is to be undone."""


async def _empty(tx, kind):
    first = mapping(kind).key[0]
    for row in await tx.select(kind):
        await tx.delete(kind, **{first: getattr(row, first)})


async def _as_coroutine(test):
    """Drive a hypothesis test of a coroutine from inside the running loop: each example awaited in turn."""
    import asyncio

    loop = asyncio.get_running_loop()
    inner = test.hypothesis.inner_test
    test.hypothesis.inner_test = lambda *args, **kwargs: asyncio.run_coroutine_threadsafe(inner(*args, **kwargs), loop).result(60)
    await asyncio.to_thread(test)


def test_every_dataclass_of_the_model_has_a_table_with_its_fields():
    kinds = {kind for kind in vars(model).values() if dataclasses.is_dataclass(kind)}
    assert kinds == set(TABLES)
    for kind, table in TABLES.items():
        assert [column.name for column in table.columns] == [field.name for field in dataclasses.fields(kind)]
        assert all(not table.c[spec.name].nullable or spec.nullable for spec in fields_of(kind))


def test_a_type_without_a_column_is_refused_by_name():
    @dataclasses.dataclass(frozen=True)
    class Odd:
        when: complex

    with pytest.raises(TypeError, match=r"Odd.when has type .*complex.*: add it to coordinator/store/fields.py"):
        fields_of(Odd)
    with pytest.raises(InvalidQuery):
        mapping(Odd)


def test_a_value_that_another_release_wrote_is_refused_by_name(make):
    rows = mapping(model.Group)
    values = list(rows.values(make.group(0)))
    values[rows.names.index("state")] = "melted"
    with pytest.raises(InvalidRow, match=r"Group.state cannot be 'melted'"):
        rows.row(values)
    values[rows.names.index("state")] = "ready"
    values[rows.names.index("prompt_ids")] = "[1,"
    with pytest.raises(InvalidRow, match=r"Group.prompt_ids cannot be '\[1,'"):
        rows.row(values)


def test_a_long_value_is_shortened_in_the_refusal(make):
    with pytest.raises(InvalidRow) as refused:
        mapping(model.Group).values(make.group(0, reason=["x" * 500]))
    assert len(str(refused.value)) < 200
