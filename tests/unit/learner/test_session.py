"""Requests in, answers out: order, fence, steps, and refusals that change nothing."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.learner import checkpoint, crash_point, process, step
from coordinator.learner.session import Session
from coordinator.wire.learner_link import (
    ANSWERS,
    Checkpoint,
    Checkpointed,
    Evaluate,
    Evaluated,
    Failed,
    Log,
    Logged,
    Ready,
    Snapshot,
    Snapshotted,
    Start,
    Stop,
    Train,
    Trained,
)

FENCE = 7
EVALUATE = Evaluate(fence=FENCE, prompts=((3, 4), (5,)), max_new_tokens=(4, 4), stop_token_ids=(1,))


@pytest.fixture
def start(made: ModuleType, tiny: Path) -> Callable[..., Start]:
    def build(**changed: Any) -> Start:
        plain: dict[str, Any] = {
            "fence": FENCE,
            "job_id": made.JOB,
            "config": made.config(),
            "model_dir": str(tiny),
            "checkpoint_dir": None,
        }
        return Start(**(plain | changed))

    return build


@pytest.fixture
def session(start: Callable[..., Start]) -> Session:
    one = Session()
    assert isinstance(one.answer(start()), Ready)
    return one


def train(made: ModuleType, folder: Path, step: int, **changed: Any) -> Train:
    path, digest = made.sealed(folder, step)
    return Train(**({"fence": FENCE, "step": step, "batch_path": str(path), "batch_digest": digest} | changed))


def refused(answer: object) -> tuple[str, bool]:
    assert isinstance(answer, Failed)
    return answer.code, answer.fatal


def test_ready_says_what_the_coordinator_must_know(start: Callable[..., Start]) -> None:
    answer = Session().answer(start())
    assert answer == Ready(fence=FENCE, step=0, parameters=answer.parameters, vocab_size=32, stop_token_ids=(1,))
    assert answer.parameters > 1000


def test_a_whole_life(session: Session, made: ModuleType, tmp_path: Path, start: Callable[..., Start]) -> None:
    trained = session.answer(train(made, tmp_path, 0))
    assert isinstance(trained, Trained)
    assert trained.metrics["step_time"] == trained.seconds > 0
    shot = session.answer(Snapshot(fence=FENCE, directory=str(tmp_path / "v1"), canary_ids=(3, 4, 5)))
    assert isinstance(shot, Snapshotted)
    assert (shot.version, len(shot.canary_logprobs)) == (1, 2)
    kept = session.answer(Checkpoint(fence=FENCE, directory=str(tmp_path / "c"), ledger_step=1))
    assert kept == Checkpointed(fence=FENCE, step=1, directory=str(tmp_path / "c"))
    evaluated = session.answer(EVALUATE)
    assert isinstance(evaluated, Evaluated)
    assert (evaluated.version, len(evaluated.completions)) == (1, 2)
    assert session.answer(Stop(fence=FENCE)) is None
    again = Session().answer(start(checkpoint_dir=str(tmp_path / "c")))
    assert isinstance(again, Ready)
    assert again.step == 1


def test_figures_go_to_the_jobs_file_and_the_next_start_knows_how_far(start: Callable[..., Start], tmp_path: Path) -> None:
    one = Session()
    one.answer(start(metrics_dir=str(tmp_path / "metrics")))
    assert one.answer(Log(fence=FENCE, step=0, at=5.0, metrics={"entropy": 1.0})) == Logged(fence=FENCE, step=0)
    assert one.answer(Stop(fence=FENCE)) is None
    assert (tmp_path / "metrics" / "metrics.jsonl").read_text() == '{"step": 0, "at": 5.0, "entropy": 1.0}\n'
    again = Session().answer(start(metrics_dir=str(tmp_path / "metrics")))
    assert isinstance(again, Ready)
    assert again.logged == 1


def test_the_reference_is_version_0_after_a_resume_too(made: ModuleType, tmp_path: Path, start: Callable[..., Start]) -> None:
    """Trained from a checkpoint, the KL is that of a learner which never stopped; at version 0 it was 0."""
    settings = made.config(reference_kl=0.5, learning_rate=0.05, truncated="keep")
    one = Session()
    one.answer(start(config=settings))
    found = [one.answer(train(made, tmp_path, step)) for step in range(2)]
    one.answer(Checkpoint(fence=FENCE, directory=str(tmp_path / "c"), ledger_step=2))
    found.append(one.answer(train(made, tmp_path, 2)))
    resumed = Session()
    resumed.answer(start(config=settings, checkpoint_dir=str(tmp_path / "c")))
    again = resumed.answer(train(made, tmp_path, 2))
    values = [answer.metrics["reference_kl/all/mean"] for answer in (*found, again) if isinstance(answer, Trained)]
    assert values[0] == 0.0
    assert values[1] > 0.0
    assert values[3] == values[2] > 0.0


def test_a_figure_that_is_no_number_is_said(
    session: Session, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The coordinator leaves it out of the rows and makes it an event: dropped here, a diverged job would look healthy."""
    figures = {"loss/mean": math.nan, "optim/grad_norm": math.inf, "optim/applied": 0.0}
    monkeypatch.setattr(step, "take_step", lambda *_: figures)
    answer = session.answer(train(made, tmp_path, 0))
    assert isinstance(answer, Trained)
    told = ANSWERS.validate_json(process._line(answer))
    assert isinstance(told, Trained)
    assert math.isnan(told.metrics["loss/mean"])
    assert told.metrics["optim/grad_norm"] == math.inf


@pytest.mark.parametrize("kind", ["train", "snapshot", "checkpoint", "evaluate", "log", "stop", "start"])
def test_another_fence_is_refused_whatever_it_asks(
    session: Session, made: ModuleType, tmp_path: Path, start: Callable[..., Start], kind: str
) -> None:
    requests = {
        "train": train(made, tmp_path, 0, fence=8),
        "snapshot": Snapshot(fence=8, directory=str(tmp_path / "v"), canary_ids=()),
        "checkpoint": Checkpoint(fence=8, directory=str(tmp_path / "c"), ledger_step=0),
        "evaluate": EVALUATE.model_copy(update={"fence": 8}),
        "log": Log(fence=8, step=0, at=0.0, metrics={}),
        "stop": Stop(fence=8),
        "start": start(fence=8),
    }
    assert refused(session.answer(requests[kind])) == ("wrong_fence", False)
    assert isinstance(session.answer(train(made, tmp_path, 0)), Trained)


@pytest.mark.parametrize("step", [-1, 1, 5])
def test_only_the_next_step_is_trained(session: Session, made: ModuleType, tmp_path: Path, step: int) -> None:
    assert refused(session.answer(train(made, tmp_path, 0).model_copy(update={"step": step}))) == ("wrong_step", False)
    assert isinstance(session.answer(train(made, tmp_path, 0)), Trained)
    assert refused(session.answer(train(made, tmp_path, 0))) == ("wrong_step", False)


def test_a_wrong_digest_is_refused_and_changes_nothing(session: Session, made: ModuleType, tmp_path: Path) -> None:
    assert refused(session.answer(train(made, tmp_path, 0, batch_digest="00"))) == ("bad_batch", False)
    assert isinstance(session.answer(train(made, tmp_path, 0)), Trained)


def test_a_ledger_that_disagrees_is_refused(session: Session, tmp_path: Path) -> None:
    answer = session.answer(Checkpoint(fence=FENCE, directory=str(tmp_path / "c"), ledger_step=1))
    assert refused(answer) == ("wrong_step", False)
    assert not (tmp_path / "c").exists()


def test_work_before_start_and_a_second_start_are_refused(session: Session, start: Callable[..., Start]) -> None:
    assert refused(Session().answer(EVALUATE)) == ("not_started", False)
    assert refused(session.answer(start())) == ("already_started", False)


@pytest.mark.parametrize("prompts", [((),), ((32,),), ((-1,),)])
def test_prompts_outside_the_vocabulary_are_refused(session: Session, prompts: tuple[tuple[int, ...], ...]) -> None:
    assert refused(session.answer(EVALUATE.model_copy(update={"prompts": prompts}))) == ("bad_prompts", False)


def test_every_prompt_needs_a_limit(session: Session) -> None:
    assert refused(session.answer(EVALUATE.model_copy(update={"max_new_tokens": (4,)}))) == ("bad_limits", False)


def test_a_start_that_cannot_be_is_fatal(start: Callable[..., Start], tmp_path: Path) -> None:
    assert refused(Session().answer(start(model_dir=str(tmp_path)))) == ("bad_model", True)
    assert refused(Session().answer(start(checkpoint_dir=str(tmp_path)))) == ("bad_checkpoint", True)


def test_a_disk_that_refuses_is_not_the_end(session: Session, made: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for request in (
        Snapshot(fence=FENCE, directory=str(tmp_path / "file" / "v1"), canary_ids=()),
        Checkpoint(fence=FENCE, directory=str(tmp_path / "file" / "c"), ledger_step=0),
    ):
        assert refused(session.answer(request)) == ("disk", False)
    assert isinstance(session.answer(train(made, tmp_path, 0)), Trained)


def test_what_nobody_expected_is_fatal_and_in_words(
    session: Session, made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(checkpoint, "write", broken)
    answer = session.answer(Checkpoint(fence=FENCE, directory=str(tmp_path / "c"), ledger_step=0))
    assert answer == Failed(fence=FENCE, code="internal", message="RuntimeError: out of memory", fatal=True)
    assert "out of memory" in capsys.readouterr().err


def test_commit_points_come_in_order(start: Callable[..., Start], made: ModuleType, tmp_path: Path) -> None:
    seen: list[str] = []
    one = Session(reached=seen.append)
    one.answer(start())
    one.answer(train(made, tmp_path, 0))
    one.answer(Snapshot(fence=FENCE, directory=str(tmp_path / "v1"), canary_ids=()))
    one.answer(Checkpoint(fence=FENCE, directory=str(tmp_path / "c"), ledger_step=1))
    assert tuple(seen) == crash_point.COMMIT_POINTS


def test_the_model_directory_may_go_after_start(start: Callable[..., Start], tiny: Path, tmp_path: Path, made: ModuleType) -> None:
    """A snapshot needs its configuration files: without them it fails in words and the learner lives."""
    copy = Path(shutil.copytree(tiny, tmp_path / "copy"))
    one = Session()
    one.answer(start(model_dir=str(copy)))
    shutil.rmtree(copy)
    answer = one.answer(Snapshot(fence=FENCE, directory=str(tmp_path / "v1"), canary_ids=()))
    assert refused(answer) == ("bad_model", False)
    assert isinstance(one.answer(train(made, tmp_path, 0)), Trained)


@pytest.mark.parametrize("text", ["", "learner.ready", "learner.ready:0", "learner.ready:x", "nowhere:1"])
def test_a_crash_point_must_exist(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME:COUNT"):
        crash_point.parse(text)


def test_a_crash_point_fires_once_at_its_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fired: list[int] = []
    monkeypatch.setattr("os.kill", lambda _, number: fired.append(number))
    point = crash_point.parse("learner.trained:2")
    for name in ("learner.ready", "learner.trained", "learner.ready", "learner.trained", "learner.trained"):
        point.reached(name)
    assert fired == [9]
    for _ in range(3):
        crash_point.CrashPoint().reached("learner.ready")
    assert fired == [9]
