"""The torch engine against a plain forward of the same weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.contract.engines.conftest import DEVICE
from worker_node.adapters.engine import Finished, Unmakeable, Weights
from worker_node.adapters.engine_torch import MODEL_TYPES, TorchEngine, TorchOptions, copy_weights, sample
from worker_node.domain.generation import Completion, GenerationRequest
from worker_node.errors import EngineError

Ask = Callable[..., GenerationRequest]


def reference(weights: Weights) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(weights.directory, dtype=torch.float32).eval()


def run(engine: TorchEngine) -> dict[int, Completion]:
    done: dict[int, Completion] = {}
    while engine.is_busy:
        done |= {out.key[1]: out.completion for out in engine.step() if isinstance(out, Finished)}
    return done


@torch.no_grad()
def teacher_forced(model: transformers.PreTrainedModel, request: GenerationRequest, tokens: np.ndarray) -> np.ndarray:
    """Log-probs of `tokens` after the prompt, in one uncached forward."""
    ids = torch.tensor([[*request.prompt_ids, *tokens.tolist()]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1]
    logprobs = (logits / request.sampling.temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(tokens.tolist())[:, None])[:, 0].numpy()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_agree_with_a_teacher_forced_forward(published: list[Weights], ask: Ask, temperature: float) -> None:
    """Batched, padded, cached and merged decoding gives what one plain forward gives, to 1e-4."""
    engine = TorchEngine(TorchOptions(slots=4, device=DEVICE))
    engine.load(published[0])
    requests = [
        ask(s, prompt=tuple(range(1, 2 + s % 7)), max_new_tokens=2 + 3 * s, temperature=temperature, stop=(3,)) for s in range(12)
    ]
    engine.admit(requests)
    done = run(engine)
    model = reference(published[0])
    assert sorted(done) == list(range(12))
    for request in requests:
        completion = done[request.key[1]]
        assert np.abs(teacher_forced(model, request, completion.token_ids) - completion.logprobs).max() < 1e-4


@torch.no_grad()
def test_logprobs_across_an_update_in_place(published: list[Weights], ask: Ask) -> None:
    """Tokens after the update are the new weights' on the old weights' cache; the boundary is where `versions` says."""
    engine = TorchEngine(TorchOptions(slots=3, device=DEVICE))
    engine.load(published[0])
    requests = [ask(slot, prompt=(4,) * (slot + 2), max_new_tokens=10, stop=()) for slot in range(3)]
    engine.admit(requests)
    for _ in range(4):
        engine.step()
    engine.apply(published[1], abort_running=False)
    done = run(engine)
    for request in requests:
        completion = done[request.key[1]]
        old = int((completion.versions == 0).sum())
        assert old == 4
        tokens = completion.token_ids.tolist()
        fed_to_old = [*request.prompt_ids, *tokens[: old - 1]]
        cache = transformers.DynamicCache()
        first = reference(published[0])(input_ids=torch.tensor([fed_to_old]), cache=cache).logits[0]
        second = reference(published[1])(input_ids=torch.tensor([tokens[old - 1 : -1]]), cache=cache).logits[0]
        logits = torch.cat([first[len(request.prompt_ids) - 1 :], second])
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].numpy()
        assert np.abs(expected - completion.logprobs).max() < 1e-4


@torch.no_grad()
def test_the_canary_is_that_of_the_published_bits(published: list[Weights]) -> None:
    """Within 1e-4 of a plain fp32 forward, before and after an update."""
    ids = tuple(range(1, 25))
    engine = TorchEngine(TorchOptions(device=DEVICE))
    engine.load(published[0])
    for weights in (published[0], published[1]):
        engine.apply(weights, abort_running=False)
        logits = reference(weights)(input_ids=torch.tensor([ids])).logits[0, :-1]
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
        assert np.abs(np.subtract(engine.canary(ids), expected.numpy())).max() < 1e-4


def test_sampling_follows_the_distribution() -> None:
    """Inverse CDF: the share of each token is its probability (20,000 even uniforms: error below one step)."""
    logits = torch.tensor([[0.0, 1.0, -torch.inf, 2.0]]).expand(20_000, 4)
    uniforms = (torch.arange(20_000, dtype=torch.float64) + 0.5) / 20_000
    tokens, logprobs = sample(logits, torch.full((20_000,), 2.0), uniforms)
    expected = (logits[0] / 2.0).softmax(-1)
    shares = torch.bincount(tokens, minlength=4) / 20_000
    assert torch.allclose(shares, expected, atol=1e-4)
    assert torch.allclose(logprobs.exp(), expected[tokens], atol=1e-6)


def test_the_largest_uniform_never_leaves_the_vocabulary() -> None:
    """Rounding cannot pick a token of probability zero."""
    logits = torch.tensor([[0.0, 0.0, -torch.inf]])
    tokens, logprobs = sample(logits, torch.ones(1), torch.tensor([np.nextafter(1.0, 0.0)], dtype=torch.float64))
    assert tokens.tolist() == [1]
    assert torch.isfinite(logprobs).all()


@pytest.mark.parametrize("architecture", sorted(MODEL_TYPES))
def test_each_allowed_architecture_decodes_right(tmp_path: Path, ask: Ask, architecture: str, save: Callable[..., Weights]) -> None:
    """Left padding, merging and cutting are sound for every model that may be loaded."""
    weights = save(tmp_path / architecture, seed=5, architecture=architecture)
    engine = TorchEngine(TorchOptions(slots=2, device=DEVICE))
    engine.load(weights)
    requests = [ask(s, prompt=(7,) * (3 * s + 1), max_new_tokens=4 + s, stop=()) for s in range(4)]
    engine.admit(requests)
    done = run(engine)
    model = reference(weights)
    for request in requests:
        completion = done[request.key[1]]
        assert np.abs(teacher_forced(model, request, completion.token_ids) - completion.logprobs).max() < 1e-4


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    """The allow-list is checked before anything is built."""
    engine = TorchEngine(TorchOptions(device=DEVICE))
    for config, words in (
        ('{"model_type": "evil"}', "evil"),
        ('{"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "evil.Model"}}', "auto_map"),
        ("[]", "config.json"),
    ):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(EngineError, match=words):
            engine.load(Weights(tmp_path, 0, "0" * 64))


def test_tied_weights_stay_tied(published: list[Weights], ask: Ask) -> None:
    """An update of the embedding is an update of the head."""
    model = reference(published[0])
    copy_weights(model, published[1].directory)
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    expected = load_file(published[1].directory / "model.safetensors")["model.embed_tokens.weight"].float()
    assert torch.equal(model.lm_head.weight, expected)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("model.norm.weight"), "lack"),
        (lambda t: t.update(extra=torch.zeros(2)), "extra"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(33)}), "shape"),
    ],
)
def test_a_wrong_set_of_tensors_changes_nothing(
    published: list[Weights], tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    """Names and shapes are checked before the first parameter is touched."""
    tensors = load_file(published[1].directory / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = reference(published[0])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(EngineError, match=words) as caught:
        copy_weights(model, tmp_path)
    assert not caught.value.poisoned
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_prompts_that_do_not_fit_are_their_own_outcome(published: list[Weights], ask: Ask) -> None:
    """The engine stays well and says why."""
    engine = TorchEngine(TorchOptions(device=DEVICE))
    engine.load(published[0])
    engine.admit([ask(0, max_new_tokens=1022), ask(1, prompt=(40,)), ask(2, prompt=()), ask(3, max_new_tokens=1)])
    outputs = engine.step()
    refused = {out.key[1]: out.reason for out in outputs if isinstance(out, Unmakeable)}
    assert sorted(refused) == [0, 1, 2]
    assert "1025 positions" in refused[0]
    assert "vocabulary of 40" in refused[1]
    assert [out.key[1] for out in outputs if isinstance(out, Finished)] == [3]


def test_the_engine_says_what_it_is() -> None:
    """Kind, dtype and device are reported at join."""
    info = TorchEngine(TorchOptions(device=DEVICE)).info
    assert (info.kind, info.dtype) == ("torch", "float32")
    assert info.device == (torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu")
    assert "torch" in info.version


def test_logits_that_are_not_finite_are_the_slots_own_outcome(published: list[Weights], ask: Ask) -> None:
    """No NaN log-prob and no token outside the vocabulary leaves the engine; it stays well, and says why."""
    engine = TorchEngine(TorchOptions(slots=4, device=DEVICE))
    engine.load(published[0])
    engine.admit([ask(0, max_new_tokens=8, stop=()), ask(1, max_new_tokens=8, stop=())])
    assert engine.step() == []
    with torch.no_grad():
        engine._model.model.norm.weight.fill_(torch.nan)
    assert not np.isfinite(engine.canary((1, 2, 3))).any()
    engine.admit([ask(2, max_new_tokens=1)])
    outputs = engine.step()
    assert sorted(out.key[1] for out in outputs if isinstance(out, Unmakeable)) == [0, 1, 2]
    assert all("not finite" in out.reason for out in outputs if isinstance(out, Unmakeable))
    assert not engine.is_busy
    engine.apply(published[1], abort_running=False)
    engine.admit([ask(3, max_new_tokens=2, stop=())])
    assert run(engine)[3].length == 2


@pytest.mark.parametrize("worst", [torch.nan, torch.inf, -torch.inf])
def test_a_distribution_that_is_none_gives_no_log_prob(worst: float) -> None:
    """NaN tells, and the token is one of the vocabulary, so that no index leaves the tensor (a card would not survive it)."""
    tokens, logprobs = sample(torch.full((1, 3), worst), torch.ones(1), torch.tensor([0.5], dtype=torch.float64))
    assert 0 <= int(tokens) < 3
    assert torch.isnan(logprobs).all()


def test_weights_that_would_be_drawn_at_random_are_refused(published: list[Weights], tmp_path: Path) -> None:
    """A directory that lacks a tensor is not loaded."""
    tensors = load_file(published[0].directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((published[0].directory / "config.json").read_text())
    with pytest.raises(EngineError, match="drawn at random"):
        TorchEngine(TorchOptions(device=DEVICE)).load(Weights(tmp_path, 0, "0" * 64))


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_attention_code_from_elsewhere_is_refused(published: list[Weights], tmp_path: Path, key: str) -> None:
    """A repository named there would be downloaded and run."""
    config = json.loads((published[0].directory / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: "somebody/kernel"}))
    with pytest.raises(EngineError, match="not downloaded"):
        TorchEngine(TorchOptions(device=DEVICE)).load(Weights(tmp_path, 0, "0" * 64))
