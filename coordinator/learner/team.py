"""The ranks of one learner: processes that each hold a shard of the model and take a share of every batch.

What is here are the few things they say to each other outside of FSDP, on the CPU, without pickle. A rank alone says nothing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from coordinator.learner.errors import LearnerError, RankFailed

COLLECTIVE_TIMEOUT = timedelta(minutes=30)  # a rank that died ends the learner at once; this is for one that hangs
LEAST_CPU_RANKS = 4
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Team:
    """This rank's place among them."""

    rank: int = 0
    size: int = 1
    device: str = "cpu"

    @property
    def is_lead(self) -> bool:
        """Rank 0 alone speaks to the coordinator and writes files."""
        return self.rank == 0

    def agreed(self, work: Callable[[], Result]) -> Result:
        """Do what may fail on one rank alone (reading files): all go on, or none does."""
        try:
            result = work()
        except (LearnerError, OSError):
            self.least([0.0])
            raise
        if not self.least([1.0])[0]:
            raise RankFailed("another rank of the learner could not do its part; its words are above in the learner's log")
        return result

    def total(self, values: list[float]) -> list[float]:
        """The sum over the ranks of each value."""
        return self._reduced(values, dist.ReduceOp.SUM)

    def least(self, values: list[float]) -> list[float]:
        """The least of each value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MIN)

    def most(self, values: list[float]) -> list[float]:
        """The largest of each value over the ranks."""
        return self._reduced(values, dist.ReduceOp.MAX)

    def add_up(self, table: Tensor) -> Tensor:
        """The sum of a CPU tensor over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(table)
        return table

    def _reduced(self, values: list[float], how: dist.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return values
        table = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(table, how)
        found: list[float] = table.tolist()
        return found


def refusal(size: int, device: str) -> str | None:
    """Why this host cannot hold so many ranks; None: it can. On a CPU, where ranks gain nothing, a few are let in for trials."""
    most = torch.cuda.device_count() if device == "cuda" else max(LEAST_CPU_RANKS, os.cpu_count() or 1)
    if size <= max(most, 1):
        return None
    return (
        f"learner.ranks is {size}, this host has room for {most} ({'GPUs' if device == 'cuda' else 'processors'}): lower it to that"
    )


def join(rank: int, size: int, *, meeting: Path, device: str) -> Team:
    """Meet the other ranks at the file `meeting`, which they share.

    A file, and loopback for what follows: nothing listens to other hosts.
    """
    if device == "cuda":
        device = f"cuda:{rank}"
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(meeting), size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=COLLECTIVE_TIMEOUT)
    return Team(rank, size, device)
