"""safetensors files written one tensor at a time: what a snapshot or checkpoint takes in memory is its largest tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from blake3 import blake3
from torch import Tensor

from coordinator.learner.parts import Part, Walk
from p2p.adapters.durable import FileLayer
from p2p.codec import safetensors
from p2p.codec.layout import ordered
from p2p.domain.manifest import Tensor as Entry

Convert = Callable[[Tensor], Tensor]

_SPELLED = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def order(tensors: Mapping[str, Part], convert: Convert) -> list[str]:
    """The names as they follow each other in the file."""
    return [entry.name for entry in ordered([_entry(name, tensor, convert) for name, tensor in tensors.items()])]


def write(
    path: Path,
    tensors: Mapping[str, Part],
    walk: Walk,
    *,
    files: FileLayer,
    convert: Convert,
    metadata: Mapping[str, str] | None = None,
) -> str:
    """Write `convert` of each tensor to `path`; BLAKE3 (hex) of the file. Raises OSError. Not synced: see `durable`.

    `walk` gathers them; it is one over `order`, or begins with it.
    """
    state = blake3()

    def counted() -> Iterator[memoryview]:
        for chunk in _chunks(tensors, walk, convert, metadata or {}):
            state.update(chunk)
            yield chunk

    files.write_chunks(path, counted())
    return state.hexdigest()


def as_is(tensor: Tensor) -> Tensor:
    """No conversion."""
    return tensor


def _chunks(tensors: Mapping[str, Part], walk: Walk, convert: Convert, metadata: Mapping[str, str]) -> Iterator[memoryview]:
    entries = [_entry(name, tensor, convert) for name, tensor in tensors.items()]
    yield memoryview(safetensors.build_header(entries, metadata))
    for entry in ordered(entries):
        plain = convert(walk.take(entry.name)).cpu().contiguous()
        if plain.numel():
            yield plain.reshape(-1).view(torch.uint8).numpy().data


def _entry(name: str, tensor: Part, convert: Convert) -> Entry:
    dtype = convert(torch.empty(0, dtype=tensor.dtype)).dtype
    return Entry(name, _SPELLED[dtype], tuple(tensor.shape), tensor.shape.numel() * dtype.itemsize)
