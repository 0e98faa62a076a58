"""Faults of other systems that the coordinator's loops rule out; the numbers are those of docs/faults.md."""

from __future__ import annotations

import asyncio

import pytest
from structlog.testing import capture_logs

from coordinator.service.loop_lag import LoopLag, keep_looking


def test_fault_11_a_loop_that_stands_still_is_said_with_its_seconds() -> None:
    """Something computed for 40 s on the loop: a log line and the metric tell, where elsewhere all calls just hung."""
    clock = [0.0]

    async def story() -> LoopLag:
        lag = LoopLag()
        looking = asyncio.create_task(keep_looking(lag, sleep=lambda _: asyncio.sleep(0), now=lambda: clock[0]))
        await asyncio.sleep(0)  # the look has begun
        clock[0] += 40.0  # what held the loop meanwhile
        await asyncio.sleep(0)
        looking.cancel()
        return lag

    with capture_logs() as said:
        lag = asyncio.run(story())
    assert lag.longest_s == pytest.approx(40.0, abs=1.0)
    assert [line["event"] for line in said] == ["event_loop_stood_still"]
