"""The owner's limit down: one figure for both ways, on a real clock."""

from __future__ import annotations

import asyncio
import time

import pytest

from worker_node.adapters.downlink import BURST_BYTES, Downlink


async def test_the_rate_is_kept_by_all_who_share_it() -> None:
    link = Downlink(1e6, lambda _: None)
    begun = time.monotonic()

    async def take() -> None:
        for _ in range(5):
            await link.pace(50_000)

    await asyncio.gather(take(), take())
    taken = time.monotonic() - begun
    assert taken > 0.95 * (500_000 - BURST_BYTES) / 0.9e6


def test_peers_give_way_while_anything_comes_over_https() -> None:
    told: list[float] = []
    link = Downlink(1e6, told.append)
    with link.over_https(), link.over_https():
        assert told == pytest.approx([1e5])
    assert told == pytest.approx([1e5, 1e6])
    assert link.slack_s(900_000) == pytest.approx(8.0), "a request may wait for seven others"


async def test_without_a_limit_nothing_waits() -> None:
    told: list[float] = []
    link = Downlink(None, told.append)
    begun = time.monotonic()
    with link.over_https():
        await link.pace(1 << 40)
    assert time.monotonic() - begun < 0.1
    assert told == []
    assert link.slack_s(1 << 30) == 0.0
