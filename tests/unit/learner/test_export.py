"""A snapshot is the masters' bf16 bits in a directory that transformers loads; the canary is of those bits."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from coordinator.learner import export, model
from coordinator.learner.model import Policy
from p2p.adapters.durable import RealFiles


@pytest.fixture
def policy(tiny: Path) -> Policy:
    """Masters that bf16 cannot hold exactly."""
    loaded = model.load(tiny)
    with torch.no_grad():
        for parameter in loaded.model.parameters():
            parameter.mul_(1.001)
    return loaded


def test_the_bits_are_the_masters_rounded_and_load_back(policy: Policy, tmp_path: Path) -> None:
    export.write(policy, tmp_path / "v1")
    stored = load_file(tmp_path / "v1" / "model.safetensors")
    masters = policy.tensors()
    assert stored.keys() == masters.keys()
    assert all(torch.equal(stored[name], masters[name].bfloat16()) for name in stored)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype="auto")
    assert all(parameter.dtype == torch.bfloat16 for parameter in loaded.parameters())
    assert all(torch.equal(loaded.state_dict()[name], stored[name]) for name in stored)
    assert json.loads((tmp_path / "v1" / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_tied_weights_are_stored_once_and_untied_ones_twice(tmp_path: Path, made: ModuleType, tiny: Path) -> None:
    for name, directory in (("tied", tiny), ("untied", made.model_directory(tmp_path / "u", tied=False))):
        export.write(model.load(directory), tmp_path / name)
        with safe_open(tmp_path / name / "model.safetensors", "pt") as opened:
            assert ("lm_head.weight" in opened.keys()) == (name == "untied")  # noqa: SIM118 (not a mapping)


def test_a_second_export_of_what_was_loaded_has_the_same_bytes(policy: Policy, tmp_path: Path) -> None:
    export.write(policy, tmp_path / "v1")
    export.write(model.load(tmp_path / "v1"), tmp_path / "again")
    names = sorted(path.name for path in (tmp_path / "v1").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "again").iterdir())
    assert all((tmp_path / "v1" / name).read_bytes() == (tmp_path / "again" / name).read_bytes() for name in names)


def test_only_listed_files_are_copied(policy: Policy, tiny: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "merges.txt", "modeling_evil.py", "notes.md"):
        (source / name).write_bytes((tiny / "config.json").read_bytes())
    export.write(Policy(policy.model, source, 32, (1,)), tmp_path / "v1")
    assert {path.name for path in (tmp_path / "v1").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "merges.txt",
    }


def test_the_commit_point_comes_before_the_directory_exists(policy: Policy, tmp_path: Path) -> None:
    seen = []
    export.write(policy, tmp_path / "v1", reached=lambda name: seen.append((name, (tmp_path / "v1").exists())))
    assert seen == [("learner.snapshot.before_rename", False)]


def test_the_canary_is_that_of_the_published_bits(policy: Policy, tmp_path: Path) -> None:
    """An engine that loads the directory in fp32 sees the same log-probs; the masters themselves give others."""
    ids = (3, 9, 27, 5, 11, 2)
    found = export.canary(policy, ids)
    export.write(policy, tmp_path / "v1")
    expected = []
    for engine in (AutoModelForCausalLM.from_pretrained(tmp_path / "v1", dtype=torch.float32), policy.model):
        with torch.no_grad():
            every = torch.log_softmax(engine(input_ids=torch.tensor([ids])).logits[0].float(), dim=-1)
        expected.append([float(every[place, token]) for place, token in enumerate(ids[1:])])
    assert found == pytest.approx(expected[0], abs=1e-6)
    assert found != pytest.approx(expected[1], abs=1e-6)
    assert len(found) == len(ids) - 1
    assert all(value <= 0 for value in found)


def test_a_canary_of_one_token_has_nothing_to_say(policy: Policy) -> None:
    assert export.canary(policy, (3,)) == ()


def test_a_snapshot_is_written_tensor_by_tensor(policy: Policy, tmp_path: Path) -> None:
    """A model of half the machine's memory can be published: never more than its largest tensor is held besides."""

    class Watched(RealFiles):
        largest = total = 0

        def write_chunks(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
            sizes = []

            def seen() -> Iterator[bytes | memoryview]:
                for chunk in chunks:
                    sizes.append(len(chunk))
                    yield chunk

            super().write_chunks(path, seen())
            self.largest, self.total = max(sizes), sum(sizes)

    files = Watched()
    export.write(policy, tmp_path / "v1", files=files)
    assert files.total == (tmp_path / "v1" / "model.safetensors").stat().st_size
    biggest = max(2 * tensor.numel() for tensor in policy.tensors().values())
    assert files.largest <= max(biggest, 8192)
