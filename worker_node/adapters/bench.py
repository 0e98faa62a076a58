"""A short decode benchmark: tokens per second of an engine with its rows full, seeds fixed."""

from __future__ import annotations

import time
from collections.abc import Callable

from coordinator.wire.messages import SamplingParameters
from worker_node.adapters.engine import EngineCore
from worker_node.domain.generation import GenerationRequest

_LEASE = "benchmark"
_PROMPT = (1, 2, 3, 4, 5, 6, 7, 8)


def decode_rate(
    core: EngineCore, *, slots: int, new_tokens: int = 16, limit_s: float = 5.0, clock: Callable[[], float] = time.monotonic
) -> float:
    """Generated tokens per second; 0 when nothing could be made. The engine must be loaded and idle, and is idle afterwards."""
    sampling = SamplingParameters(max_new_tokens=new_tokens, temperature=1.0, stop_token_ids=())
    keys = [(_LEASE, slot) for slot in range(slots)]
    core.admit([GenerationRequest(key, _PROMPT, key[1], sampling) for key in keys])
    started, before = clock(), core.tokens
    while core.is_busy and clock() - started < limit_s:
        core.step()
    seconds = clock() - started
    core.abort(keys)
    return (core.tokens - before) / seconds if seconds > 0 else 0.0
