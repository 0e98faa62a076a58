"""The pieces that a model is written and read in, one tensor at a time: plain ones, shards of one (FSDP), bases with an adapter.

Gathering a shard is a collective: every rank must ask for the same parts in the same order. `Walk` sees to that even when the disk
or a file beside the model fails the one rank that writes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from coordinator.learner.errors import LearnerError
from coordinator.learner.merging import merged


@dataclass(frozen=True, slots=True)
class Merged:
    """A weight [out, in] with its low-rank adapter: base + scale * up @ down, in bf16 (see `merging`)."""

    base: Tensor  # [out, in]
    down: Tensor  # [r, in]
    up: Tensor  # [out, r]
    scale: float

    @property
    def shape(self) -> torch.Size:
        """Of the weight."""
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the weight."""
        return self.base.dtype


Part: TypeAlias = Tensor | Merged


def whole(part: Part) -> Tensor:
    """The full tensor, without gradient. A collective where the part is sharded."""
    if isinstance(part, Merged):
        return merged(whole(part.base), whole(part.down), whole(part.up), part.scale)
    part = part.detach()
    gathered: Tensor = part.full_tensor() if isinstance(part, DTensor) else part
    return gathered


def local(tensor: Tensor) -> Tensor:
    """This rank's own share of the numbers, as a view that may be written to."""
    tensor = tensor.detach()
    share: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return share


def like(full: Tensor, other: Tensor) -> Tensor:
    """The same numbers, sharded as `other` is, on its device. No collective: every rank cuts its own share."""
    full = full.to(other.device)
    if not isinstance(other, DTensor):
        return full
    sharded: Tensor = distribute_tensor(full, other.device_mesh, other.placements, src_data_rank=None)
    return sharded


class Walk:
    """Gathers parts by name, each once, in a fixed order; on leaving, those that were not asked for. Use as a context manager.

    Not so after an error that nobody expected, such as a lack of memory in the middle of a gathering: then the process ends anyway,
    and the other ranks would gather other tensors than this one, or wait for it.
    """

    def __init__(self, parts: Mapping[str, Part], order: Iterable[str]) -> None:
        self._parts = parts
        self._ahead = list(order)[::-1]

    def take(self, name: str) -> Tensor:
        """The whole tensor of the next name."""
        if self._ahead.pop() != name:
            raise ValueError(f"{name} is taken out of order: the other ranks gather another tensor")
        return whole(self._parts[name])

    def __enter__(self) -> Walk:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        while self._ahead and (error is None or isinstance(error, (LearnerError, OSError))):
            self.take(self._ahead[-1])
