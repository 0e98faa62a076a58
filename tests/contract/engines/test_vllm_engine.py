"""The vLLM engine against a plain fp32 forward, and through the deaths of its server (`--long`; needs a python with vLLM)."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.contract.engines.conftest import Pace, SharedServer
from worker_node.adapters.engine import Finished, Unmakeable, Weights
from worker_node.adapters.engine_vllm import VllmEngine
from worker_node.adapters.vllm.client import Gone, Refused
from worker_node.config import VllmSettings
from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.errors import EngineError

pytestmark = pytest.mark.long
Ask = Callable[..., GenerationRequest]
TOLERANCE = 1e-4
PACE = Pace(lockstep=False, tokens=900)


def reference(weights: Weights) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(weights.directory, dtype=torch.float32).eval()


@torch.no_grad()
def plain_logprobs(weights: Weights, ids: tuple[int, ...]) -> np.ndarray:
    """Of ids[1:], in one forward of transformers."""
    logits = reference(weights)(input_ids=torch.tensor([ids])).logits[0, :-1]
    return logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def run(engine: VllmEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.is_busy:
        done |= {out.key[1]: out.completion for out in engine.step() if isinstance(out, Finished)}
    return done


@pytest.fixture
def engine(vllm_settings: VllmSettings) -> Iterator[SharedServer]:
    """On the shared server."""
    made = SharedServer(vllm_settings, slots=4)
    yield made
    made.close()


@pytest.fixture
def own(vllm_settings: VllmSettings, tmp_path: Path) -> Iterator[VllmEngine]:
    """With a server of its own, which a test may kill."""
    made = VllmEngine(replace(vllm_settings, log=tmp_path / "vllm.log"), slots=4, dtype="float32")
    yield made
    made.close()


def server_pids(engine: VllmEngine) -> list[int]:
    """All processes of the engine's server, the guard first."""
    assert engine._running is not None
    guard = engine._running._server._guard.pid
    alive = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return [guard, *(pid for pid in alive if pid != guard and group_of(pid) == guard)]


def group_of(pid: int) -> int:
    """Its process group; -1 once it is dead."""
    try:
        state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:3]
    except OSError:
        return -1
    return -1 if state == "Z" else int(group)


def engine_core(engine: VllmEngine) -> int:
    """The process that makes the tokens."""
    for pid in server_pids(engine):
        if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes():
            return pid
    raise AssertionError("no engine core")


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_are_those_of_the_sampling_distribution(
    engine: SharedServer, published: list[Weights], ask: Ask, temperature: float
) -> None:
    """A plain forward, its logits divided by the temperature, gives the same log-probs to 1e-4."""
    engine.load(published[0])
    requests = [
        ask(s, prompt=tuple(range(1, 2 + s % 7)), max_new_tokens=2 + 3 * s, temperature=temperature, stop=(3,)) for s in range(12)
    ]
    engine.admit(requests)
    done = run(engine)
    assert sorted(done) == list(range(12))
    model = reference(published[0])
    for request in requests:
        tokens = done[request.key[1]].token_ids.tolist()
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*request.prompt_ids, *tokens]])).logits[0, len(request.prompt_ids) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        assert np.abs(expected - done[request.key[1]].logprobs).max() < TOLERANCE


def test_samples_follow_the_distribution(engine: SharedServer, published: list[Weights], ask: Ask) -> None:
    """First tokens of 800 seeds against the model's probabilities: chi-square of 39 degrees stays under its 0.9999 point (81)."""
    engine.load(published[0])
    engine.admit([ask(slot, seed=slot, max_new_tokens=1, stop=()) for slot in range(800)])
    counts = np.bincount([done.token_ids[0] for done in run(engine).values()], minlength=40)
    with torch.no_grad():
        shares = reference(published[0])(input_ids=torch.tensor([[5, 6, 7]])).logits[0, -1].softmax(-1).double().numpy()
    assert ((counts - 800 * shares) ** 2 / (800 * shares)).sum() < 81


def test_the_canary_is_that_of_the_published_bits(engine: SharedServer, published: list[Weights]) -> None:
    """Before and after each update in place: on a CPU this fails when the packed output head is not renewed."""
    ids = tuple(range(1, 25))
    engine.load(published[0])
    for weights in (published[0], published[1], published[2], published[1]):
        if weights is not published[0]:
            engine.apply(weights, abort_running=False)
        assert np.abs(np.array(engine.canary(ids)) - plain_logprobs(weights, ids)).max() < TOLERANCE


@torch.no_grad()
def test_logprobs_across_an_update_in_place(engine: SharedServer, published: list[Weights], ask: Ask) -> None:
    """Tokens before the boundary that the spans tell are the old weights', those after it the new weights' on the old cache."""
    engine.load(published[0])
    requests = [ask(slot, prompt=(4,) * (slot + 2), max_new_tokens=PACE.tokens, stop=()) for slot in range(3)]
    engine.admit(requests)
    PACE.advance(engine)
    engine.apply(published[1], abort_running=False)
    done = run(engine)
    old_model, new_model = reference(published[0]), reference(published[1])
    for request in requests:
        completion = done[request.key[1]]
        old = int((completion.versions == 0).sum())
        assert 0 < old < completion.length == PACE.tokens
        tokens = completion.token_ids.tolist()
        cache = transformers.DynamicCache()
        first = old_model(input_ids=torch.tensor([[*request.prompt_ids, *tokens[: old - 1]]]), cache=cache).logits[0]
        second = new_model(input_ids=torch.tensor([tokens[old - 1 : -1]]), cache=cache).logits[0]
        logits = torch.cat([first[len(request.prompt_ids) - 1 :], second])
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        assert np.abs(expected - completion.logprobs).max() < TOLERANCE


def test_a_prompt_after_an_update_is_not_answered_from_the_old_prefix_cache(
    engine: SharedServer, published: list[Weights], ask: Ask
) -> None:
    """A long prompt that a running completion keeps in the cache, asked again under new weights: its first log-prob is the new one."""
    prompt = tuple(4 + at % 30 for at in range(300))
    engine.load(published[0])
    engine.admit([ask(0, prompt=prompt, max_new_tokens=700, stop=())])
    PACE.advance(engine)
    engine.apply(published[1], abort_running=False)
    engine.admit([ask(1, prompt=prompt, max_new_tokens=1, stop=())])
    done = run(engine)
    expected = plain_logprobs(published[1], (*prompt, int(done[1].token_ids[0])))[-1]
    assert abs(expected - done[1].logprobs[0]) < TOLERANCE


def test_prompts_that_do_not_fit_are_their_own_outcome(engine: SharedServer, published: list[Weights], ask: Ask) -> None:
    """The engine stays well and says why."""
    engine.load(published[0])
    engine.admit(
        [ask(0, max_new_tokens=1022), ask(1, prompt=(40,)), ask(2, prompt=()), ask(3, temperature=0.001), ask(4, max_new_tokens=1)]
    )
    outputs = engine.step()
    while engine.is_busy:
        outputs += engine.step()
    refused = {out.key[1]: out.reason for out in outputs if isinstance(out, Unmakeable)}
    assert sorted(refused) == [0, 1, 2, 3]
    assert "1025 positions" in refused[0]
    assert "vocabulary of 40" in refused[1]
    assert "temperature 0.001" in refused[3]
    assert [out.key[1] for out in outputs if isinstance(out, Finished)] == [4]


def test_other_tensors_are_refused_before_anything_changes(engine: SharedServer, published: list[Weights], tmp_path: Path) -> None:
    """A version that lacks a weight would leave the old one in place, silently."""
    engine.load(published[0])
    before = engine.canary((1, 2, 3, 4))
    shutil.copytree(published[1].directory, tmp_path / "other")
    tensors = load_file(published[1].directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineError, match=r"lack \['model.norm.weight'\]") as caught:
        engine.apply(Weights(tmp_path / "other", 5, "5" * 64), abort_running=False)
    assert not caught.value.poisoned
    assert engine.canary((1, 2, 3, 4)) == before


def test_a_killed_engine_is_started_again_and_nothing_is_lost(own: VllmEngine, published: list[Weights], ask: Ask) -> None:
    """SIGKILL to the process that makes tokens, in mid-generation: the same tokens as without it, and the canary agrees."""
    own.load(published[0])
    own.apply(published[1], abort_running=False)
    canary = own.canary(tuple(range(1, 20)))
    requests = [ask(slot, max_new_tokens=PACE.tokens, stop=()) for slot in range(6)]
    own.admit(requests)
    expected = run(own)
    own.admit(requests)
    PACE.advance(own)
    os.kill(engine_core(own), signal.SIGKILL)
    done = run(own)
    assert sorted(done) == list(range(6))
    for slot, completion in done.items():
        assert set(completion.versions.tolist()) == {1}
        assert np.array_equal(completion.token_ids, expected[slot].token_ids)
    assert np.allclose(own.canary(tuple(range(1, 20))), canary, atol=TOLERANCE)


def test_an_update_that_fails_half_way_ends_in_a_clean_load(
    own: VllmEngine, published: list[Weights], ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights were begun to be replaced and the server did not finish: what serves afterwards is the new version, whole."""
    own.load(published[0])
    own.admit([ask(slot, max_new_tokens=PACE.tokens, stop=()) for slot in range(2)])
    PACE.advance(own)
    assert own._running is not None
    running, first = own._running, own._running._server._guard.pid

    def half(files: object, label: str, mode: str) -> None:
        running.client.call("POST", "/pause", query={"mode": "keep"}, timeout_s=60.0)
        running._call("/start_weight_update")
        raise Refused(500, "half way")

    monkeypatch.setattr(running, "replace", half)
    applied = own.apply(published[1], abort_running=False)
    assert applied.ended == []
    assert applied.stall_s > 1
    assert group_of(first) == -1
    ids = tuple(range(1, 20))
    assert np.abs(np.array(own.canary(ids)) - plain_logprobs(published[1], ids)).max() < TOLERANCE
    done = run(own)
    assert {slot: set(completion.versions.tolist()) for slot, completion in done.items()} == {0: {1}, 1: {1}}


def test_a_model_that_vllm_cannot_run_is_told_in_one_line(own: VllmEngine, published: list[Weights], tmp_path: Path) -> None:
    """The server's own words are in the error, and no process is left."""
    shutil.copytree(published[0].directory, tmp_path / "odd")
    text = (
        (tmp_path / "odd" / "config.json").read_text().replace('"qwen3"', '"nothing_known"').replace("Qwen3ForCausalLM", "Nothing")
    )
    (tmp_path / "odd" / "config.json").write_text(text)
    with pytest.raises(EngineError, match=r"vLLM does not start.*nothing_known") as caught:
        own.load(Weights(tmp_path / "odd", 0, "0" * 64))
    assert "\n" not in str(caught.value)
    assert own._running is None


def test_a_server_does_not_outlive_a_killed_worker(vllm_settings: VllmSettings, published: list[Weights], tmp_path: Path) -> None:
    """SIGKILL to the process that owns the engine: within seconds none of the server's processes lives."""
    source = (
        "import sys, time, pathlib\n"
        "from worker_node.adapters.engine import Weights\n"
        "from worker_node.adapters.engine_vllm import VllmEngine\n"
        "from worker_node.config import VllmSettings\n"
        "engine = VllmEngine(VllmSettings(python=pathlib.Path(sys.argv[1]), kv_cache_gib=0.25, gpu_memory=0.5, eager=True), "
        "slots=2, dtype='float32')\n"
        "engine.load(Weights(pathlib.Path(sys.argv[2]), 0, '0' * 64))\n"
        "print(engine._running._server._guard.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", source, str(vllm_settings.python), str(published[0].directory)]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert owner.stdout is not None
    guard = next(int(line) for line in owner.stdout if line.strip().isdecimal())
    members = [
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal() and group_of(int(entry.name)) == guard
    ]
    assert len(members) >= 3  # guard, server, engine
    owner.kill()
    owner.wait()
    owner.stdout.close()
    end = time.monotonic() + 30.0
    while any(group_of(pid) == guard for pid in members):
        assert time.monotonic() < end
        time.sleep(0.1)


def test_no_answer_is_gone_and_an_error_is_refused(engine: SharedServer, published: list[Weights]) -> None:
    """The client's two ways to fail, against the real server."""
    engine.load(published[0])
    assert engine._running is not None
    with pytest.raises(Refused) as caught:
        engine._running.client.call("POST", "/pause", query={"mode": "for ever"})
    assert caught.value.status in (400, 422)
    with pytest.raises(Gone):
        engine._running.client.call("GET", "/health", timeout_s=1e-6)
