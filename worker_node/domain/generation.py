"""What goes into an engine and comes out of it: plain values, arrays read only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from coordinator.wire.messages import SamplingParameters

SlotKey = tuple[str, int]
"""Lease id and slot: names one completion on this worker."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One completion to make. The same seed, prompt and weights give the same tokens whatever runs beside them."""

    key: SlotKey
    prompt_ids: tuple[int, ...]
    seed: int
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True, eq=False)
class Completion:
    """One finished completion; the arrays have one entry per token."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]  # of the sampled tokens, at the sampling temperature
    versions: NDArray[np.int32]  # the policy version that made each token
    stop_reason: Literal["stop", "length"]
    generate_s: float

    @property
    def length(self) -> int:
        """Tokens, the stop token included."""
        return len(self.token_ids)

    @property
    def oldest_version(self) -> int:
        """The version of the first token; spans never decrease."""
        return int(self.versions[0])

    def version_numbers(self) -> frozenset[int]:
        """Every version that made a token of this completion."""
        return frozenset(int(version) for version in np.unique(self.versions))
