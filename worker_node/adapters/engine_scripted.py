"""The scripted engine: tokens from seeds, no model and no torch. For tests, load runs and rehearsals; it proves nothing.

It respects what a real engine respects (vocabulary, stop ids, caps, version spans, aborts), so the coordinator accepts its
completions where a job allows the kind `scripted`.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coordinator.wire.canary import scripted_canary
from coordinator.wire.messages import EngineInfo
from worker_node.adapters.engine import MOST_QUEUED, Aborted, Applied, Finished, Output, Unmakeable, Weights
from worker_node.domain.generation import Completion, GenerationRequest, SlotKey
from worker_node.errors import EngineError

FAULTS = ("step", "apply", "canary", "token", "logprob", "stop_reason", "unmakeable")
_STOP_PROBABILITY = 0.08
_MOST_CONFIG_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ScriptedOptions:
    """`tokens_per_s` 0: as fast as it goes. `faults`: which occurrence (from 1) of a kind goes wrong, see FAULTS."""

    slots: int = 32
    tokens_per_s: float = 0.0
    faults: Mapping[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Running:
    request: GenerationRequest
    draw: np.random.Generator
    started_at: float
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class ScriptedEngine:
    """An EngineCore whose tokens are a function of the seed."""

    def __init__(
        self,
        options: ScriptedOptions,
        *,
        sleep: Callable[[float], None] = time.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._options = options
        self._sleep = sleep
        self._clock = clock
        self._weights: Weights | None = None
        self._vocab_size = 0
        self._queued: deque[GenerationRequest] = deque()
        self._running: dict[SlotKey, _Running] = {}
        self._tokens = 0
        self._seen: dict[str, int] = {}

    @property
    def info(self) -> EngineInfo:
        return EngineInfo(kind="scripted", version="1", dtype="float32", device="none")

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def is_busy(self) -> bool:
        return bool(self._queued or self._running)

    def load(self, weights: Weights) -> None:
        self._vocab_size = _vocab_size(weights)
        self._weights = weights

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        if len(self._queued) + len(requests) > MOST_QUEUED:
            raise EngineError(f"more than {MOST_QUEUED} completions are queued: ask for fewer leases", poisoned=False)
        self._queued.extend(requests)

    def step(self) -> list[Output]:
        if self._weights is None:
            raise EngineError("no weights are loaded: call load first", poisoned=False)
        if self._goes_wrong("step"):
            raise EngineError("scripted fault in a decode step", poisoned=True)
        outputs = self._fill_rows()
        if self._options.tokens_per_s > 0 and self._running:
            self._sleep(len(self._running) / self._options.tokens_per_s)
        for running in list(self._running.values()):
            outputs += self._next_token(running, self._weights.version)
        return outputs

    def abort(self, keys: Collection[SlotKey]) -> list[Output]:
        stopped = [request.key for request in self._queued if request.key in keys]
        stopped += [key for key in self._running if key in keys]
        self._queued = deque(request for request in self._queued if request.key not in keys)
        for key in stopped:
            self._running.pop(key, None)
        return [Aborted(key) for key in stopped]

    def apply(self, weights: Weights, *, abort_running: bool) -> Applied:
        started = self._clock()
        if self._goes_wrong("apply"):
            raise EngineError("scripted fault in a weight update; the old weights are kept", poisoned=False)
        self._vocab_size = _vocab_size(weights)
        self._weights = weights
        return Applied(self.abort(list(self._running)) if abort_running else [], self._clock() - started)

    def canary(self, ids: Sequence[int]) -> tuple[float, ...]:
        if self._weights is None:
            raise EngineError("no weights are loaded: call load first", poisoned=False)
        digest = "0" * 64 if self._goes_wrong("canary") else self._weights.digest
        return scripted_canary(digest, max(len(ids) - 1, 0))

    def close(self) -> None:
        self._queued.clear()
        self._running.clear()

    def _fill_rows(self) -> list[Output]:
        refused: list[Output] = []
        while self._queued and len(self._running) < self._options.slots:
            request = self._queued.popleft()
            if self._goes_wrong("unmakeable"):
                refused.append(Unmakeable(request.key, "scripted fault: this prompt does not fit"))
                continue
            draw = np.random.Generator(np.random.Philox(key=request.seed))
            self._running[request.key] = _Running(request, draw, self._clock())
        return refused

    def _next_token(self, running: _Running, version: int) -> list[Output]:
        sampling = running.request.sampling
        uniform, pick = running.draw.random(2)
        stops = sampling.stop_token_ids
        ends = stops and uniform < _STOP_PROBABILITY
        token = stops[int(pick * len(stops))] if ends else int(pick * self._vocab_size)
        running.token_ids.append(token)
        running.logprobs.append(-0.01 - 5.0 * uniform)
        running.versions.append(version)
        self._tokens += 1
        if token not in stops and len(running.token_ids) < sampling.max_new_tokens:
            return []
        del self._running[running.request.key]
        return [Finished(running.request.key, self._completion(running, stopped=token in stops))]

    def _completion(self, running: _Running, *, stopped: bool) -> Completion:
        token_ids, logprobs = running.token_ids, running.logprobs
        if self._goes_wrong("token"):
            token_ids = [self._vocab_size + 7, *token_ids[1:]]
        if self._goes_wrong("logprob"):
            logprobs = [0.5, *logprobs[1:]]
        if self._goes_wrong("stop_reason"):
            stopped = not stopped
        return Completion(
            token_ids=np.array(token_ids, np.int32),
            logprobs=np.array(logprobs, np.float32),
            versions=np.array(running.versions, np.int32),
            stop_reason="stop" if stopped else "length",
            generate_s=max(self._clock() - running.started_at, 0.0),
        )

    def _goes_wrong(self, kind: str) -> bool:
        """Whether this occurrence of `kind` is the scripted one."""
        planned = self._options.faults.get(kind, 0)
        if not planned:
            return False
        self._seen[kind] = self._seen.get(kind, 0) + 1
        return self._seen[kind] == planned


def _vocab_size(weights: Weights) -> int:
    """The vocabulary size in the directory's config.json."""
    path = weights.directory / "config.json"
    try:
        if path.stat().st_size > _MOST_CONFIG_BYTES:
            raise EngineError(f"{path.name} is larger than {_MOST_CONFIG_BYTES} bytes")
        size = json.loads(path.read_text("utf-8"))["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineError(f"{path.name} of version {weights.version} names no vocab_size: {error!r}") from error
    if not isinstance(size, int) or size < 1:
        raise EngineError(f"vocab_size in {path.name} is {size!r}: it must be a positive integer")
    return size
