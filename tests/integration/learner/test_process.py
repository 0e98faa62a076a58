"""The real learner process on a real Unix socket: exact resume, law 11, and refusals that leave it alive."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file

from coordinator.learner.crash_point import COMMIT_POINTS
from coordinator.learner.crew import RANK_LOST
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

    def start(self, tiny: Path, checkpoint: str | None = None, **learner: Any) -> Ready:
        directory = None if checkpoint is None else str(self.folder / checkpoint)
        answer = self.process.ask(
            Start(
                fence=FENCE,
                job_id=self.made.JOB,
                config=self.made.config(warmup_steps=3, learner=learner),
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

    def send_large(self) -> None:
        """A batch that keeps it busy for far longer than a second."""
        values = self.made.arrays(step=0, groups=20_000, group_size=4)
        data = self.made.file_bytes(values, step=0)
        (self.folder / "large").write_bytes(data)
        digest = self.made.blake3(data).hexdigest()
        request = Train(fence=FENCE, step=0, batch_path=str(self.folder / "large"), batch_digest=digest)
        self.process.send(request.model_dump_json().encode())

    def train_for_long(self) -> None:
        """Send that batch, and see that it is busy."""
        self.send_large()
        self.process.link.settimeout(1.0)
        with pytest.raises(TimeoutError):
            self.process.link.recv(1)

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
        driver.train_for_long()
        process.link.shutdown(2)
        assert process.process.wait(END_WITHIN_S) == LINK_CLOSED


def test_fault_06_the_end_of_one_rank_is_the_end_of_all_at_once(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Killed in the middle of a step, with collectives under way: nobody waits for the dead."""
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        assert driver.start(tiny, ranks=2).parameters > 0
        (other,) = psutil.Process(process.process.pid).children()
        driver.train_for_long()
        other.kill()
        assert process.process.wait(END_WITHIN_S) == RANK_LOST
    assert (tmp_path / "learner.log").read_text().splitlines()[-1] == "learner: rank 1 ended by SIGKILL; all ranks end"


@pytest.mark.long
def test_fault_06_no_rank_waits_for_one_that_has_no_memory(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Where the memory ends it decides how this is told: as a batch that one rank could not read, or by the end of that rank."""
    with made.LearnerProcess(tmp_path) as process:
        driver = Driver(made, process, tmp_path)
        driver.start(tiny, ranks=2)
        (other,) = psutil.Process(process.process.pid).children()
        other.rlimit(psutil.RLIMIT_AS, (other.memory_info().vms, -1))
        driver.send_large()
        process.link.settimeout(END_WITHIN_S)
        answer = process.receive()
        if answer is None:
            assert process.process.wait(END_WITHIN_S) == RANK_LOST
            last = (tmp_path / "learner.log").read_text().splitlines()[-1]
            assert re.fullmatch(r"learner: rank 1 ended with exit code 1 \(.+\); all ranks end", last)
        else:
            assert isinstance(answer, Failed)
            assert (answer.code, answer.fatal) == ("rank_failed", False)


@pytest.mark.long  # the pipe that closes is the same mechanism as the link's
def test_no_rank_outlives_the_first_and_stop_ends_all(made: ModuleType, tiny: Path, tmp_path: Path) -> None:
    """Not even one that is stopped by a signal, and reads no pipe: it would hold its card's memory for ever."""
    for end in ("kill", "kill the first of stopped ones", "stop", "link"):
        with made.LearnerProcess(tmp_path) as process:
            driver = Driver(made, process, tmp_path)
            driver.start(tiny, ranks=3)
            others = psutil.Process(process.process.pid).children()
            assert len(others) == 2
            if end == "stop":
                assert isinstance(driver.train(0), Trained)
                process.send(Stop(fence=FENCE).model_dump_json().encode())
                assert process.process.wait(END_WITHIN_S) == 0
            else:
                driver.train_for_long()
                for other in others if "stopped" in end else ():
                    other.suspend()
                process.process.kill() if end.startswith("kill") else process.link.shutdown(2)
            assert psutil.wait_procs(others, timeout=END_WITHIN_S)[1] == []


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
