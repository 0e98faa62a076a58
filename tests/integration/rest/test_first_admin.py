"""The first admin token: on an empty store only, in a file that nobody else can read."""

from __future__ import annotations

import shutil
import stat

import pytest

from coordinator.domain.model import ApiToken
from coordinator.service import tokens
from coordinator.store.sql import open_store


@pytest.fixture
async def empty(tmp_path, empty_database):
    shutil.copy(empty_database, tmp_path / "rows.db")
    store = await open_store(f"sqlite:///{tmp_path / 'rows.db'}")
    yield store
    await store.close()


async def test_it_is_written_once_and_works(empty, tmp_path):
    path = tmp_path / "secrets" / "admin-token"
    assert await tokens.first_admin(empty, path, now=5.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    caller = await empty.read(lambda reader: tokens.authenticate(reader, path.read_text().strip()))
    assert (caller.token.role, caller.token.created_at, caller.may_bring_code) == ("admin", 5.0, True)
    text = path.read_text()
    assert not await tokens.first_admin(empty, path, now=6.0)
    assert path.read_text() == text


async def test_a_crash_between_file_and_row_is_made_good(empty, tmp_path):
    path = tmp_path / "admin-token"
    path.write_text("echo2_dead_beef\n")
    path.chmod(0o644)
    assert await tokens.first_admin(empty, path, now=5.0)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await empty.read(lambda reader: tokens.authenticate(reader, path.read_text().strip()))


async def test_only_hashes_are_stored(empty, tmp_path):
    await tokens.first_admin(empty, tmp_path / "t", now=5.0)
    row = (await empty.read(lambda reader: reader.select(ApiToken)))[0]
    secret = (tmp_path / "t").read_text().strip().split("_", 2)[2]
    assert secret not in repr(row)
    assert row.secret_hash == tokens.secret_hash(secret)
