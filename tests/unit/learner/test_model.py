"""What may be trained, and that the rest is refused with the way out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.learner import model
from coordinator.learner.errors import ModelRefused
from coordinator.learner.model import ARCHITECTURES
from tests.unit.learner.test_layouts import policy_of


@pytest.fixture
def copy(tiny: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


def edit(path: Path, **values: Any) -> None:
    held = json.loads(path.read_bytes()) | values
    path.write_text(json.dumps({key: value for key, value in held.items() if value is not None}))


def test_masters_are_fp32_without_dropout(tiny: Path) -> None:
    policy = model.load(tiny)
    assert {parameter.dtype for parameter in policy.model.parameters()} == {torch.float32}
    assert not policy.model.training
    assert policy.vocab_size == 32
    assert policy.stop_token_ids == (1,)
    assert policy.parameters() == sum(tensor.numel() for tensor in policy.tensors().values())


def test_tied_weights_are_one_tensor(tiny: Path, tmp_path: Path, made: ModuleType) -> None:
    assert "lm_head.weight" not in model.load(tiny).tensors()
    assert "lm_head.weight" in model.load(made.model_directory(tmp_path / "untied", tied=False)).tensors()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "bert"}, "model_type of .* is 'bert'; allowed are"),
        ({"model_type": None}, "model_type of .* is None"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "has auto_map: remove it"),
        ({"quantization_config": {"bits": 4}}, "has quantization_config"),
        ({"attn_implementation": "somebody/kernel"}, "has attn_implementation 'somebody/kernel'"),
        ({"_attn_implementation": {"": "flash_attention_2"}}, "has _attn_implementation"),
        ({"hidden_size": 24}, "cannot be loaded|does not fit"),
        ({"num_hidden_layers": 3, "layer_types": None}, "missing_keys"),
        ({"num_hidden_layers": 1, "layer_types": None}, "unexpected_keys"),
    ],
)
def test_a_config_that_cannot_be_trained_is_refused(copy: Path, change: dict[str, Any], reason: str) -> None:
    edit(copy / "config.json", **change)
    with pytest.raises(ModelRefused, match=reason):
        model.load(copy)


def test_a_missing_tensor_is_refused_not_drawn_at_random(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelRefused, match=r"missing_keys model\.norm\.weight"):
        model.load(copy)


@pytest.mark.parametrize("data", [b"", b"[1]", b"{", b" " * (model.CONFIG_LIMIT_BYTES + 1)])
def test_a_config_that_is_no_json_object_is_refused(copy: Path, data: bytes) -> None:
    (copy / "config.json").write_bytes(data)
    with pytest.raises(ModelRefused, match=r"config\.json"):
        model.load(copy)


def test_pickled_weights_are_not_read(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        model.load(copy)


def test_an_absent_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelRefused, match="must name a Hugging Face directory"):
        model.load(tmp_path / "none")


@pytest.mark.parametrize("stop", [None, [], [99], "x"])
def test_a_model_that_cannot_stop_is_refused(copy: Path, stop: Any) -> None:
    edit(copy / "config.json", eos_token_id=stop)
    edit(copy / "generation_config.json", eos_token_id=stop)
    with pytest.raises(ModelRefused, match=r"eos_token_id|cannot be loaded"):
        model.load(copy)


def test_several_stop_tokens_are_read(copy: Path) -> None:
    edit(copy / "generation_config.json", eos_token_id=[1, 7])
    assert model.load(copy).stop_token_ids == (1, 7)


def test_published_bits_are_the_masters_rounded_and_come_back(tiny: Path) -> None:
    policy = model.load(tiny)
    (first, *_) = policy.model.parameters()
    before = first.detach().clone()

    def inside() -> None:
        with model.published_bits(policy):
            assert torch.equal(first, before.bfloat16().float())
            assert not torch.is_grad_enabled()
            raise KeyError

    with pytest.raises(KeyError):
        inside()
    assert torch.equal(first, before)
    assert not torch.equal(before, before.bfloat16().float())


def test_an_adapter_beside_the_model_is_refused(copy: Path) -> None:
    """It would change the weights, or name another directory, behind config.json's back."""
    (copy / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelRefused, match="merge it into the model"):
        model.load(copy)


SCALED = ("gemma", "gemma2", "gemma3_text")  # they compute the scale of their embeddings in the precision of the weights


@pytest.mark.parametrize("kind", sorted(ARCHITECTURES))
def test_mapped_weights_become_what_the_files_say_in_fp32(tmp_path: Path, kind: str) -> None:
    """Whatever the architecture computes for itself (rotations, scales) is as exact as in a model that was read in fp32."""
    policy_of(kind).model.bfloat16().save_pretrained(tmp_path / "m")
    whole, mapped = model.load(tmp_path / "m").model, model.load_mapped(tmp_path / "m").model
    assert {each.dtype for each in mapped.parameters()} == {torch.float32 if kind in SCALED else torch.bfloat16}
    for kind_of in ("named_parameters", "named_buffers"):
        one, other = (dict(getattr(each, kind_of)()) for each in (whole, mapped))
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name].float()) for name in one)


def test_files_of_several_precisions_are_read_whole(copy: Path) -> None:
    tensors = load_file(copy / "model.safetensors")
    for changed in ({}, {name: each.bfloat16() for name, each in tensors.items() if "norm" in name}):
        save_file(tensors | changed, copy / "model.safetensors", {"format": "pt"})
        assert {each.dtype for each in model.load_mapped(copy).model.parameters()} == {torch.float32}


def test_a_file_that_is_none_is_refused_mapped_as_well(copy: Path) -> None:
    (copy / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelRefused, match="cannot be loaded"):
        model.load_mapped(copy)
