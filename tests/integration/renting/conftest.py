"""A store for each sequence, in memory-backed files where the system has them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from coordinator.store.sql import open_store

SHM = Path("/dev/shm")  # many short stores: their fsyncs prove nothing here, the store's own tests do


@pytest.fixture
async def stores(sqlite_template: Path) -> AsyncIterator[Callable[[], Any]]:
    """Opens an empty, migrated store; all are closed and removed afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="echo2-renting-", dir=SHM if SHM.is_dir() else None))
    opened: list[Any] = []
    numbers = count()  # some are opened at a time

    async def new() -> Any:
        path = directory / f"{next(numbers)}.db"
        shutil.copyfile(sqlite_template, path)
        opened.append(await open_store(f"sqlite:///{path}"))
        return opened[-1]

    yield new
    for store in opened:
        await store.close()
    shutil.rmtree(directory, ignore_errors=True)
