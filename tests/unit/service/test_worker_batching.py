"""Batcher: few calls for many askers, each with its own answer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from coordinator.service.worker_batching import Batcher


async def test_what_arrives_during_a_call_forms_the_next() -> None:
    calls: list[list[int]] = []
    gate, called = asyncio.Event(), asyncio.Event()

    async def run(batch: Sequence[int]) -> list[int]:
        calls.append(list(batch))
        called.set()
        await gate.wait()
        return [value * 10 for value in batch]

    batcher: Batcher[int, int] = Batcher(run, most=3)
    asks = [asyncio.create_task(batcher.ask(0))]
    await called.wait()
    asks += [asyncio.create_task(batcher.ask(n)) for n in range(1, 6)]
    await asyncio.sleep(0)
    gate.set()
    assert await asyncio.gather(*asks) == [0, 10, 20, 30, 40, 50]
    assert calls == [[0], [1, 2, 3], [4, 5]]


async def test_an_error_reaches_those_of_its_call_and_no_others() -> None:
    async def run(batch: Sequence[int]) -> list[int]:
        if 1 in batch:
            raise ValueError("one")
        return list(batch)

    batcher: Batcher[int, int] = Batcher(run, most=1)
    results = await asyncio.gather(*(batcher.ask(n) for n in range(3)), return_exceptions=True)
    assert results[0] == 0
    assert isinstance(results[1], ValueError)
    assert results[2] == 2


async def test_an_asker_that_went_away_does_not_disturb_the_others() -> None:
    async def run(batch: Sequence[int]) -> list[int]:
        await asyncio.sleep(0)
        return list(batch)

    batcher: Batcher[int, int] = Batcher(run, most=8)
    gone, stays = asyncio.create_task(batcher.ask(1)), asyncio.create_task(batcher.ask(2))
    await asyncio.sleep(0)
    gone.cancel()
    assert await stays == 2
    with pytest.raises(asyncio.CancelledError):
        await gone
