"""The vLLM engine when its server is killed, stopped, slow or wrong, at every point: nothing is lost, mixed or left behind.

All of our processes are real; the server is `fake_vllm.py`. The same deaths on vLLM itself: test_vllm_engine.py, with `--long`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.contract.engines.conftest import Pace, fake_python
from worker_node.adapters import engine_vllm
from worker_node.adapters.engine import Aborted, Finished, Output, Unmakeable, Weights
from worker_node.adapters.engine_vllm import VllmEngine
from worker_node.adapters.vllm import guard
from worker_node.config import VllmSettings
from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.errors import EngineError

Ask = Callable[..., GenerationRequest]
TOKENS = 300
PACE = Pace(lockstep=False, tokens=TOKENS)


class Clock:
    """Real time, and leaps on demand."""

    leap_s = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.leap_s


class Bench:
    """An engine with a server of its own, and what shall go wrong with that."""

    def __init__(self, folder: Path, slots: int = 4) -> None:
        self.folder = folder
        self.clock = Clock()
        settings = VllmSettings(python=fake_python(folder), kv_cache_gib=0.25, log=folder / "vllm.log")
        self.engine = VllmEngine(settings, slots=slots, dtype="float32", clock=self.clock)

    def fault(self, **faults: object) -> None:
        (self.folder / "faults.json").write_text(json.dumps(faults))

    @property
    def server(self) -> int:
        """The guard of the server that runs now; its group is the server's."""
        assert self.engine._running is not None
        return self.engine._running._server._guard.pid

    def pid(self, words: str) -> int:
        others = guard.members(self.server, but=self.server)
        (found,) = [pid for pid in others if words.encode() in Path(f"/proc/{pid}/cmdline").read_bytes()]
        return found

    def run(self) -> list[Output]:
        outputs: list[Output] = []
        while self.engine.is_busy:
            outputs += self.engine.step()
        return outputs


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """Its end leaves no process, no shared memory and no folder."""
    made = Bench(tmp_path / "b")
    yield made
    made.engine.close()
    assert traces(made.folder) == []


def traces(folder: Path) -> list[Path]:
    """What is left of all that servers made outside of their own folder."""
    return [path for path in map(Path, (folder / "traces").read_text().split()) if path.exists()]


def done(outputs: list[Output]) -> dict[int, Completion]:
    return {out.key[1]: out.completion for out in outputs if isinstance(out, Finished)}


def versions(outputs: list[Output]) -> dict[int, set[int]]:
    return {slot: set(completion.versions.tolist()) for slot, completion in done(outputs).items()}


@pytest.mark.parametrize("victim", ["/bin/sleep", "api_server", "guard.py"])
def test_any_process_may_be_killed(bench: Bench, published: list[Weights], ask: Ask, victim: str) -> None:
    """Engine, server or guard, in mid-generation: the same tokens as without it, the rest of the old tree is gone."""
    engine = bench.engine
    engine.load(published[0])
    requests = [ask(slot, max_new_tokens=TOKENS, stop=()) for slot in range(6)]
    engine.admit(requests)
    expected = done(bench.run())
    engine.admit(requests)
    PACE.advance(engine)
    first = bench.server
    target = first if victim == "guard.py" else bench.pid(victim)
    os.kill(target, signal.SIGKILL)
    found = done(bench.run())
    assert sorted(found) == list(range(6))
    for slot, completion in found.items():
        assert np.array_equal(completion.token_ids, expected[slot].token_ids)
        assert np.array_equal(completion.logprobs, expected[slot].logprobs)
    assert bench.server != first
    assert not guard.members(first)


@pytest.mark.parametrize(
    ("how", "path"),
    [
        pytest.param("exit", "/pause", marks=pytest.mark.long),
        ("exit", "/start_weight_update"),
        pytest.param("exit", "/update_weights", marks=pytest.mark.long),
        pytest.param("exit", "/finish_weight_update", marks=pytest.mark.long),
        ("exit", "/resume"),
        ("fail", "/update_weights"),
    ],
)
def test_an_update_may_die_at_any_point(bench: Bench, published: list[Weights], ask: Ask, how: str, path: str) -> None:
    """What serves afterwards is the new version, whole, and what ran is made again by it."""
    engine = bench.engine
    engine.load(published[1])
    expected = engine.canary((1, 2, 3, 4))
    engine.apply(published[0], abort_running=False)
    engine.admit([ask(slot, max_new_tokens=TOKENS, stop=()) for slot in range(6)])
    PACE.advance(engine)
    bench.fault(**{how: path})
    assert engine.apply(published[1], abort_running=False).ended == []
    bench.fault()
    assert engine.canary((1, 2, 3, 4)) == expected
    assert versions(bench.run()) == {slot: {1} for slot in range(6)}


def test_an_engine_that_dies_in_an_update_is_not_waited_for(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """Its server goes on and never answers: the call has minutes, the health says it in seconds."""
    engine = bench.engine
    engine.load(published[0])
    engine.admit([ask(0, max_new_tokens=TOKENS, stop=())])
    PACE.advance(engine)
    bench.fault(hang="/update_weights")
    assert engine.apply(published[1], abort_running=False).stall_s < 60
    bench.fault()
    assert versions(bench.run()) == {0: {1}}


def test_a_version_that_cannot_be_loaded_leaves_the_old_one_and_its_work(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """Neither in place nor by a new server, and running completions were to be aborted: they are made with the old weights, not lost."""
    engine = bench.engine
    engine.load(published[0])
    before = engine.canary((1, 2, 3, 4))
    engine.admit([ask(slot, max_new_tokens=TOKENS, stop=()) for slot in range(6)])
    PACE.advance(engine)
    bench.fault(fail="/update_weights", no_start=[published[1].directory.name, "nothing of the kind"])
    with pytest.raises(EngineError, match=r"nothing of the kind.*; the old weights were loaded again") as caught:
        engine.apply(published[1], abort_running=True)
    assert not caught.value.poisoned
    assert engine.canary((1, 2, 3, 4)) == before
    assert versions(bench.run()) == {slot: {0} for slot in range(6)}


def test_no_version_can_be_loaded_any_more(bench: Bench, published: list[Weights], ask: Ask, tmp_path: Path) -> None:
    """The engine says so once, poisoned, and nothing of it is left."""
    engine = bench.engine
    old = Weights(shutil.copytree(published[0].directory, tmp_path / "old"), 0, published[0].digest)
    engine.load(old)
    engine.admit([ask(0, max_new_tokens=TOKENS, stop=())])
    PACE.advance(engine)
    shutil.rmtree(old.directory)
    bench.fault(fail="/update_weights", no_start=[published[1].directory.name, "never"])
    with pytest.raises(EngineError, match=r"never.*; and with the old weights: .*config\.json") as caught:
        engine.apply(published[1], abort_running=False)
    assert caught.value.poisoned
    assert engine._running is None


def test_a_dead_server_is_not_started_with_weights_that_make_way(
    bench: Bench, published: list[Weights], ask: Ask, tmp_path: Path
) -> None:
    """Weights whose canary was refused are removed from the disk; a server that died with them still takes the next version."""
    engine = bench.engine
    refused = Weights(shutil.copytree(published[0].directory, tmp_path / "refused"), 0, published[0].digest)
    engine.load(refused)
    shutil.rmtree(refused.directory)
    first = bench.server
    os.kill(bench.pid("api_server"), signal.SIGKILL)
    while guard.members(first):
        time.sleep(0.01)
    engine.apply(published[1], abort_running=True)
    engine.admit([ask(0)])
    assert versions(bench.run()) == {0: {1}}


@pytest.mark.parametrize("abort", [False, True])
def test_an_update_with_a_long_queue(tmp_path: Path, published: list[Weights], ask: Ask, abort: bool) -> None:
    """16 run and 40 wait: each is told of once; what ran carries both versions or is aborted, what waited the new one."""
    bench = Bench(tmp_path / "b", slots=16)
    engine = bench.engine
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=150, stop=()) for slot in range(56)])
    PACE.advance(engine)
    applied = engine.apply(published[1], abort_running=abort)
    outputs = bench.run()
    engine.close()
    aborted = {out.key[1] for out in applied.ended if isinstance(out, Aborted)}
    assert aborted == (set(range(16)) if abort else set())
    assert sorted([*aborted, *done(outputs)]) == list(range(56))
    for slot, completion in done(outputs).items():
        assert completion.versions.tolist() == sorted(completion.versions.tolist())
        assert set(completion.versions.tolist()) == ({0, 1} if slot < 16 else {1})


def test_completions_go_on_while_an_update_is_read(
    bench: Bench, published: list[Weights], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow disk: what ends meanwhile is handed out with the update, what waits takes its place."""
    engine = bench.engine
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=20, stop=()) for slot in range(12)])

    def slow(files: list[Path]) -> None:
        while len(engine._ended) < 8:
            time.sleep(0.01)

    monkeypatch.setattr(engine_vllm, "warm", slow)
    applied = engine.apply(published[1], abort_running=False)
    assert len(done(applied.ended)) >= 8
    assert all(made_by == {0} for made_by in versions(applied.ended).values())
    assert engine.tokens == 20 * len(done(applied.ended))
    rest = bench.run()
    assert sorted([*done(applied.ended), *done(rest)]) == list(range(12))


def test_files_that_cannot_be_read_change_nothing(bench: Bench, published: list[Weights], monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bench.engine
    engine.load(published[0])
    before = engine.canary((1, 2, 3))

    def broken(files: list[Path]) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(engine_vllm, "warm", broken)
    with pytest.raises(EngineError, match=r"cannot be read: .*Input/output error"):
        engine.apply(published[1], abort_running=False)
    assert engine.canary((1, 2, 3)) == before


def test_one_deadly_request_does_not_end_the_engine(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """It ends the server each time; twice with its mates, then alone, and it is told as one that cannot be made."""
    engine = bench.engine
    engine.load(published[0])
    bench.fault(deadly=39)
    engine.admit([ask(slot, prompt=(4, 39) if slot == 2 else (4, 5), max_new_tokens=TOKENS, stop=()) for slot in range(6)])
    outputs = bench.run()
    (bad,) = [out for out in outputs if isinstance(out, Unmakeable)]
    assert bad.key == ("lease", 2)
    assert "died 3 times with it" in bad.reason
    assert sorted(done(outputs)) == [0, 1, 3, 4, 5]
    assert engine._suspects == engine._failures == {}


def test_a_server_that_dies_again_and_again_ends_the_engine(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """Also where it dies at its start; the last words are in the reason."""
    engine = bench.engine
    engine.load(published[0])
    bench.fault(no_start=[published[0].directory.name, "out of memory"])
    engine.admit([ask(0, max_new_tokens=TOKENS, stop=())])
    PACE.advance(engine)
    os.kill(bench.pid("api_server"), signal.SIGKILL)
    with pytest.raises(EngineError, match=r"died 4 times within 30 minutes; at last: .*out of memory") as caught:
        bench.run()
    assert caught.value.poisoned


def test_a_start_that_fails_once_is_tried_again(bench: Bench, published: list[Weights], ask: Ask) -> None:
    engine = bench.engine
    engine.load(published[0])
    bench.fault(exit="/collective_rpc", slow={"/health": 1.0})  # it lives long enough to be seen by the guard
    engine.admit([ask(0, max_new_tokens=TOKENS, stop=())])
    PACE.advance(engine)
    starts = engine._start

    def second(*given: object) -> object:
        try:
            return starts(*given)  # type: ignore[arg-type]
        finally:
            bench.fault()

    engine._start = second  # type: ignore[method-assign, assignment]
    os.kill(bench.pid("api_server"), signal.SIGKILL)
    assert versions(bench.run()) == {0: {0}}
    assert len(engine._deaths) == 2


def test_a_server_that_stands_still_is_started_again(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """It lives, answers, and makes nothing for three minutes."""
    engine = bench.engine
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=TOKENS, stop=()) for slot in range(3)])
    PACE.advance(engine)
    first = bench.server
    assert engine._running is not None
    engine._running.client.call("POST", "/pause", query={"mode": "keep"})
    for leap_s in (20.0, 100.0):
        bench.clock.leap_s += leap_s
        assert engine.step() == []
        assert bench.server == first
    bench.clock.leap_s += 100.0
    assert versions(bench.run()) == {0: {0}, 1: {0}, 2: {0}}
    assert bench.server != first


def test_a_server_that_answers_slowly_is_left_alone(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """One question without an answer is no death: a loaded machine would lose minutes each time."""
    engine = bench.engine
    engine.load(published[0])
    engine.admit([ask(slot, max_new_tokens=TOKENS, stop=()) for slot in range(3)])
    PACE.advance(engine)
    first = bench.server
    bench.fault(fail="/metrics")
    bench.clock.leap_s += 20.0
    assert sorted(done([*engine.step(), *bench.run()])) == [0, 1, 2]
    assert bench.server == first


def test_the_same_version_once_more_is_a_new_server(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """Its canary was not believed. Another digest with the same number is an update, and its tokens carry the number."""
    engine = bench.engine
    engine.load(published[0])
    first = bench.server
    engine.apply(published[0], abort_running=True)
    second = bench.server
    assert second != first
    other = Weights(published[1].directory, 0, published[1].digest)
    engine.apply(other, abort_running=True)
    assert bench.server == second
    engine.admit([ask(0)])
    assert versions(bench.run()) == {0: {0}}


def test_prompts_at_the_edges(bench: Bench, published: list[Weights], ask: Ask) -> None:
    """The whole context may be used, not a position more."""
    engine = bench.engine
    engine.load(published[0])
    assert engine._running is not None
    context = engine._running.context
    engine.admit(
        [
            ask(0, prompt=(5,) * (context - 1), max_new_tokens=1),
            ask(1, prompt=(5,) * context, max_new_tokens=1),
            ask(2, prompt=(), max_new_tokens=1),
            ask(3, prompt=(-1,), max_new_tokens=1),
            ask(4, prompt=(40,), max_new_tokens=1),
        ]
    )
    outputs = bench.run()
    assert sorted(done(outputs)) == [0]
    assert sorted(out.key[1] for out in outputs if isinstance(out, Unmakeable)) == [1, 2, 3, 4]


def test_a_log_that_cannot_be_opened_is_an_error_in_words(tmp_path: Path, published: list[Weights]) -> None:
    settings = VllmSettings(python=fake_python(tmp_path / "b"), kv_cache_gib=0.25, log=tmp_path / "absent" / "vllm.log")
    with pytest.raises(EngineError, match=r"vLLM cannot be started: .*absent"):
        VllmEngine(settings, slots=2, dtype="float32").load(published[0])


def test_a_long_temporary_directory_is_too_long_for_sockets(
    bench: Bench, published: list[Weights], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket's path has 107 bytes: the folder is made elsewhere then."""
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    bench.engine.load(published[0])
    assert list(long.iterdir()) == []


OWNER = """
import pathlib, sys, time
from worker_node.adapters.engine import Weights
from worker_node.adapters.engine_vllm import VllmEngine
from worker_node.config import VllmSettings
engine = VllmEngine(VllmSettings(python=pathlib.Path(sys.argv[1]), kv_cache_gib=0.25), slots=2, dtype="float32")
engine.load(Weights(pathlib.Path(sys.argv[2]), 0, "0" * 64))
print("server", engine._running._server._guard.pid, engine._running._server.folder, flush=True)
time.sleep(600)
"""


def owned(tmp_path: Path, published: list[Weights]) -> tuple[subprocess.Popen[str], int, Path]:
    """A process with an engine, its guard, and the server's folder."""
    python = fake_python(tmp_path / "b")
    (tmp_path / "b" / "faults.json").write_text('{"orphan": true}')
    command = [sys.executable, "-c", OWNER, str(python), str(published[0].directory)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert owner.stdout is not None
    _, number, folder = next(line for line in owner.stdout if line.startswith("server")).split()
    return owner, int(number), Path(folder)


def shared_memory(group: int) -> set[str]:
    return guard.segments(guard.members(group))


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_killed_worker_leaves_nothing(tmp_path: Path, published: list[Weights]) -> None:
    """The guard sees it, and ends processes, shared memory and folder."""
    owner, group, folder = owned(tmp_path, published)
    names = shared_memory(group)
    assert len(names) == 1
    owner.kill()
    owner.communicate()
    until(lambda: not guard.members(group) and not folder.exists())
    assert not any((Path("/dev/shm") / name).exists() for name in names)


def test_what_a_killed_worker_and_guard_left_is_removed_by_the_next_start(
    bench: Bench, tmp_path: Path, published: list[Weights], ask: Ask
) -> None:
    """And a server whose worker lives is left alone."""
    owner, group, folder = owned(tmp_path / "killed", published)
    other, other_group, other_folder = owned(tmp_path / "living", published)
    names = shared_memory(group)
    owner.kill()
    os.kill(group, signal.SIGKILL)
    owner.communicate()
    until(lambda: len(guard.members(group)) == 1)  # its engine, with which nobody talks any more
    assert folder.exists()
    assert all((Path("/dev/shm") / name).exists() for name in names)
    bench.engine.load(published[0])
    assert not guard.members(group)
    assert not folder.exists()
    assert not any((Path("/dev/shm") / name).exists() for name in names)
    assert other_folder.exists()
    assert len(guard.members(other_group)) == 3  # guard, server, engine
    other.kill()
    other.communicate()
    until(lambda: not guard.members(other_group) and not other_folder.exists())
