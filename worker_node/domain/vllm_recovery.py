"""When a vLLM server that died is started again, when one that lives counts as dead, and which request is to blame."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

MOST_DEATHS: Final = 4
WITHIN_S: Final = 1800.0
HANGS_AFTER_S: Final = 180.0
ALONE_AFTER: Final = 2  # deaths of the server with a request in it: all that were in it are suspects
GIVEN_UP_AFTER: Final = 3  # the last of them alone; fewer than MOST_DEATHS, so one bad request does not end the worker
SAME_BITS: Final = {"float32": 1e-4, "float16": 0.1, "bfloat16": 0.5}  # a log-prob of the same weights, before and after a restart


def give_up(deaths: Sequence[float], now: float) -> str:
    """Why the server is not started again after deaths at these times; empty while it is."""
    recent = [at for at in deaths if now - at < WITHIN_S]
    if len(recent) < MOST_DEATHS:
        return ""
    return f"the vLLM server died {len(recent)} times within {WITHIN_S / 60:.0f} minutes"


def hangs(*, moved_at: float, now: float) -> str:
    """Why a server that was last seen to get on at `moved_at`, with completions running since, counts as dead; empty if not."""
    still_s = now - moved_at
    return f"no token for {still_s:.0f} s" if still_s >= HANGS_AFTER_S else ""


def may_join(deaths: int, beside: Collection[int]) -> bool:
    """Whether a request may run beside others, each with its deaths of the server: a suspect runs alone, so that the next death tells."""
    return not beside or (deaths < ALONE_AFTER and max(beside) < ALONE_AFTER)


def to_blame(deaths: int) -> str:
    """Why a request is not given to a server again after so many deaths with it; empty while it is."""
    return f"the vLLM server died {deaths} times with it, the last time with it alone" if deaths >= GIVEN_UP_AFTER else ""


def other_bits(before: Sequence[float], after: Sequence[float], dtype: str) -> str:
    """Why log-probs of one token sequence cannot come from the same weights; empty if they can."""
    if len(before) != len(after):
        return f"{len(after)} log-probs instead of {len(before)}"
    worst = max((abs(a - b) for a, b in zip(before, after, strict=True)), default=0.0)
    if not worst <= SAME_BITS[dtype]:  # NaN too
        return f"log-probs differ by {worst:.3g} from those before the restart, {SAME_BITS[dtype]:g} is allowed"
    return ""
