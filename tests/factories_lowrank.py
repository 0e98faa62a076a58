"""What the tests of low-rank edges are made with: factors of any size, and the definition of what they make, without the codec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from p2p.codec import peft_files
from p2p.codec.lowrank import Factors
from p2p.domain.manifest import Tensor
from tests.factories_p2p import Spec, safetensors_bytes

Halves = NDArray[np.uint16]


def matrix(name: str, rows: int, columns: int) -> Tensor:
    """A bf16 matrix as a manifest lists it."""
    return Tensor(name, "BF16", (rows, columns), 2 * rows * columns)


def halves(values: NDArray[Any]) -> Halves:
    """The bf16 numbers nearest to float32 values, ties to even, by comparing distances: every one is exact in float64."""
    bits = np.ascontiguousarray(values, "<f4").view("<u4")
    below = (bits >> 16).astype("<u4")
    with np.errstate(all="ignore"):  # infinities among them
        lower, upper = (below << 16).view("<f4").astype(float), ((below + 1) << 16).view("<f4").astype(float)
        exact = bits.view("<f4").astype(float)
        up = np.abs(upper - exact) < np.abs(exact - lower)
        tie = np.abs(upper - exact) == np.abs(exact - lower)
    return (below + (up | (tie & (below & 1 == 1)))).astype("<u2")


def floats(words: Halves) -> NDArray[np.float32]:
    """bf16 bits as float32."""
    return (words.astype("<u4") << 16).view("<f4")


def drawn(tensor: Tensor, rank: int, seed: int, *, size: float = 0.02) -> Factors:
    """Normal factors, as a few steps leave them."""
    rng = np.random.default_rng(seed)
    rows, columns = tensor.shape
    return Factors(
        halves(rng.normal(0, size, (rows, rank)).astype("<f4")), halves(rng.normal(0, size, (rank, columns)).astype("<f4"))
    )


def defined(words: Halves, factors: Factors, scale: float) -> Halves:
    """PROTOCOL.md, section 5, whole matrices at a time: numpy multiplies and adds float32 numbers one by one."""
    with np.errstate(all="ignore"):  # the weights may be anything
        up, down = floats(factors.up), floats(factors.down)
        up, down = np.where(np.abs(up) < 2.0**-48, np.float32(0), up), np.where(np.abs(down) < 2.0**-48, np.float32(0), down)
        total = np.zeros(words.shape, "<f4")
        for k in range(factors.rank):
            total = total + up[:, k, None] * down[None, k, :]
        change = np.float32(scale) * total
        old = floats(words)
        value = np.where(np.abs(old) < 2.0**-100, np.float32(0), old) + change
        made = np.where(np.isnan(value), 0x7FC0, halves(value))
        return np.where(change == 0, words, made).astype("<u2")


def write_adapter(version: Path, factors: Mapping[str, Factors], *, rank: int, alpha: int) -> None:
    """The adapter folder of a version; `factors` by the names of the tensors that they are added to."""
    specs: dict[str, Spec] = {}
    layers = [name.removesuffix(".weight") for name in factors]
    for layer, each in zip(layers, factors.values(), strict=True):
        for half, words in (("down", each.down), ("up", each.up)):
            specs[peft_files.tensor_name(layer, half)] = ("BF16", words.shape, words.tobytes())
    folder = version / peft_files.FOLDER
    folder.mkdir()
    (folder / peft_files.WEIGHTS).write_bytes(safetensors_bytes(specs))
    (folder / peft_files.CONFIG).write_bytes(peft_files.config("base", rank=rank, alpha=alpha, layers=layers))
