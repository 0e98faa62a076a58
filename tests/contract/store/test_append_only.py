"""The ledger's rows stay as they were written, whatever program reaches for them; sums are exact (law 7)."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
import sqlalchemy as sa

from coordinator.domain.model import LedgerEntry, Posting
from coordinator.store.errors import Conflict, InvalidQuery
from coordinator.store.links import make_engine, parse_url

ENTRY = LedgerEntry("settle/reserved/q/1", 0, "settle", "j", "w", "q", "16 tokens", 1.0)
POSTING = Posting("earned/q", 0, ENTRY.id, 16, 16)


async def test_entries_and_postings_are_never_replaced_nor_deleted(store: Any, putting: Any) -> None:
    await store.write(putting(ENTRY, POSTING))
    with pytest.raises(Conflict):
        await store.write(putting(replace(ENTRY, reason="another")))
    with pytest.raises(Conflict):
        await store.write(putting(replace(POSTING, uusd=1_000_000)))
    for kind in (LedgerEntry, Posting):
        with pytest.raises(InvalidQuery, match="only added"):
            await store.write(lambda tx, kind=kind: tx.delete(kind, **{kind.__dataclass_fields__.__iter__().__next__(): "x"}))
    assert await store.read(lambda r: r.select(LedgerEntry)) == [ENTRY]
    assert await store.read(lambda r: r.select(Posting)) == [POSTING]


@pytest.mark.parametrize("change", ["UPDATE postings SET uusd = 17", "DELETE FROM postings", "DELETE FROM ledger_entries"])
async def test_the_database_itself_refuses(store: Any, store_url: str, putting: Any, change: str) -> None:
    """By SQL, beside the product."""
    await store.write(putting(ENTRY, POSTING))
    await store.close()

    async def run() -> None:
        engine = make_engine(parse_url(store_url))
        try:
            async with engine.begin() as connection:
                await connection.execute(sa.text(change))
        finally:
            await engine.dispose()

    with pytest.raises(sa.exc.DBAPIError, match="the ledger is only added to"):
        await asyncio.wait_for(run(), 20)


async def test_a_total_is_exact_where_floats_are_not(store: Any, putting: Any) -> None:
    """Sums beyond 2**53 keep their last micro-dollar; nothing that matches sums to 0."""
    amounts = (2**60, 1, 3, -5)
    await store.write(putting(*(Posting("funds/j", n, "e", uusd, 0) for n, uusd in enumerate(amounts))))
    assert await store.read(lambda r: r.total(Posting, "uusd", account="funds/j")) == 2**60 - 1
    assert await store.read(lambda r: r.total(Posting, "uusd", account="funds/j", uusd__lt=0)) == -5
    assert await store.read(lambda r: r.total(Posting, "uusd", account="none")) == 0
