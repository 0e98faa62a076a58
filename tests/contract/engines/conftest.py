"""Tiny random models on disk, and the two engines that must behave alike on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from blake3 import blake3

from coordinator.wire.messages import SamplingParameters
from worker_node.adapters.engine import EngineCore, Weights
from worker_node.adapters.engine_scripted import ScriptedEngine, ScriptedOptions
from worker_node.adapters.engine_torch import TorchEngine, TorchOptions
from worker_node.domain.generation import GenerationRequest

VOCAB = 40


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
        head_dim=8,
        max_position_embeddings=128,
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


@pytest.fixture(params=["torch", "scripted"])
def make_engine(request: pytest.FixtureRequest) -> Callable[[int], EngineCore]:
    """An engine with the given number of rows."""
    if request.param == "torch":
        return lambda slots: TorchEngine(TorchOptions(slots=slots, device="cpu"))
    return lambda slots: ScriptedEngine(ScriptedOptions(slots=slots))


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
