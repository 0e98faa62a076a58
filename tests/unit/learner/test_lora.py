"""Adapters: only they learn, what is published is the merged weights, and all agrees with peft's own way."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coordinator.learner import checkpoint, collate, export, merging, model, step
from coordinator.learner.errors import CheckpointInvalid, ModelRefused
from p2p.adapters.adapter_dir import open_adapter
from tests.factories_lowrank import defined

LORA = {"rank": 3, "alpha": 12, "targets": ("q_proj", "down_proj")}
IDS = torch.tensor([[3, 9, 27, 5, 11, 2]])

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft asks for it


@pytest.fixture
def learner(made: ModuleType, tiny: Path) -> step.Learner:
    """After three steps, so that the adapters are not what they were drawn as."""
    torch.manual_seed(0)
    one = step.start(model.load(tiny), made.config(lora=LORA, learning_rate=0.01, truncated="keep"))
    for number in range(3):
        assert step.take_step(one, made.batch(step=number, seed=number))["optim/applied"] == 1.0
    return one


def peft_twin(learner: step.Learner, tiny: Path) -> torch.nn.Module:
    """The base from disk under peft's own model class, with the learner's adapters."""
    settings = peft.LoraConfig(r=3, lora_alpha=12, target_modules=["q_proj", "down_proj"], lora_dropout=0.0)
    twin = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), settings).eval()
    own = dict(twin.named_parameters())
    with torch.no_grad():
        for name, parameter in learner.policy.trained().items():
            own[f"base_model.model.{name}"].copy_(parameter)
    return twin


def test_only_adapters_learn(learner: step.Learner, tiny: Path) -> None:
    trained = learner.policy.trained()
    assert len(trained) == 2 * 2 * 2  # layers, targets, factors
    assert all(".lora_" in name for name in trained)
    assert learner.policy.parameters() == sum(each.numel() for each in trained.values())
    stored = load_file(tiny / "model.safetensors")
    held = {name.replace(".base_layer", ""): each for name, each in learner.policy.model.named_parameters() if name not in trained}
    assert held.keys() == stored.keys()
    assert all(torch.equal(held[name], stored[name]) for name in stored)
    assert len(learner.optimizer.state) == len(trained)


def test_the_gradient_is_pefts_own(learner: step.Learner, made: ModuleType, tiny: Path) -> None:
    """The learner's loss through peft's model class, by autograd alone."""
    twin, batch = peft_twin(learner, tiny), made.batch(seed=9)
    signal = collate.signal_of(batch, learner.config)
    micro = collate.pack(batch, signal, list(range(8)))
    logprobs, _ = step.token_logprobs(learner.policy, micro, 1.0)
    (logprobs * micro.weights).sum().backward()
    padded = collate.collate(batch, signal, list(range(8)))
    logits = twin(input_ids=padded.input_ids, attention_mask=padded.attention_mask, position_ids=padded.position_ids).logits
    every = torch.log_softmax(logits[:, -padded.targets.shape[1] - 1 : -1], dim=-1)
    (every.gather(2, padded.targets[:, :, None])[:, :, 0] * padded.weights).sum().backward()
    its = {name: each.grad for name, each in twin.named_parameters() if each.requires_grad}
    for name, parameter in learner.policy.trained().items():
        expected = its[f"base_model.model.{name}"]
        assert float((parameter.grad - expected).norm()) <= 1e-5 * float(expected.norm())


def test_what_is_published_is_merged(learner: step.Learner, tiny: Path, tmp_path: Path) -> None:
    """The names and shapes of the plain model; in fp32 the merged forward pass is the adapters'; the canary is of the bits on disk."""
    export.write(learner.policy, tmp_path / "v3")
    merged = peft_twin(learner, tiny).merge_and_unload()
    published = load_file(tmp_path / "v3" / "model.safetensors")
    assert {name: each.shape for name, each in published.items()} == {
        name: each.shape for name, each in load_file(tiny / "model.safetensors").items()
    }
    with torch.no_grad():
        assert torch.allclose(learner.policy.model(IDS).logits, merged(IDS).logits, atol=1e-5)
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v3", dtype=torch.float32)
        every = torch.log_softmax(loaded(IDS).logits[0, :-1], dim=-1)
    expected = every.gather(1, IDS[0, 1:, None])[:, 0].tolist()
    assert export.canary(learner.policy, IDS[0].tolist()) == pytest.approx(expected, abs=1e-6)


def test_published_bits_are_those_of_the_low_rank_edge(learner: step.Learner, tiny: Path, tmp_path: Path) -> None:
    """By the definition, without the loop: the first version's bits and the bf16 factors, products added in order."""
    export.write(model.load(tiny), tmp_path / "v0")
    export.write(learner.policy, tmp_path / "v3")
    first, third = (load_file(tmp_path / name / "model.safetensors") for name in ("v0", "v3"))
    edge = open_adapter(tmp_path / "v3")
    assert edge.scale == 4.0
    assert edge.factors.keys() == {name for name in first if "q_proj" in name or "down_proj" in name}
    assert all(not torch.equal(first[name], third[name]) for name in edge.factors)
    for name, tensor in first.items():
        words = tensor.view(torch.int16).numpy().view("<u2")
        expected = defined(words, edge.factors[name], edge.scale) if name in edge.factors else words
        assert np.array_equal(third[name].view(torch.int16).numpy().view("<u2"), expected)


def test_before_the_first_step_the_base_is_published(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Up is zero: version 0 is the base's bf16, bit for bit, negative zeros included."""
    export.write(step.start(model.load(tiny), made.config(lora=LORA)).policy, tmp_path / "v0")
    published = load_file(tmp_path / "v0" / "model.safetensors")
    for name, tensor in load_file(tiny / "model.safetensors").items():
        assert torch.equal(published[name].view(torch.int16), tensor.to(torch.bfloat16).view(torch.int16))


def test_the_adapter_folder_is_what_peft_loads(learner: step.Learner, tiny: Path, tmp_path: Path) -> None:
    """On the base it computes what the learner's model does with the rounded factors; merged into version 0 it is the published version,
    to a unit in the last place of bf16: peft multiplies matrices in an order of its own."""
    export.write(learner.policy, tmp_path / "v3", base="/models/tiny")
    assert not any(path.is_file() and "adapter" in path.name for path in (tmp_path / "v3").iterdir()), "the model is no adapter"
    folder = tmp_path / "v3" / "adapter"
    assert sorted(path.name for path in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    loaded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32), folder)
    assert loaded.active_peft_config.base_model_name_or_path == "/models/tiny"
    assert loaded.active_peft_config.target_modules == {"q_proj", "down_proj"}
    rounded = learner.policy.frozen_copy()
    with torch.no_grad():
        for name, parameter in rounded.model.named_parameters():
            if ".lora_" in name:
                parameter.copy_(parameter.bfloat16())
        assert torch.allclose(loaded(IDS).logits, rounded.model(IDS).logits, atol=1e-5)
        assert torch.allclose(loaded(IDS).logits, learner.policy.model(IDS).logits, atol=2e-2)
    export.write(model.load(tiny), tmp_path / "v0")
    onto = AutoModelForCausalLM.from_pretrained(tmp_path / "v0", dtype=torch.float32)
    merged = peft.PeftModel.from_pretrained(onto, folder).merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "v3" / "model.safetensors").items():
        assert int((ordinal(tensor) - ordinal(merged[name].bfloat16())).abs().max()) <= 1


def ordinal(tensor: torch.Tensor) -> torch.Tensor:
    """bf16 numbers by their place among all of them: neighbours differ by 1."""
    bits = tensor.view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def test_a_thread_that_flushes_subnormal_numbers_makes_the_same_bits() -> None:
    """Weights and factors of all sizes; the sums of some would be subnormal, were faint ones not left out."""
    torch.manual_seed(1)
    base, down, up = (torch.randn(*shape) * 2.0 ** torch.randint(-140, 10, shape) for shape in ((40, 30), (4, 30), (40, 4)))
    expected = merging.merged(base, down, up, 2.0**-10)
    assert torch.set_flush_denormal(True)
    try:
        found = merging.merged(base, down, up, 2.0**-10)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found.view(torch.int16), expected.view(torch.int16))


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    base, down, up = torch.randn(37, 50), torch.randn(3, 50), torch.randn(37, 3)
    expected = merging.merged(base, down, up, 2.0)
    monkeypatch.setattr(merging, "LEAST_A_THREAD", 100)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 5)
    assert torch.equal(merging.merged(base, down, up, 2.0), expected)


def test_a_model_without_adapters_has_no_such_folder(tiny: Path, tmp_path: Path) -> None:
    export.write(model.load(tiny), tmp_path / "v0")
    assert not (tmp_path / "v0" / "adapter").exists()


def test_the_canary_leaves_adapters_and_base_as_they_were(learner: step.Learner) -> None:
    before = {name: each.detach().clone() for name, each in learner.policy.model.named_parameters()}
    with torch.no_grad():
        logits = learner.policy.model(IDS).logits
        export.canary(learner.policy, (3, 4, 5))
        assert torch.equal(learner.policy.model(IDS).logits, logits)
    assert all(torch.equal(each, before[name]) for name, each in learner.policy.model.named_parameters())


def test_a_checkpoint_holds_adapters_alone_and_resumes_exactly(
    learner: step.Learner, made: ModuleType, tiny: Path, tmp_path: Path
) -> None:
    checkpoint.write(learner, tmp_path / "c", job_id=made.JOB, ledger_step=3)
    assert load_file(tmp_path / "c" / "weights.safetensors").keys() == learner.policy.trained().keys()
    again = step.start(model.load(tiny), learner.config)
    checkpoint.restore(again, tmp_path / "c", job_id=made.JOB)
    for one in (learner, again):
        step.take_step(one, made.batch(step=3, seed=3))
    mine, its = learner.policy.trained(), again.policy.trained()
    assert all(torch.equal(mine[name], its[name]) for name in mine)
    other = step.start(model.load(tiny), made.config(lora={**LORA, "alpha": 13}, learning_rate=0.01, truncated="keep"))
    with pytest.raises(CheckpointInvalid, match="settings"):
        checkpoint.restore(other, tmp_path / "c", job_id=made.JOB)


def test_the_reference_is_the_base_and_takes_no_memory(made: ModuleType, tiny: Path) -> None:
    one = step.start(model.load(tiny), made.config(lora=LORA, reference_kl=0.1, learning_rate=0.05, truncated="keep"))
    assert one.reference is not None
    assert one.reference.model is one.policy.model
    found = [step.take_step(one, made.batch(step=number, seed=number))["reference_kl/all/mean"] for number in range(2)]
    assert found[0] == 0.0
    assert found[1] > 0.0


def test_targets_that_are_none_are_refused(made: ModuleType, tiny: Path) -> None:
    with pytest.raises(ModelRefused, match=r"lora\.targets names qkv_proj; this model has down_proj, gate_proj, k_proj"):
        step.start(model.load(tiny), made.config(lora={"targets": ("qkv_proj", "q_proj")}))


def test_a_missing_package_is_said(made: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelRefused, match=r"echo2\[lora\]"):
        step.start(model.load(tiny), made.config(lora=LORA))


def test_the_job_file_says_what_it_means(made: ModuleType) -> None:
    config = made.config(lora={}, learner={"ranks": 2})
    again = type(config).model_validate(json.loads(config.model_dump_json()))
    assert again == config
    assert config.lora is not None
    assert (config.lora.rank, config.lora.alpha, len(config.lora.targets)) == (16, 32, 7)
    assert made.config().lora is None
