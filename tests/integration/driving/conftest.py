"""A real store and blobs for the driver's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.clock import SystemClock
from coordinator.service import driving
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.store.blobs import FileBlobs
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store


@pytest.fixture
async def deps(tmp_path: Path) -> AsyncIterator[Deps]:
    """A real SQLite store and blobs."""
    url = f"sqlite:///{tmp_path / 'rows.sqlite3'}"
    await asyncio.to_thread(upgrade, url)
    store = await open_store(url)
    clock = SystemClock()
    yield Deps(store, FileBlobs(tmp_path / "blobs"), clock, ServiceSettings(tmp_path), Ed25519PrivateKey.generate(), clock.now())
    await store.close()


@pytest.fixture(autouse=True)
def _quick_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restart delays are the retry rule's own business; here they only cost time."""
    real = driving.learner_restart
    monkeypatch.setattr(driving, "learner_restart", lambda n, *, limit: None if real(n, limit=limit) is None else 0.0)
