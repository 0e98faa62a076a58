"""When a vLLM server that died is started again, and when one that lives counts as dead."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

MOST_DEATHS: Final = 4
WITHIN_S: Final = 1800.0
HANGS_AFTER_S: Final = 180.0
SAME_BITS: Final = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}  # a log-prob of the same weights, before and after a restart


def give_up(deaths: Sequence[float], now: float) -> str:
    """Why the server is not started again after deaths at these times; empty while it is."""
    recent = [at for at in deaths if now - at < WITHIN_S]
    if len(recent) < MOST_DEATHS:
        return ""
    return f"the vLLM server died {len(recent)} times within {WITHIN_S / 60:.0f} minutes"


def hangs(*, moved_at: float, now: float) -> str:
    """Why a server that made its last token at `moved_at`, with completions running since, counts as dead; empty if not."""
    still_s = now - moved_at
    return f"no token for {still_s:.0f} s" if still_s >= HANGS_AFTER_S else ""


def other_bits(before: Sequence[float], after: Sequence[float], dtype: str) -> str:
    """Why log-probs of one token sequence cannot come from the same weights; empty if they can."""
    if len(before) != len(after):
        return f"{len(after)} log-probs instead of {len(before)}"
    worst = max((abs(a - b) for a, b in zip(before, after, strict=True)), default=0.0)
    if not worst <= SAME_BITS[dtype]:  # NaN too
        return f"log-probs differ by {worst:.3g} from those before the restart, {SAME_BITS[dtype]:g} is allowed"
    return ""
