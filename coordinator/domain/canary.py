"""Law 3: does an engine really serve the bits that were published? Catches faults, not liars.

The worker runs a fixed token sequence and sends the log-probs of its tokens from the second on. The coordinator keeps the
published bits' own answer to itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from coordinator.wire.canary import scripted_canary as scripted

__all__ = ["TOLERANCE", "judge", "scripted"]

# Largest difference of one log-prob that an honest engine of that precision shows.
TOLERANCE: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}


def judge(
    sent: Sequence[float],
    expected: Sequence[float],
    *,
    previous: Sequence[float] | None,
    digest_changed: bool,
    tolerance: float,
) -> tuple[bool, str]:
    """Whether the answer is that of the published bits, and why not.

    `previous` is the same engine's answer before the swap (None: there was none). With other weights an answer equal to it
    in every place means that the swap did nothing.
    """
    if len(sent) != len(expected):
        return False, f"canary_length: {len(sent)} log-probs were sent, the manifest's canary asks for {len(expected)}"
    if not all(math.isfinite(value) for value in sent):
        return False, "canary_not_finite: a log-prob is NaN or infinite; the weights or the engine are broken"
    if digest_changed and previous is not None and tuple(sent) == tuple(previous):
        return False, "canary_unchanged: the weights changed and the answer did not; the swap had no effect"
    worst = max((abs(a - b) for a, b in zip(sent, expected, strict=True)), default=0.0)
    if worst > tolerance:
        return False, f"wrong_canary: log-probs differ from the published bits by up to {worst:.3g}, {tolerance:g} is allowed"
    return True, f"the canary agrees within {worst:.3g}"
