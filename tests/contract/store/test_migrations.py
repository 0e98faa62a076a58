"""Migrations run from empty on both databases and make the tables that the code uses."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from coordinator.store.errors import SchemaMismatch
from coordinator.store.links import make_engine, parse_url
from coordinator.store.migrate import current, head, upgrade
from coordinator.store.sql import open_store
from coordinator.store.tables import METADATA


@pytest.fixture(params=["sqlite", "postgresql"])
def empty_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database without tables."""
    return (
        f"sqlite:///{tmp_path}/data/echo2.db" if request.param == "sqlite" else str(request.getfixturevalue("empty_postgres_url"))
    )


async def test_from_empty_to_the_tables_of_the_code(empty_url):
    assert current(empty_url) is None
    upgrade(empty_url)
    upgrade(empty_url)  # nothing left to do
    assert current(empty_url) == head()
    engine = make_engine(parse_url(empty_url))
    try:
        async with engine.connect() as connection:
            assert await connection.run_sync(_differences) == []
            assert await connection.run_sync(_names) == _wanted_names()
    finally:
        await engine.dispose()
    await (await open_store(empty_url)).close()


def _differences(connection: sa.Connection) -> list[object]:
    options = {"compare_type": True, "target_metadata": METADATA}
    return list(compare_metadata(MigrationContext.configure(connection, opts=options), METADATA))


def _names(connection: sa.Connection) -> set[tuple[str, str]]:
    """Primary keys and unique constraints with their columns, which compare_metadata looks at in part only."""
    inspector = sa.inspect(connection)
    found = set()
    for table in METADATA.tables:
        found.add((table, ",".join(inspector.get_pk_constraint(table)["constrained_columns"])))
        found |= {(table, ",".join(one["column_names"])) for one in inspector.get_unique_constraints(table)}
    return found


def _wanted_names() -> set[tuple[str, str]]:
    wanted = set()
    for name, table in METADATA.tables.items():
        kinds = (sa.PrimaryKeyConstraint, sa.UniqueConstraint)
        wanted |= {(name, ",".join(c.columns.keys())) for c in table.constraints if isinstance(c, kinds)}
    return wanted


def test_a_migration_that_fails_leaves_no_table(tmp_path):
    path = tmp_path / "echo2.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE metrics (other TEXT)")  # the last table of the migration
    connection.close()
    with pytest.raises(sa.exc.OperationalError, match="metrics already exists"):
        upgrade(f"sqlite:///{path}")
    assert current(f"sqlite:///{path}") is None
    connection = sqlite3.connect(path)
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    connection.close()
    assert names == {"metrics"}


async def test_tables_of_a_newer_release_are_refused(sqlite_url):
    connection = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"))
    with connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999_from_the_future'")
    connection.close()
    with pytest.raises(SchemaMismatch, match="9999_from_the_future, which this release does not know"):
        await open_store(sqlite_url)
    with pytest.raises(SchemaMismatch, match="install a newer release"):
        upgrade(sqlite_url)
    assert current(sqlite_url) == "9999_from_the_future"


def test_migrations_import_none_of_our_code():
    versions = Path(__file__).parents[3] / "migrations" / "versions"
    for path in versions.glob("*.py"):
        text = path.read_text()
        assert not any(f"import {name}" in text or f"from {name}" in text for name in ("coordinator", "p2p", "pricing"))
