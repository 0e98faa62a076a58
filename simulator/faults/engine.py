"""A simulated engine: slots that decode on the virtual clock, and which version made each token."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import numpy as np

from simulator.faults.parts import STOP_TOKEN, VOCAB
from worker_node.domain.generation import Completion, GenerationRequest, SlotKey

MEAN_TOKENS = 8.0


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    began: float
    tokens: int
    timer: asyncio.TimerHandle


class SimEngine:
    """Completions take tokens / rate seconds; the same seed makes the same tokens under every version (`temper` may spoil them)."""

    def __init__(self, slots: int, tokens_per_s: float, tail: float, finished: Callable[[SlotKey, Completion], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._slots = slots
        self._rate = tokens_per_s
        self._tail = tail
        self._finished = finished
        self._queue: deque[GenerationRequest] = deque()
        self._running: dict[SlotKey, _Running] = {}
        self._swaps: list[tuple[float, int]] = []

    def swap(self, version: int) -> None:
        """Every token from now on is made by that version."""
        self._swaps.append((self._loop.time(), version))
        self._begin()

    def admit(self, requests: tuple[GenerationRequest, ...]) -> None:
        """Queue requests."""
        self._queue.extend(requests)
        self._begin()

    def abort(self, keys: set[SlotKey]) -> None:
        """Stop these; nothing of them is used."""
        self._queue = deque(request for request in self._queue if request.key not in keys)
        for key in keys & self._running.keys():
            self._running.pop(key).timer.cancel()
        self._begin()

    def abort_all(self) -> list[SlotKey]:
        """Stop everything; what was stopped."""
        keys = [*self._running, *(request.key for request in self._queue)]
        self._queue.clear()
        for running in self._running.values():
            running.timer.cancel()
        self._running.clear()
        return keys

    def _begin(self) -> None:
        while self._queue and len(self._running) < self._slots and self._swaps:
            request = self._queue.popleft()
            tokens = completion_length(request.seed, self._tail, request.sampling.max_new_tokens)
            timer = self._loop.call_later(tokens / self._rate, self._end, request.key)
            self._running[request.key] = _Running(request, self._loop.time(), tokens, timer)

    def _end(self, key: SlotKey) -> None:
        running = self._running.pop(key)
        made_at = running.began + (np.arange(running.tokens) + 0.5) / self._rate
        place = np.searchsorted([at for at, _ in self._swaps], made_at, side="right") - 1
        versions = np.array([version for _, version in self._swaps], np.int32)[place]
        self._finished(key, made(running.request, running.tokens, versions, running.tokens / self._rate))
        self._begin()


def made(
    request: GenerationRequest, tokens: int, versions: np.ndarray[tuple[int], np.dtype[np.int32]], seconds: float
) -> Completion:
    """The completion of a request."""
    stops = tokens < request.sampling.max_new_tokens
    ids = np.asarray([4 + (request.seed + place) % (VOCAB - 4) for place in range(tokens)], np.int32)
    if stops:
        ids[-1] = STOP_TOKEN
    logprobs = np.full(tokens, -0.5, np.float32)
    return Completion(ids, logprobs, versions.astype(np.int32), "stop" if stops else "length", seconds)


def completion_length(seed: int, tail: float, most: int) -> int:
    """Log-normal around MEAN_TOKENS; a function of the slot's seed."""
    draw = Random(seed).gauss(0.0, 1.0)  # noqa: S311 (seeded on purpose)
    return min(max(round(MEAN_TOKENS * math.exp(tail * draw - tail**2 / 2)), 1), most)
