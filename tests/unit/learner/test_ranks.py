"""Two ranks (FSDP2 over gloo, two real processes) against one: gradients, steps, publication, checkpoints, evaluation."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from coordinator.learner import crew, export, model, parts, process, team
from coordinator.learner.crew import Crew
from coordinator.learner.errors import ModelRefused, RankFailed, RanksRefused
from coordinator.learner.parts import Walk
from coordinator.learner.team import Team
from tests.unit.learner import two_ranks
from tests.unit.learner.two_ranks import SCENARIOS, Found

TOLERANCE = {
    "full": 1e-9,
    "single_precision": 1e-6,
    "adapters_and_reference": 1e-9,
    "adapters_written": 1e-5,
    "padded_with_reference": 1e-9,
    "autocast": 1e-2,
    "mapped": 1e-6,
    "written": 1e-6,
    "disk_full": 1e-6,
}


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory, made: ModuleType) -> tuple[Path, dict[str, Found], dict[str, Found]]:
    """What one rank finds, and what two find: this process is rank 0."""
    folder = tmp_path_factory.mktemp("ranks")
    made.model_directory(folder / "tiny")
    export.write(model.load(folder / "tiny"), folder / "half")
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


def test_adapters_are_gathered_into_the_folder_that_one_rank_writes(
    both: tuple[Path, dict[str, Found], dict[str, Found]],
) -> None:
    """Two ranks sum the gradient in another order, so a factor may differ in its last bits; names and shapes do not."""
    folder, _, _ = both
    ours, theirs = (load_file(folder / f"adapted-by-{size}" / "adapter" / "adapter_model.safetensors") for size in (1, 2))
    assert {name: each.shape for name, each in ours.items()} == {name: each.shape for name, each in theirs.items()}
    assert all(torch.allclose(each.float(), theirs[name].float(), rtol=2**-6, atol=1e-4) for name, each in ours.items())
    assert all(float(each.norm()) > 0 for each in ours.values())


def test_what_is_gathered_out_of_order_is_an_error() -> None:
    """Else the other ranks would gather another tensor, and the file would hold it."""
    pair = {"a": torch.ones(1), "b": torch.ones(2)}
    with pytest.raises(ValueError, match="out of order"), Walk(pair, ["a", "b"]) as walk:
        walk.take("b")


@pytest.mark.parametrize(
    ("error", "gathered"),
    [(OSError("disk full"), [1, 2]), (ModelRefused("no config.json"), [1, 2]), (RuntimeError("out of memory"), [1])],
)
def test_a_walk_goes_on_for_the_others_only_where_this_rank_lives_on(
    monkeypatch: pytest.MonkeyPatch, error: Exception, gathered: list[int]
) -> None:
    """After a gathering that failed, the next one would meet the others in this one: they would wait, or take its numbers for others."""
    seen: list[torch.Tensor] = []
    monkeypatch.setattr(parts, "whole", seen.append)

    def walked() -> None:
        with Walk({"a": torch.ones(1), "b": torch.ones(2)}, ["a", "b"]) as walk:
            walk.take("a")
            raise error

    with pytest.raises(type(error)):
        walked()
    assert [len(each) for each in seen] == gathered


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes that this process would have ended with."""
    codes: list[int] = []
    monkeypatch.setattr(crew, "_ended", codes.append)
    return codes


def crew_of(monkeypatch: pytest.MonkeyPatch, code: str) -> Crew:
    """Rank 0's hold on one other, which does as `code` says."""

    def spawn(_: Crew, rank: int, size: int, meeting: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", code, str(meeting.parent)], stdin=subprocess.PIPE)

    monkeypatch.setattr(Crew, "_spawn", spawn)
    one = Crew("cpu")
    one.start(2)
    return one


def watched(one: Crew) -> None:
    """Wait until the watcher of the other has made up its mind."""
    for thread in threading.enumerate():
        if thread.name == "rank 1":
            thread.join(30)
    assert one._folder is not None


def test_the_words_of_a_rank_that_failed_are_in_rank_0s_last_line(
    monkeypatch: pytest.MonkeyPatch, ended: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    """That line is what the coordinator reads."""
    monkeypatch.setattr(crew, "OWN_WORDS_S", 0.0)
    code = (
        "import sys; from pathlib import Path\nPath(sys.argv[1], 'words-1').write_text('RuntimeError: out of memory'); sys.exit(1)"
    )
    one = crew_of(monkeypatch, code)
    watched(one)
    assert ended == [crew.RANK_LOST]
    assert capsys.readouterr().err == ("learner: rank 1 ended with exit code 1 (RuntimeError: out of memory); all ranks end\n")
    one.close()


def test_last_words_are_one_short_line_or_none(tmp_path: Path) -> None:
    crew.leave_words(tmp_path, 1, "RuntimeError: out of memory\nat line 5")
    assert (tmp_path / "words-1").read_text() == "RuntimeError: out of memory"
    crew.leave_words(tmp_path, 2, "x" * 10_000)
    assert (tmp_path / "words-2").read_text() == "x" * crew.WORDS_LIMIT
    crew.leave_words(tmp_path / "gone", 1, "nobody asks")


def test_rank_0_may_say_itself_why_all_failed(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    """What fails one rank often fails rank 0 as well, a moment later: then the coordinator gets its answer, not a closed link."""
    monkeypatch.setattr(crew, "OWN_WORDS_S", 60.0)
    one = crew_of(monkeypatch, "raise SystemExit(1)")
    one._others[0].wait(30)
    one.close()
    watched(one)
    assert ended == []


def test_a_rank_that_was_killed_ends_rank_0_at_once(monkeypatch: pytest.MonkeyPatch, ended: list[int]) -> None:
    monkeypatch.setattr(crew, "OWN_WORDS_S", 60.0)
    one = crew_of(monkeypatch, "input()")
    one._others[0].kill()
    watched(one)
    assert ended == [crew.RANK_LOST]
    one.close()


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
    one = Crew(device)
    one.start(fits + 1)
    with pytest.raises(RanksRefused, match=rf"learner\.ranks is {fits + 1}, this host has room for {most}"):
        one.join(fits + 1)
    assert one._others == []
