"""The engine port, and the thread that an engine lives in.

An `EngineCore` belongs to one thread and makes one decode step at a time, so "between decode steps" is simply between two
calls. `EngineHost` owns that thread: orders queue up and are carried out between steps, outputs are handed to the event
loop in the order they were made.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from coordinator.wire.messages import EngineInfo
from worker_node.domain.generation import Completion, GenerationRequest, SlotKey
from worker_node.errors import EngineError

T = TypeVar("T")
MOST_QUEUED = 65_536
MOST_ORDERS = 1024


@dataclass(frozen=True, slots=True)
class Weights:
    """A verified Hugging Face directory (`model.safetensors` and JSON files) and the version it holds."""

    directory: Path
    version: int
    digest: str


@dataclass(frozen=True, slots=True)
class Finished:
    """A slot is done."""

    key: SlotKey
    completion: Completion


@dataclass(frozen=True, slots=True)
class Aborted:
    """A slot was stopped; nothing of it may be used."""

    key: SlotKey


@dataclass(frozen=True, slots=True)
class Unmakeable:
    """A slot that this engine cannot make; the engine is well."""

    key: SlotKey
    reason: str


Output = Finished | Aborted | Unmakeable


@dataclass(frozen=True, slots=True)
class Applied:
    """New weights are in place."""

    ended: list[Output]  # what the update stopped, and what ended while it was prepared
    stall_s: float  # how long running completions had to wait for it


@dataclass(frozen=True, slots=True)
class Swapped:
    """The engine generates with new weights from now on."""

    canary_logprobs: tuple[float, ...]
    seconds: float  # to load, or that generation stood still for the update
    tokens_per_s: float  # as measured; 0: it was not


class EngineCore(Protocol):
    """What produces tokens. Used from one thread; raises EngineError, `poisoned` when it must not be used any more."""

    @property
    def info(self) -> EngineInfo:
        """Kind, version, dtype and device."""
        ...

    @property
    def tokens(self) -> int:
        """Tokens made since the start."""
        ...

    @property
    def is_busy(self) -> bool:
        """Whether `step` has anything to do."""
        ...

    def load(self, weights: Weights) -> None:
        """Load a model from nothing (any allow-listed architecture). Nothing may be running."""
        ...

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """Queue completions; they join the running batch as rows become free."""
        ...

    def step(self) -> list[Output]:
        """Make the next token of every running completion; what ended with it.

        An engine that runs by itself waits a few hundredths of a second for what ends.
        """
        ...

    def abort(self, keys: Collection[SlotKey]) -> list[Output]:
        """Stop those of `keys` that are queued or running."""
        ...

    def apply(self, weights: Weights, *, abort_running: bool) -> Applied:
        """Replace the weights in place, whole or not at all.

        Without `abort_running` running completions go on (their cache stays) and later tokens carry the new version. Where that
        goes wrong, an engine that can make them again from their seeds may do so.
        """
        ...

    def canary(self, ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probs of `ids[1:]` under the loaded weights, at temperature 1."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


class EngineHost:
    """Runs an engine in a thread of its own."""

    def __init__(
        self,
        make: Callable[[], EngineCore],
        *,
        on_output: Callable[[list[Output]], None],
        on_failure: Callable[[str], None],
        least_step_s: float = 0.0,
    ) -> None:
        """`make` is called in the thread; the callbacks run on the event loop that calls `start`.

        A decode step takes at least `least_step_s`: its owner throttles the worker. The rest of it is waited for.
        """
        self._least_step_s = least_step_s
        self._make = make
        self._on_output = on_output
        self._on_failure = on_failure
        self._orders: queue.Queue[Callable[[EngineCore], None] | None] = queue.Queue(MOST_ORDERS + 1)  # one place is for the end
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._broken: str | None = None
        self._busy_s = 0.0
        self._tokens = 0
        self._gate = threading.Lock()  # no order slips in between breaking and refusing those that wait

    async def start(self) -> EngineInfo:
        """Start the thread; what the engine is. Raises EngineError when it cannot be made."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return await self.run(lambda core: core.info)

    def meter(self) -> tuple[int, float]:
        """Tokens made, and seconds spent in decode steps, since the start."""
        return self._tokens, self._busy_s

    async def run(self, order: Callable[[EngineCore], T], *, then: Callable[[T], None] = lambda _: None) -> T:
        """Carry out `order` between two decode steps. A poisoned engine refuses every later order.

        `then` gets the answer on the event loop, in its place among the outputs: after those made before the order, before
        those made after it. (Whoever awaits may be woken later than that.)
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def carry_out(core: EngineCore) -> None:
            try:
                answer = order(core)
            except Exception as error:
                loop.call_soon_threadsafe(_fail, future, error)
                if isinstance(error, EngineError) and error.poisoned:
                    raise
            else:
                loop.call_soon_threadsafe(_resolve, future, answer, then)

        self._enqueue(carry_out)
        return await future

    def admit(self, requests: Sequence[GenerationRequest]) -> None:
        """`EngineCore.admit`, between two steps; returns at once."""
        self._enqueue(lambda core: core.admit(requests))

    def abort(self, keys: Collection[SlotKey]) -> None:
        """`EngineCore.abort`, between two steps; what it stopped is handed out. Returns at once."""
        self._enqueue(lambda core: self._deliver(core.abort(keys)))

    async def swap(
        self,
        weights: Weights,
        *,
        load: bool,
        abort_running: bool,
        canary_ids: Sequence[int],
        measure: Callable[[EngineCore], float] = lambda _: 0.0,
        on_swapped: Callable[[Swapped], None] = lambda _: None,
    ) -> Swapped:
        """Load or replace the weights, run the canary and `measure` (a benchmark: tokens per second), all between two steps.

        What the swap stopped is handed out first, then `on_swapped` is called, then come outputs of the new weights.
        """

        def order(core: EngineCore) -> Swapped:
            if load:
                started = time.monotonic()
                core.load(weights)
                seconds = time.monotonic() - started
            else:
                before = core.tokens
                applied = core.apply(weights, abort_running=abort_running)
                self._tokens += core.tokens - before
                self._deliver(applied.ended)
                seconds = applied.stall_s
            return Swapped(core.canary(canary_ids), seconds, measure(core))

        return await self.run(order, then=on_swapped)

    async def close(self, timeout_s: float = 10.0) -> None:
        """End the thread; a step under way is finished first, or abandoned after `timeout_s` (the thread is a daemon)."""
        with self._gate:
            self._broken = self._broken or "the engine is closed"
        if self._thread.is_alive():
            self._orders.put_nowait(None)
            await asyncio.to_thread(self._thread.join, timeout_s)

    def _enqueue(self, order: Callable[[EngineCore], None]) -> None:
        with self._gate:
            if self._broken is not None:
                raise EngineError(self._broken, poisoned=True)
            if self._orders.qsize() >= MOST_ORDERS:
                raise EngineError(f"{MOST_ORDERS} orders wait for the engine: it does not make progress", poisoned=True)
            self._orders.put_nowait(order)

    def _run(self) -> None:
        core: EngineCore | None = None
        try:
            core = self._make()
            while self._obey(core):
                if core.is_busy:
                    self._step(core)
        except EngineError as error:
            self._break(str(error))
        except Exception as error:  # a library's: its class often says more than its words
            self._break(f"{type(error).__name__}: {error}")
        finally:
            if core is not None:
                core.close()

    def _step(self, core: EngineCore) -> None:
        started, before = time.monotonic(), core.tokens
        outputs = core.step()
        if self._least_step_s:
            time.sleep(max(self._least_step_s - (time.monotonic() - started), 0.0))
        self._busy_s += time.monotonic() - started
        self._tokens += core.tokens - before
        self._deliver(outputs)

    def _obey(self, core: EngineCore) -> bool:
        """Carry out waiting orders, waiting for one when there is nothing to generate; False to end."""
        while True:
            try:
                order = self._orders.get(block=not core.is_busy)
            except queue.Empty:
                return True
            if order is None:
                return False
            order(core)

    def _deliver(self, outputs: list[Output]) -> None:
        if outputs:
            self._call(lambda: self._on_output(outputs))

    def _break(self, reason: str) -> None:
        with self._gate:
            self._broken = reason
            error = EngineError(reason, poisoned=True)
            while not self._orders.empty():
                if (order := self._orders.get_nowait()) is not None:
                    _refuse(order, error)
        self._call(lambda: self._on_failure(reason))

    def _call(self, callback: Callable[[], None]) -> None:
        loop = self._loop
        if loop is not None and not loop.is_closed():
            loop.call_soon_threadsafe(callback)


class _BrokenCore:
    """Stands in for a broken engine so that waiting orders fail with its reason."""

    def __init__(self, error: EngineError) -> None:
        self._error = error

    def __getattr__(self, name: str) -> object:
        raise self._error


def _refuse(order: Callable[[EngineCore], None], error: EngineError) -> None:
    try:
        order(_BrokenCore(error))  # type: ignore[arg-type]  # every use of it raises `error`
    except EngineError:
        return


def _resolve(future: asyncio.Future[T], answer: T, then: Callable[[T], None]) -> None:
    then(answer)
    if not future.done():
        future.set_result(answer)


def _fail(future: asyncio.Future[T], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
