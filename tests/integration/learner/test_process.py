"""The real learner process on a real Unix socket: exact resume, law 11, and refusals that leave it alive."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file

from coordinator.learner.crash_point import COMMIT_POINTS
from coordinator.learner.process import LINK_CLOSED
from coordinator.wire.learner_link import (
    Checkpoint,
    Checkpointed,
    Failed,
    Ready,
    Snapshot,
    Snapshotted,
    Start,
    Stop,
    Train,
    Trained,
)

FENCE = 3
END_WITHIN_S = 20.0


class Driver:
    """Plays the coordinator against one process."""

    def __init__(self, made: ModuleType, process: Any, folder: Path) -> None:
        self.made, self.process, self.folder = made, process, folder

    def start(self, tiny: Path, checkpoint: str | None = None) -> Ready:
        directory = None if checkpoint is None else str(self.folder / checkpoint)
        answer = self.process.ask(
            Start(
                fence=FENCE,
                job_id=self.made.JOB,
                config=self.made.config(warmup_steps=3),
                model_dir=str(tiny),
                checkpoint_dir=directory,
            )
        )
        assert isinstance(answer, Ready)
        return answer

    def train(self, number: int, **changed: Any) -> Any:
        path, digest = self.made.sealed(self.folder, number)
        request = Train(fence=FENCE, step=number, batch_path=str(path), batch_digest=digest)
        return self.process.ask(request.model_copy(update=changed))

    def trained(self, steps: range) -> dict[int, dict[str, float]]:
        """The metrics of each step but those that measure time."""
        found = {}
        for step in steps:
            answer = self.train(step)
            assert isinstance(answer, Trained)
            timed = {"time/step", "step_time", "perf/throughput"}
            found[step] = {name: value for name, value in answer.metrics.items() if name not in timed}
        return found

    def checkpoint(self, step: int) -> Any:
        return self.process.ask(Checkpoint(fence=FENCE, directory=str(self.folder / f"c{step}"), ledger_step=step))


def folder_of(tmp_path: Path, name: str) -> Path:
    folder = tmp_path / name
    folder.mkdir()
    return folder


def test_ten_steps_straight_are_seven_a_kill_and_a_replay(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Killed after 7 steps, resumed from the checkpoint at 5, steps 5 and 6 replayed, 3 more: the same bits."""
    straight, broken = folder_of(tmp_path, "straight"), folder_of(tmp_path, "broken")
    with made.LearnerProcess(straight) as process:
        driver = Driver(made, process, straight)
        assert driver.start(tiny).step == 0
        expected = driver.trained(range(10))
        assert isinstance(driver.checkpoint(10), Checkpointed)
    with made.LearnerProcess(broken) as process:
        driver = Driver(made, process, broken)
        driver.start(tiny)
        found = driver.trained(range(5))
        assert isinstance(driver.checkpoint(5), Checkpointed)
        found |= driver.trained(range(5, 7))
        process.process.send_signal(signal.SIGKILL)
        process.process.wait(END_WITHIN_S)
    with made.LearnerProcess(broken) as process:
        driver = Driver(made, process, broken)
        assert driver.start(tiny, "c5").step == 5
        replayed = driver.trained(range(5, 10))
        assert isinstance(driver.checkpoint(10), Checkpointed)
    assert {step: found[step] for step in (5, 6)} == {step: replayed[step] for step in (5, 6)}
    assert found | replayed == expected
    for name in ("weights.safetensors", "optimizer.safetensors", "state.json"):
        assert (straight / "c10" / name).read_bytes() == (broken / "c10" / name).read_bytes()
    moved = load_file(straight / "c10" / "weights.safetensors")
    assert any(not moved[name].equal(tensor) for name, tensor in load_file(tiny / "model.safetensors").items())


def test_refusals_leave_it_alive_and_the_closed_link_ends_it(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        for line in (b"{", b'{"kind": "dance", "fence": 3}', b'{"kind": "stop", "fence": 3, "why": "x"}'):
            process.send(line)
            answer = process.receive()
            assert isinstance(answer, Failed)
            assert (answer.code, answer.fatal) == ("bad_request", False)
        driver.start(tiny)
        for code, changed in (
            ("wrong_fence", {"fence": FENCE + 1}),
            ("wrong_step", {"step": 1}),
            ("bad_batch", {"batch_digest": "00"}),
        ):
            answer = driver.train(0, **changed)
            assert isinstance(answer, Failed)
            assert (answer.code, answer.fatal) == (code, False)
        assert isinstance(driver.train(0), Trained)
        process.link.shutdown(2)
        assert process.process.wait(END_WITHIN_S) == LINK_CLOSED


def test_the_link_closing_ends_it_in_the_middle_of_work(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """The batch keeps it busy for far longer than the second it is given; it does not finish it first."""
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        driver.start(tiny)
        values = made.arrays(step=0, groups=20_000, group_size=4)
        data = made.file_bytes(values, step=0)
        (tmp_path / "large").write_bytes(data)
        digest = made.blake3(data).hexdigest()
        process.send(Train(fence=FENCE, step=0, batch_path=str(tmp_path / "large"), batch_digest=digest).model_dump_json().encode())
        process.link.settimeout(1.0)
        with pytest.raises(TimeoutError):
            process.link.recv(1)
        process.link.shutdown(2)
        assert process.process.wait(END_WITHIN_S) == LINK_CLOSED


def test_stop_ends_it_cleanly(made: ModuleType, tmp_path: Path) -> None:
    with made.LearnerProcess(tmp_path) as process:
        process.send(Stop(fence=FENCE).model_dump_json().encode())
        assert process.process.wait(END_WITHIN_S) == 0


def test_a_start_that_cannot_be_is_said_and_ends_it(made: ModuleType, tmp_path: Path) -> None:
    with made.LearnerProcess(tmp_path) as process:
        start = Start(fence=FENCE, job_id="j", config=made.config(), model_dir=str(tmp_path), checkpoint_dir=None)
        answer = process.ask(start)
        assert isinstance(answer, Failed)
        assert (answer.code, answer.fatal) == ("bad_model", True)
        assert process.process.wait(END_WITHIN_S) == 1


def test_a_flood_of_requests_ends_it(made: ModuleType, tmp_path: Path) -> None:
    """One request is in flight by contract; what waits is bounded."""
    with made.LearnerProcess(tmp_path) as process:
        process.process.send_signal(signal.SIGSTOP)
        process.send(b"\n".join([b'{"kind": "dance", "fence": 3}'] * 5000))
        process.process.send_signal(signal.SIGCONT)
        assert process.process.wait(END_WITHIN_S) == LINK_CLOSED


def test_no_coordinator_is_one_clear_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "coordinator.learner.process", "--socket", str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("learner: --socket ")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.long  # tests/e2e/test_crashes.py dies at three of them in every run
@pytest.mark.parametrize("point", COMMIT_POINTS)
def test_killed_at_a_commit_point_it_resumes(made: ModuleType, tiny: Path, tmp_path: Path, point: str) -> None:
    """What was being written is whole or absent, and an older checkpoint still serves."""
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        driver.start(tiny)
        assert isinstance(driver.checkpoint(0), Checkpointed)
    with made.LearnerProcess(tmp_path, "--crash-at", f"{point}:1") as process:
        driver = Driver(made, process, tmp_path)
        process.ask(
            Start(
                fence=FENCE,
                job_id=made.JOB,
                config=made.config(warmup_steps=3),
                model_dir=str(tiny),
                checkpoint_dir=str(tmp_path / "c0"),
            )
        )
        if process.process.poll() is None:
            for request in (
                lambda: driver.train(0),
                lambda: process.ask(Snapshot(fence=FENCE, directory=str(tmp_path / "v1"), canary_ids=(2, 3))),
                lambda: driver.checkpoint(1),
            ):
                try:
                    answer = request()
                except BrokenPipeError:
                    break
                if answer is None:
                    break
        assert process.process.wait(END_WITHIN_S) == -signal.SIGKILL
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        whole = "c1" if (tmp_path / "c1").exists() else "c0"
        assert driver.start(tiny, whole).step == int(whole[1])
        if whole == "c0":
            assert isinstance(driver.train(0), Trained)
        answer = process.ask(Snapshot(fence=FENCE, directory=str(tmp_path / "v1"), canary_ids=(2, 3)))
        assert isinstance(answer, Snapshotted)
        assert answer.version == 1
        assert isinstance(driver.checkpoint(1), Checkpointed)
