"""T_bcast before the first delta went out: from its forecast size, and from what the workers' first fetch showed of their links (DESIGN 5)."""

from __future__ import annotations

from collections.abc import Mapping

from coordinator.domain.plan_facts import APPLY_BYTES_PER_S, REBUILD_BYTES_PER_S


def forecast_broadcasts(*, delta_bytes: float, raw_bytes: float, down: Mapping[str, float]) -> dict[str, float]:
    """For each worker, seconds from publication until it serves the version.

    The tensors' `raw_bytes` are written, coded and rebuilt, the delta's come at `down` bytes a second (above 0: the rate at which the worker
    fetched its first version, from the seeder and from peers), and the engine takes the bits.
    """
    fixed_s = raw_bytes / REBUILD_BYTES_PER_S + raw_bytes / APPLY_BYTES_PER_S
    return {worker: fixed_s + delta_bytes / rate for worker, rate in down.items()}
