"""Which coding a publisher takes for a shard: the quicker or the smaller, by what its link and its cores can do."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from p2p.codec.changes import Part
from p2p.codec.records import DENSE, FAST, GROUPED

Effort = Literal["fast", "grouped", "dense", "auto"]
MODES: Mapping[Effort, int] = {"fast": FAST, "grouped": GROUPED, "dense": DENSE}

# Measured on one core with real deltas of 1.4 to 14 % changed: bytes as a share of fast's, and seconds, BLAKE3 included.
_BYTES = {FAST: 1.0, GROUPED: 0.80, DENSE: 0.69}
_SECONDS_A_BYTE = {FAST: 0.25e-9, GROUPED: 0.7e-9, DENSE: 1.15e-9}
_SECONDS_A_CHANGE = {FAST: 24e-9, GROUPED: 33e-9, DENSE: 44e-9}


@dataclass(frozen=True, slots=True)
class Auto:
    """Encoding and sending overlap shard by shard, so the slower of the two decides; a tie goes to the less work."""

    link_bytes_per_s: float
    cores: int

    def __call__(self, part: Part) -> int:
        """The mode for a shard that starts with `part`."""
        elements, count = part.stop - part.start, len(part.changes)
        nbytes = elements * part.changes.differences.itemsize
        return min(_BYTES, key=lambda mode: self._seconds(mode, nbytes, count, elements))

    def _seconds(self, mode: int, nbytes: int, count: int, elements: int) -> float:
        work = nbytes * _SECONDS_A_BYTE[mode] + count * _SECONDS_A_CHANGE[mode]
        return max(work / self.cores, _BYTES[mode] * fast_bytes(count, elements) / self.link_bytes_per_s)


def fast_bytes(count: int, elements: int) -> float:
    """About what the fast coding takes: gaps at their entropy, a sign bit, half a bit for larger changes."""
    if count == 0:
        return 0.0
    share = count / elements
    rest = -(1 - share) * math.log2(1 - share) / share if share < 1 else 0.0
    return count * (-math.log2(share) + rest + 1.5) / 8


def chooser(effort: Effort, link_bytes_per_s: float, cores: int) -> Callable[[Part], int]:
    """How `records.encode` shall choose."""
    if effort == "auto":
        return Auto(link_bytes_per_s, cores)
    mode = MODES[effort]
    return lambda _: mode
