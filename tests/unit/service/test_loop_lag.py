"""Fault 11: the event loop stands still, and nobody is told why all calls wait."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from structlog.testing import capture_logs

from coordinator.service.loop_lag import LOOK_S, LOOKS, LoopLag, keep_looking


class Ended(Exception):
    """The story is over."""


def looked(late: Sequence[float]) -> tuple[LoopLag, list[float]]:
    """What is seen, and what is said, when each look comes so many seconds late."""
    time_s, coming, lag = 100.0, iter(late), LoopLag()

    async def sleep(seconds: float) -> None:
        nonlocal time_s
        step = next(coming, None)
        if step is None:
            raise Ended
        time_s += seconds + step

    with capture_logs() as said, pytest.raises(Ended):
        asyncio.run(keep_looking(lag, sleep=sleep, now=lambda: time_s))
    return lag, [line["seconds"] for line in said if line["event"] == "event_loop_stood_still"]


def test_a_loop_that_stands_still_is_said_once_each_time() -> None:
    lag, said = looked([0.0, 0.9, 7.5, 0.0, 1.25])
    assert said == [7.5, 1.25]
    assert lag.longest_s == pytest.approx(7.5)


def test_what_is_long_past_counts_no_more() -> None:
    lag, _ = looked([7.5, *[0.25] * LOOKS])
    assert lag.longest_s == pytest.approx(0.25)


def test_a_clock_that_wakes_early_is_no_lag() -> None:
    assert LoopLag().longest_s == 0.0
    assert looked([-LOOK_S / 2])[0].longest_s == 0.0


def test_a_callback_that_computes_is_seen() -> None:
    """On a real loop: what runs between the look and its turn is what the look waits for."""
    passed = [0.0]

    async def story() -> LoopLag:
        lag = LoopLag()
        task = asyncio.create_task(keep_looking(lag, sleep=lambda _: asyncio.sleep(0), now=lambda: passed[0]))
        await asyncio.sleep(0)  # the look has begun
        passed[0] += 3.0  # what ran on the loop meanwhile
        await asyncio.sleep(0)
        task.cancel()
        return lag

    assert asyncio.run(story()).longest_s == pytest.approx(3.0 - LOOK_S)
