"""Several deltas in a row become one, without the versions between them: at most one shard is made beside the inputs.

Differences add up exactly in wrapped arithmetic, and what changed there and back is no change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from p2p.codec import delta
from p2p.codec.delta import Delta
from p2p.codec.layout import Bytes, Shard
from p2p.codec.records import FAST, UNCHANGED, Record
from p2p.errors import ApplyFailed


def compose(shard: Shard, base: Bytes, steps: Iterable[Record], effort: Delta, place: str) -> Record:
    """The record from `base` to where `steps` lead, each from the result of the one before. Raises ApplyFailed."""
    reached = np.array(base)
    for step in steps:
        if step.mode != UNCHANGED:
            reached = advanced(shard, step, reached, place)
    return effort.record(shard, base, reached)


def squash(shard: Shard, new: Bytes, steps: Sequence[Record], effort: Delta, place: str) -> Record:
    """The record that `steps` make together, for a publisher that holds only the newest bits, `new`, where they lead.

    The steps must be of mode FAST or UNCHANGED, whose changes do not depend on the base: subtracted from the new bits they give
    the old ones. Raises ApplyFailed for others; keep single deltas as `Delta("fast")` records.
    """
    old = np.array(new)
    for step in reversed(steps):
        if step.mode not in {FAST, UNCHANGED}:
            raise ApplyFailed(f"{place} is of mode {step.mode}; only fast records can be squashed without their base")
        delta.undo(shard, delta.located(shard, step, old, place), old)
    return effort.record(shard, old, new)


def advanced(shard: Shard, step: Record, held: Bytes, place: str) -> Bytes:
    """The shard after a step: `held` itself, changed in place, unless the record replaces it whole."""
    if step.mode < UNCHANGED:
        return np.array(delta.new_bytes(shard, step, held, place))
    delta.apply(shard, step, held, place)
    return held
