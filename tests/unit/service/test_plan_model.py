"""What a model's files tell a plan: against the forecast of the whole model, and nothing where they cannot be read."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from coordinator.domain.plan_facts import KEYFRAME_SHARE, Source
from coordinator.service import plan_model
from coordinator.service.plan_model import model_facts
from p2p.adapters.snapshot_dir import open_snapshot
from p2p.codec.forecast import exponents, forecast
from p2p.codec.layout import gather, shards


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Normal weights of deviation 0.02, as in models of 0.5 to 8 B parameters."""
    random = np.random.default_rng(0)
    tensors = {f"layer.{i}.weight": random.normal(0, 0.02, (512, 1024)).astype(np.float16) for i in range(4)}
    save_file({**tensors, "norm.weight": np.ones(64, np.float32), "steps": np.zeros(3, np.int64)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_sizes(model: Path) -> None:
    """Weights and bytes are counted."""
    facts = model_facts(model, 1e-6)
    assert facts["parameters"].value == 4 * 512 * 1024 + 64 + 3
    assert facts["keyframe_bytes"].value == pytest.approx(KEYFRAME_SHARE * (4 * 512 * 1024 * 2 + 64 * 4 + 3 * 8))
    assert {fact.source for fact in facts.values()} == {Source.MEASURED}


@pytest.mark.parametrize("sample", [1 << 30, 1 << 20])
def test_the_delta_of_a_sample_is_that_of_the_whole(model: Path, monkeypatch: pytest.MonkeyPatch, sample: int) -> None:
    """Read whole or a quarter of it."""
    monkeypatch.setattr(plan_model, "SAMPLE_BYTES", sample)
    snapshot = open_snapshot(model)
    whole = forecast(exponents((shard, gather(shard, snapshot.read)) for shard in shards(snapshot.tensors)), 1e-7)
    facts = model_facts(model, 1e-7)
    assert facts["delta_bytes"].value == pytest.approx(whole.dense_bytes, rel=0.02)
    assert 0.5 < facts["delta_growth"].value < 1


def test_nothing_without_files(tmp_path: Path) -> None:
    """A plan needs no model to be there."""
    assert model_facts(tmp_path / "absent", 1e-6) == {}
    (tmp_path / "model.safetensors").write_bytes(b"no")
    assert model_facts(tmp_path, 1e-6) == {}


def test_weights_of_no_known_format(tmp_path: Path) -> None:
    """Sizes only."""
    save_file({"a": np.zeros(8, np.int8)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    assert set(model_facts(tmp_path, 1e-6)) == {"parameters", "keyframe_bytes"}
