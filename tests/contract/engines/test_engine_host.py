"""The engine's thread: orders between steps, outputs in order, failures that nobody can miss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable

import pytest

from worker_node.adapters.bench import decode_rate
from worker_node.adapters.engine import Aborted, EngineHost, Finished, Output, Unmakeable, Weights
from worker_node.adapters.engine_scripted import ScriptedEngine, ScriptedOptions
from worker_node.adapters.engines import make_engine
from worker_node.config import EngineSettings
from worker_node.domain.generation import GenerationRequest
from worker_node.errors import EngineError

Ask = Callable[..., GenerationRequest]


class Watched:
    """A host whose outputs and failure are kept."""

    def __init__(self, options: ScriptedOptions) -> None:
        self.outputs: list[Output] = []
        self.failures: list[str] = []
        self.news = asyncio.Event()
        self.host = EngineHost(lambda: ScriptedEngine(options), on_output=self.take, on_failure=self.fail)

    def take(self, outputs: list[Output]) -> None:
        self.outputs += outputs
        self.news.set()

    def fail(self, reason: str) -> None:
        self.failures.append(reason)
        self.news.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10.0):
            while not condition():
                self.news.clear()
                await self.news.wait()


@pytest.fixture
async def watch() -> AsyncIterator[Callable[..., Watched]]:
    made: list[Watched] = []

    def make(**options: object) -> Watched:
        made.append(Watched(ScriptedOptions(**options)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for watched in made:
        await watched.host.close()


async def test_generation_runs_beside_the_loop(watch: Callable[..., Watched], published: list[Weights], ask: Ask) -> None:
    """Load with canary, generate, read the meter."""
    w = watch(slots=4)
    assert (await w.host.start()).kind == "scripted"
    assert len((await w.host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2, 3))).canary_logprobs) == 2
    w.host.admit([ask(slot) for slot in range(6)])
    await w.until(lambda: len(w.outputs) == 6)
    tokens, busy_s = w.host.meter()
    assert tokens == sum(out.completion.length for out in w.outputs if isinstance(out, Finished))
    assert busy_s > 0


async def test_a_throttled_engine_takes_its_time_for_each_step(published: list[Weights], ask: Ask) -> None:
    """An owner's limit: the meter, which the worker reports its rate from, counts the waiting too."""
    done: list[Output] = []
    finished = asyncio.Event()

    def take(outputs: list[Output]) -> None:
        done.extend(outputs)
        if len(done) == 4:
            finished.set()

    host = EngineHost(
        lambda: ScriptedEngine(ScriptedOptions(slots=4)), on_output=take, on_failure=lambda _: None, least_step_s=0.01
    )
    await host.start()
    await host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2))
    host.admit([ask(slot) for slot in range(4)])
    async with asyncio.timeout(20):
        await finished.wait()
    longest = max(one.completion.length for one in done if isinstance(one, Finished))
    tokens, busy_s = host.meter()
    await host.close()
    assert busy_s >= 0.01 * longest
    assert tokens / busy_s <= 4 / 0.01


async def test_a_swap_in_full_flight_stops_or_keeps(watch: Callable[..., Watched], published: list[Weights], ask: Ask) -> None:
    """Slots stopped by a swap are handed out before the swap is reported; kept ones carry both versions."""
    w = watch(slots=4, tokens_per_s=2000.0)
    await w.host.start()
    await w.host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2))
    w.host.admit([ask(0, max_new_tokens=5000, stop=()), ask(1, max_new_tokens=200, stop=())])
    while w.host.meter()[0] < 20:
        await asyncio.sleep(0.005)
    await w.host.swap(published[1], load=False, abort_running=False, canary_ids=(1, 2))
    await w.until(lambda: len(w.outputs) == 1)
    assert isinstance(w.outputs[0], Finished)
    assert w.outputs[0].completion.version_numbers() == {0, 1}
    await w.host.swap(published[2], load=False, abort_running=True, canary_ids=(1, 2))
    assert w.outputs[1:] == [Aborted(("lease", 0))]
    w.host.admit([ask(2, max_new_tokens=5000, stop=())])
    w.host.abort([("lease", 2)])
    await w.until(lambda: len(w.outputs) == 3)
    assert w.outputs[2] == Aborted(("lease", 2))


async def test_a_failed_update_is_an_error_and_the_engine_goes_on(
    watch: Callable[..., Watched], published: list[Weights], ask: Ask
) -> None:
    """Not poisoned: the old weights still serve."""
    w = watch(faults={"apply": 1})
    await w.host.start()
    await w.host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2))
    with pytest.raises(EngineError, match="old weights are kept"):
        await w.host.swap(published[1], load=False, abort_running=False, canary_ids=(1, 2))
    w.host.admit([ask(0)])
    await w.until(lambda: len(w.outputs) == 1)
    assert not w.failures


async def test_a_broken_step_breaks_the_engine_for_good(watch: Callable[..., Watched], published: list[Weights], ask: Ask) -> None:
    """One report; every later order fails with the reason instead of waiting for ever."""
    w = watch(faults={"step": 2}, tokens_per_s=50.0)
    await w.host.start()
    await w.host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2))
    w.host.admit([ask(0, max_new_tokens=50, stop=())])
    await w.until(lambda: bool(w.failures))
    assert len(w.failures) == 1
    with pytest.raises(EngineError, match="scripted fault"):
        await w.host.run(lambda core: core.tokens)
    with pytest.raises(EngineError, match="scripted fault"):
        w.host.admit([ask(1)])


async def test_an_engine_that_cannot_be_made_says_why() -> None:
    """The first order already fails with the reason."""

    def broken() -> ScriptedEngine:
        raise EngineError("no GPU")

    failures: list[str] = []
    host = EngineHost(broken, on_output=lambda _: None, on_failure=failures.append)
    with pytest.raises(EngineError, match="no GPU"):
        await host.start()
    await host.close()


async def test_a_closed_engine_takes_no_orders(watch: Callable[..., Watched]) -> None:
    """Closing twice is no error."""
    w = watch()
    await w.host.start()
    await w.host.close()
    await w.host.close()
    with pytest.raises(EngineError, match="closed"):
        w.host.admit([])


@pytest.mark.parametrize("fault", ["token", "logprob", "stop_reason"])
def test_scripted_faults_hit_the_named_completion(published: list[Weights], ask: Ask, fault: str) -> None:
    """The second completion is wrong in exactly one way, the first is not."""
    engine = ScriptedEngine(ScriptedOptions(slots=1, faults={fault: 2}))
    engine.load(published[0])
    engine.admit([ask(0, stop=()), ask(1, stop=())])
    wrong = []
    while engine.is_busy:
        for out in engine.step():
            assert isinstance(out, Finished)
            done = out.completion
            signs = {
                "token": bool((done.token_ids >= 40).any()),
                "logprob": bool((done.logprobs > 0).any()),
                "stop_reason": done.stop_reason != "length",
            }
            wrong.append([name for name, is_wrong in signs.items() if is_wrong])
    assert wrong == [[], [fault]]


def test_a_scripted_prompt_may_not_fit(published: list[Weights], ask: Ask) -> None:
    """Unmakeable, and the engine goes on."""
    engine = ScriptedEngine(ScriptedOptions(faults={"unmakeable": 1}))
    engine.load(published[0])
    engine.admit([ask(0), ask(1, max_new_tokens=1)])
    outputs = engine.step()
    assert isinstance(outputs[0], Unmakeable)
    assert isinstance(outputs[1], Finished)


def test_pacing_sleeps_for_the_tokens_made(published: list[Weights], ask: Ask) -> None:
    """Two rows at 100 tokens a second: 0.02 s a step, by the injected sleep."""
    slept: list[float] = []
    engine = ScriptedEngine(ScriptedOptions(slots=2, tokens_per_s=100.0), sleep=slept.append)
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=3, stop=()) for slot in range(2)])
    while engine.is_busy:
        engine.step()
    assert slept == [0.02] * 3


def test_the_benchmark_leaves_the_engine_idle(published: list[Weights]) -> None:
    """Rate = tokens / seconds of the given clock; a limit ends it."""
    engine = make_engine(EngineSettings("scripted", slots=4))
    engine.load(published[0])
    ticks = iter(range(1000))
    assert decode_rate(engine, slots=4, new_tokens=8, limit_s=100.0, clock=lambda: float(next(ticks))) == pytest.approx(32 / 9)
    assert not engine.is_busy
    ticks = iter(range(1000))
    assert decode_rate(engine, slots=4, new_tokens=8, limit_s=3.0, clock=lambda: float(next(ticks))) == pytest.approx(8 / 4)
    assert not engine.is_busy


async def test_a_swap_is_told_before_what_the_new_weights_made(
    watch: Callable[..., Watched], published: list[Weights], ask: Ask
) -> None:
    """A completion of one token may be done before whoever waits for the swap is woken: its version must be known by then."""
    w = watch(slots=2)
    told: list[object] = []
    host = EngineHost(lambda: ScriptedEngine(ScriptedOptions(slots=2)), on_output=told.extend, on_failure=w.fail)
    await host.start()
    try:
        swap = asyncio.ensure_future(
            host.swap(published[0], load=True, abort_running=False, canary_ids=(1, 2, 3), on_swapped=told.append)
        )
        await asyncio.sleep(0)
        host.admit([ask(0, max_new_tokens=1)])
        time.sleep(0.2)  # noqa: ASYNC251 (the loop is busy while the engine does all of it)
        swapped = await swap
        async with asyncio.timeout(10.0):
            while len(told) < 2:
                await asyncio.sleep(0.01)
    finally:
        await host.close()
    assert told[0] == swapped
    assert len(swapped.canary_logprobs) == 2
    assert isinstance(told[1], Finished)


async def test_the_benchmark_runs_within_the_swap(watch: Callable[..., Watched], published: list[Weights], ask: Ask) -> None:
    """Nothing of the work that waits for the weights is stepped by it."""
    w = watch(slots=2)
    await w.host.start()
    swapping = asyncio.ensure_future(
        w.host.swap(published[0], load=True, abort_running=False, canary_ids=(), measure=lambda core: decode_rate(core, slots=2))
    )
    await asyncio.sleep(0)
    w.host.admit([ask(slot) for slot in range(3)])
    assert (await swapping).tokens_per_s > 0
    await w.until(lambda: len(w.outputs) == 3)
