"""A checkpoint resumes bit for bit, is whole or absent on any disk, and refuses what is not its own."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from random import Random
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from coordinator.learner import checkpoint, model, step
from coordinator.learner.errors import CheckpointInvalid
from p2p.adapters.durable import RealFiles


@pytest.fixture(scope="module")
def faults() -> ModuleType:
    """tests/faults/files.py, which is in no package."""
    path = Path(__file__).parents[2] / "faults" / "files.py"
    spec = importlib.util.spec_from_file_location("learner_faults_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def trained(made: ModuleType, tiny: Path, steps: int, **algorithm: Any) -> step.Learner:
    one = step.start(model.load(tiny), made.config(**algorithm))
    for number in range(steps):
        step.take_step(one, made.batch(step=number, seed=number))
    return one


def resumed(made: ModuleType, tiny: Path, directory: Path, **algorithm: Any) -> step.Learner:
    one = step.start(model.load(tiny), made.config(**algorithm))
    checkpoint.restore(one, directory, job_id="job-1")
    return one


def state(one: step.Learner) -> list[torch.Tensor]:
    moments = [
        one.optimizer.state[parameter][key]
        for parameter in one.policy.model.parameters()
        if parameter in one.optimizer.state
        for key in ("step", "exp_avg", "exp_avg_sq")
    ]
    return [*(parameter.detach().clone() for parameter in one.policy.model.parameters()), *(each.clone() for each in moments)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("steps", [0, 3])
def test_resume_is_exact(made: ModuleType, tiny: Path, tmp_path: Path, steps: int) -> None:
    straight = trained(made, tiny, steps)
    torch.manual_seed(7)
    checkpoint.write(straight, tmp_path / "c", job_id="job-1", ledger_step=steps)
    expected_draw = torch.rand(1)
    back = resumed(made, tiny, tmp_path / "c")
    assert torch.equal(torch.rand(1), expected_draw)
    assert back.step == steps
    assert same(state(back), state(straight))
    for one in (straight, back):
        step.take_step(one, made.batch(step=steps, seed=99))
    assert same(state(back), state(straight))


def test_a_checkpoint_is_safetensors_and_json_only(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    checkpoint.write(trained(made, tiny, 1), tmp_path / "c", job_id="job-1", ledger_step=1)
    assert sorted(path.name for path in (tmp_path / "c").iterdir()) == [
        "optimizer.safetensors",
        "state.json",
        "weights.safetensors",
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]


def test_an_older_checkpoint_of_that_name_is_replaced(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    one = trained(made, tiny, 1)
    checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=1)
    step.take_step(one, made.batch(step=1, seed=1))
    checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=2)
    assert resumed(made, tiny, tmp_path / "c").step == 2


def test_what_shapes_a_step_must_be_the_same(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    checkpoint.write(trained(made, tiny, 1), tmp_path / "c", job_id="job-1", ledger_step=1)
    with pytest.raises(CheckpointInvalid, match="settings"):
        resumed(made, tiny, tmp_path / "c", learning_rate=2e-3)
    assert resumed(made, tiny, tmp_path / "c", no_signal_limit=9).step == 1


@pytest.mark.parametrize(
    ("changed", "fits"),
    [
        ({"lora": {"rank": 2}}, False),
        ({"learner": {"dtype": "bfloat16"}}, False),
        ({"temperature": 0.5}, False),
        ({"learner": {"packing": False}}, True),
        ({"learner": {"gradient_checkpointing": True}}, True),
        ({"learner": {"ranks": 2}}, True),
        ({"micro_batch_tokens": 64}, True),
    ],
)
def test_a_resume_with_other_settings_is_right_or_refused_in_words(
    made: ModuleType, tiny: Path, tmp_path: Path, changed: dict[str, Any], fits: bool
) -> None:
    """What only arranges the work may change; what decides a step's weights may not."""
    straight = trained(made, tiny, 2)
    checkpoint.write(straight, tmp_path / "c", job_id="job-1", ledger_step=2)
    other = step.start(model.load(tiny), made.config(**changed))
    if not fits:
        with pytest.raises(
            CheckpointInvalid, match=r"\[algorithm\], lora, learner\.dtype, seed or sampling\.temperature are not those"
        ):
            checkpoint.restore(other, tmp_path / "c", job_id="job-1")
        return
    checkpoint.restore(other, tmp_path / "c", job_id="job-1")
    for one in (straight, other):
        step.take_step(one, made.batch(step=2, seed=99))
    for ours, theirs in zip(state(other), state(straight), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("out of memory")])
def test_a_checkpoint_that_could_not_be_written_leaves_the_disk_as_it_was(
    made: ModuleType, tiny: Path, tmp_path: Path, error: Exception
) -> None:
    """On a full disk what was written of it is what fills the disk, and the job waits for room. An older one stays."""
    one = trained(made, tiny, 1)
    checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=1)

    class Full(RealFiles):
        def write_file(self, path: Path, data: bytes | memoryview) -> None:
            raise error

    with pytest.raises(type(error)):
        checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=1, files=Full())
    left = {path.name for path in tmp_path.iterdir()}
    assert left == ({"c"} if isinstance(error, OSError) else {"c", ".c.partial"})
    assert resumed(made, tiny, tmp_path / "c").step == 1


def test_staleness_and_budget_may_change(made: ModuleType) -> None:
    config = made.config()
    patched = config.model_copy(update={"budget": config.budget.model_copy(update={"steps": 99})})
    assert checkpoint.settings_digest(config) == checkpoint.settings_digest(patched)


def tear(directory: Path) -> None:
    data = (directory / "weights.safetensors").read_bytes()
    (directory / "weights.safetensors").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def rewrite(**values: Any) -> Any:
    def apply(directory: Path) -> None:
        held = json.loads((directory / "state.json").read_bytes())
        (directory / "state.json").write_text(json.dumps(held | values))

    return apply


def lose_a_tensor(directory: Path) -> None:
    tensors = load_file(directory / "optimizer.safetensors")
    tensors.pop("model.norm.weight|exp_avg")
    save_file(tensors, directory / "optimizer.safetensors")
    digests = {name: checkpoint.hash_file(directory / name) for name in ("weights.safetensors", "optimizer.safetensors")}
    rewrite(files=digests)(directory)


BROKEN = {
    "a flipped bit": (tear, "files"),
    "a missing file": (lambda directory: (directory / "optimizer.safetensors").unlink(), "not whole"),
    "no state": (lambda directory: (directory / "state.json").write_text("{"), "not whole"),
    "another job": (rewrite(job="job-2"), "job is 'job-2'"),
    "another format": (rewrite(format="x"), "format is 'x'"),
    "another ledger position": (rewrite(ledger_step=4), "ledger_step 4 differs"),
    "a lost tensor": (lose_a_tensor, "model.norm.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_cannot_be_resumed_exactly_is_refused(made: ModuleType, tiny: Path, tmp_path: Path, name: str) -> None:
    checkpoint.write(trained(made, tiny, 1), tmp_path / "c", job_id="job-1", ledger_step=1)
    damage, reason = BROKEN[name]
    damage(tmp_path / "c")
    with pytest.raises(CheckpointInvalid, match=reason):
        resumed(made, tiny, tmp_path / "c")


def test_a_checkpoint_of_another_model_is_refused(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    checkpoint.write(trained(made, tiny, 1), tmp_path / "c", job_id="job-1", ledger_step=1)
    other = made.model_directory(tmp_path / "untied", tied=False)
    with pytest.raises(CheckpointInvalid, match=r"lm_head\.weight"):
        resumed(made, other, tmp_path / "c")


def test_on_any_disk_a_power_loss_leaves_the_old_checkpoint_or_the_new_one(
    made: ModuleType, tiny: Path, tmp_path: Path, faults: ModuleType
) -> None:
    """The power fails at each operation in turn, with torn writes and reordered names."""
    old, new = trained(made, tiny, 1), trained(made, tiny, 2)
    outcomes = set()
    for crash_at in range(1, 40):
        root = tmp_path / str(crash_at)
        root.mkdir()
        files = faults.FaultyFiles(root)
        checkpoint.write(old, root / "c", job_id="job-1", ledger_step=1, files=files)
        files.crash_at = files.operations + crash_at
        finished = True
        try:
            checkpoint.write(new, root / "c", job_id="job-1", ledger_step=2, files=files)
        except faults.PowerLoss:
            finished = False
        files.power_loss(Random(crash_at))
        back = resumed(made, tiny, root / "c")
        assert same(state(back), state(new if back.step == 2 else old))
        assert back.step == 2 or not finished
        outcomes.add((back.step, finished))
        if finished:
            break
    assert {(1, False), (2, True)} <= outcomes


def test_a_full_disk_is_an_error_and_keeps_the_old_checkpoint(
    made: ModuleType, tiny: Path, tmp_path: Path, faults: ModuleType
) -> None:
    one = trained(made, tiny, 1)
    files = faults.FaultyFiles(tmp_path)
    checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=1, files=files)
    files.fill_disk()
    with pytest.raises(OSError, match="no space"):
        checkpoint.write(one, tmp_path / "c", job_id="job-1", ledger_step=1, files=files)
    assert resumed(made, tiny, tmp_path / "c").step == 1


@pytest.mark.parametrize("text", ["[]", "null", "{}", '{"step": "3"}'])
def test_a_state_that_is_none_is_refused_in_words(made: ModuleType, tiny: Path, tmp_path: Path, text: str) -> None:
    """Not an internal error."""
    checkpoint.write(trained(made, tiny, 1), tmp_path / "at-1", job_id="job-1", ledger_step=1)
    (tmp_path / "at-1" / "state.json").write_text(text)
    with pytest.raises(CheckpointInvalid):
        resumed(made, tiny, tmp_path / "at-1")


def test_a_state_without_its_ledger_step_is_refused(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """The position in the ledger is what a resume is checked against."""
    checkpoint.write(trained(made, tiny, 1), tmp_path / "at-1", job_id="job-1", ledger_step=1)
    path = tmp_path / "at-1" / "state.json"
    held = json.loads(path.read_bytes())
    del held["ledger_step"]
    path.write_text(json.dumps(held))
    with pytest.raises(CheckpointInvalid, match="ledger_step None"):
        resumed(made, tiny, tmp_path / "at-1")
