"""What a model's own files tell a plan: how many weights there are, and how large a delta will be.

A sample of the weights is read, spread over the whole model, so that a model of any size takes about a second.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

from coordinator.domain.plan_facts import KEYFRAME_SHARE, Fact, Source
from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.codec.forecast import exponents, forecast
from p2p.codec.layout import Bytes, Shard, Slice
from p2p.domain.dtypes import BITS
from p2p.domain.manifest import Tensor
from p2p.errors import SnapshotError

SAMPLE_BYTES = 64 << 20
BLOCK = 1 << 16  # bytes, aligned to every element
STEPS = 8  # of a squashed delta, for the growth


def model_facts(directory: Path, learning_rate: float) -> dict[str, Fact]:
    """Figures that are read out of a model's files; none where they cannot be read."""
    try:
        snapshot = open_snapshot(directory)
        return _facts(snapshot, learning_rate)
    except (SnapshotError, OSError):
        return {}


def _facts(snapshot: Snapshot, learning_rate: float) -> dict[str, Fact]:
    nbytes = sum(one.nbytes for one in snapshot.tensors)
    weights = sum(one.nbytes * 8 // BITS[one.dtype] for one in snapshot.tensors)
    found = {
        "parameters": _read(weights, f"{weights} weights in its files"),
        "keyframe_bytes": _read(KEYFRAME_SHARE * nbytes, f"{KEYFRAME_SHARE:g} of the {nbytes} bytes in its files"),
    }
    return {**found, **_delta_facts(snapshot, learning_rate, weights)}


def _delta_facts(snapshot: Snapshot, learning_rate: float, weights: int) -> Mapping[str, Fact]:
    held = exponents(_sampled(snapshot))
    one, many = forecast(held, learning_rate), forecast(held, learning_rate, steps=STEPS)
    if not one.elements or one.dense_bytes <= 0:
        return {}
    scale = weights / one.elements
    growth = math.log(many.dense_bytes / one.dense_bytes) / math.log(STEPS)
    words = f"from the exponents of {one.elements} of its weights: a step at {learning_rate:g} changes {one.changed:.2%}"
    return {
        "delta_bytes": _read(max(1.0, one.dense_bytes * scale), words),
        "delta_growth": _read(min(max(growth, 0.0), 1.0), f"the same formula over {STEPS} steps"),
    }


def _read(value: float, why: str) -> Fact:
    return Fact(float(value), Source.MEASURED, why)


def _sampled(snapshot: Snapshot) -> Iterator[tuple[Shard, Bytes]]:
    """Blocks of each tensor at equal distances, in all at most about `SAMPLE_BYTES`."""
    nbytes = sum(one.nbytes for one in snapshot.tensors)
    every = max(1, math.ceil(nbytes / SAMPLE_BYTES))
    for tensor in snapshot.tensors:
        data = snapshot.read(tensor.name)
        for start in range(0, tensor.nbytes, BLOCK * every):
            stop = min(start + BLOCK, tensor.nbytes)
            yield _shard(tensor, start, stop), data[start:stop]


def _shard(tensor: Tensor, start: int, stop: int) -> Shard:
    return Shard(tensor.dtype, 0, stop - start, (Slice(tensor, start, stop),))
