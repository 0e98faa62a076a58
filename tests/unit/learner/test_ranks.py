"""Two ranks (FSDP2 over gloo, two real processes) against one: gradients, steps, publication, checkpoints, evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from coordinator.learner import process, team
from coordinator.learner.crew import Crew
from coordinator.learner.errors import RankFailed, RanksRefused
from coordinator.learner.parts import Walk
from coordinator.learner.team import Team
from tests.unit.learner import two_ranks
from tests.unit.learner.two_ranks import SCENARIOS, Found

TOLERANCE = {
    "full": 1e-9,
    "single_precision": 1e-6,
    "adapters_and_reference": 1e-9,
    "padded_with_reference": 1e-9,
    "autocast": 1e-2,
    "written": 1e-6,
    "disk_full": 1e-6,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> tuple[Path, dict[str, Found], dict[str, Found]]:
    """What one rank finds, and what two find: this process is rank 0."""
    folder = tmp_path_factory.mktemp("ranks")
    made.model_directory(folder / "tiny")
    process.make_deterministic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(team, "COLLECTIVE_TIMEOUT", timedelta(seconds=120))
        command = [sys.executable, "-m", "tests.unit.learner.two_ranks", str(folder)]
        with (folder / "log").open("wb") as log:
            # The scenario "written" needs what the other has written: one rank first, from its own checkpoint, then again.
            alone = {name: run(Team(), folder) for name, run in SCENARIOS.items() if name != "written"}
            written_alone(folder)
            other = subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stderr=log)
            try:
                first = team.join(0, 2, meeting=folder / "meeting", device="cpu")
                together = {name: run(first, folder) for name, run in SCENARIOS.items()}
                assert other.wait(60) == 0, (folder / "log").read_text()
            finally:
                other.kill()
                other.wait()
                dist.destroy_process_group()
        alone["written"] = SCENARIOS["written"](Team(), folder)
    torch.use_deterministic_algorithms(False)
    return folder, alone, together


def written_alone(folder: Path) -> None:
    """The checkpoint that the two will start from."""
    one = two_ranks.learner(Team(), folder, two_ranks.config(), dtype=torch.float32)
    two_ranks.steps(one, 1)
    two_ranks.checkpoint.write(one, folder / "by-one", job_id=two_ranks.made.JOB, ledger_step=1)


@pytest.mark.parametrize("name", SCENARIOS)
def test_two_ranks_find_what_one_finds(both: tuple[Path, dict[str, Found], dict[str, Found]], name: str) -> None:
    _, alone, together = both
    assert alone[name].keys() == together[name].keys()
    for what, expected in alone[name].items():
        found = together[name][what]
        assert found.shape == expected.shape
        assert float(expected.norm()) > 0
        assert float((found - expected).norm()) <= TOLERANCE[name] * float(expected.norm()), what


def test_a_publication_is_the_bf16_of_the_masters_whatever_the_ranks(both: tuple[Path, dict[str, Found], dict[str, Found]]) -> None:
    """The snapshot of two ranks, and that of one rank which took up their checkpoint, are the same bytes."""
    folder, _, _ = both
    names = sorted(path.name for path in (folder / "v2-of-2").iterdir())
    assert names == sorted(path.name for path in (folder / "v2-of-1").iterdir())
    assert all((folder / "v2-of-2" / name).read_bytes() == (folder / "v2-of-1" / name).read_bytes() for name in names)
    masters = load_file(folder / "by-two" / "weights.safetensors")
    published = load_file(folder / "v2-of-2" / "model.safetensors")
    assert all(torch.equal(published[name], master.bfloat16()) for name, master in masters.items())


def test_what_is_gathered_out_of_order_is_an_error() -> None:
    """Else the other ranks would gather another tensor, and the file would hold it."""
    parts = {"a": torch.ones(1), "b": torch.ones(2)}
    with pytest.raises(ValueError, match="out of order"), Walk(parts, ["a", "b"]) as walk:
        walk.take("b")


def test_a_rank_that_cannot_do_its_part_holds_back_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise RanksRefused("no")

    told: list[list[float]] = []
    monkeypatch.setattr(Team, "least", lambda _, values: told.append(values) or [0.0])
    with pytest.raises(RanksRefused):
        Team(0, 2).agreed(fails)
    with pytest.raises(RankFailed, match="another rank"):
        Team(0, 2).agreed(lambda: 1)
    assert told == [[0.0], [1.0]]


@pytest.mark.parametrize(("device", "fits", "most"), [("cuda", 2, r"2 \(GPUs\)"), ("cpu", 6, r"6 \(processors\)")])
def test_more_ranks_than_the_host_holds_are_refused_before_one_starts(
    monkeypatch: pytest.MonkeyPatch, device: str, fits: int, most: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert team.refusal(fits, device) is None
    crew = Crew(device)
    crew.start(fits + 1)
    with pytest.raises(RanksRefused, match=rf"learner\.ranks is {fits + 1}, this host has room for {most}"):
        crew.join(fits + 1)
    assert crew._others == []
