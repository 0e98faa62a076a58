"""Encode and decode speed of the full-snapshot encoding against a plain copy: `python -m tests.bench.weights [--json]`.

GB/s are of bf16 model bytes, one thread, best of three. The tensor is synthetic: bf16 normal(0, 0.02).
"""

from __future__ import annotations

import argparse
import json as json_module
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from blake3 import blake3

from p2p.codec import planes
from p2p.codec.layout import Bytes, shards, view
from p2p.domain.manifest import Tensor

ELEMENTS = 64 << 20
T = TypeVar("T")


def synthetic(elements: int) -> Bytes:
    """bf16 values (truncated float32), a block at a time."""
    rng = np.random.default_rng(0)
    words = np.empty(elements, "<u2")
    for start in range(0, elements, 1 << 20):
        block = rng.normal(0, 0.02, min(1 << 20, elements - start)).astype("<f4")
        words[start : start + len(block)] = block.view("<u4") >> 16
    return words.view(np.uint8)


def best(action: Callable[[], T], times: int = 3) -> tuple[float, T]:
    """The shortest of some runs, in seconds, and a result."""
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        result = action()
        taken.append(time.perf_counter() - begun)
    return min(taken), result


def measure(elements: int = ELEMENTS) -> dict[str, float]:
    """Every figure, by name."""
    data = synthetic(elements)
    plan = shards([Tensor("w", "BF16", (elements,), data.nbytes)])
    parts = [(shard, data[shard.offset : shard.offset + shard.nbytes]) for shard in plan]
    gigabytes = data.nbytes / 1e9
    copied, _ = best(data.copy)
    hashed, _ = best(lambda: blake3(view(data)).digest())
    encoded, chunks = best(lambda: [bytes(view(chunk)) for chunk in planes.encode(parts)])
    target = np.empty_like(data)

    def decode() -> None:
        offset = 0
        for part in planes.decode(chunks, plan):
            target[offset : offset + part.nbytes] = part
            offset += part.nbytes

    decoded, _ = best(decode)
    if not np.array_equal(target, data):
        raise AssertionError("decoded bytes differ")
    return {
        "elements": elements,
        "bytes_per_param": sum(len(chunk) for chunk in chunks) / elements,
        "memcpy_gb_s": gigabytes / copied,
        "blake3_gb_s": gigabytes / hashed,
        "encode_gb_s": gigabytes / encoded,
        "decode_gb_s": gigabytes / decoded,
    }


def main(json: bool = False, elements: int = ELEMENTS) -> dict[str, float]:
    """Print the figures, as one JSON object or in lines; returns them."""
    figures = measure(elements)
    if json:
        print(json_module.dumps(figures))
        return figures
    for name, value in figures.items():
        print(f"{name:16} {value:,.4g}")
    return figures


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    main(parser.parse_args().json)
