"""The fluid bound: no schedule brings a file to every peer sooner, however finely it is cut."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf


def fluid_bound(size: float, seeder_up: float, ups: Sequence[float], downs: Sequence[float] = ()) -> float:
    """Least seconds in which `size` bytes can reach every peer, without any latency.

    The seeder must send each byte once, the slowest downlink must carry all of them, and all uplinks together must carry one copy
    for each peer (Kumar and Ross 2006; Mundinger, Weber and Weiss 2008).

    Args:
        size: bytes of the file.
        seeder_up: the seeder's uplink, bytes a second, above 0.
        ups: each peer's uplink, bytes a second.
        downs: each peer's downlink, bytes a second; empty when they limit nothing.
    """
    slowest = min(downs, default=inf)
    return max(size / seeder_up, size / slowest, len(ups) * size / (seeder_up + sum(ups)))
