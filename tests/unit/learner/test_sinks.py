"""Where figures go: whole lines, once a step, and no sink that costs one."""

from __future__ import annotations

import json
import resource
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from coordinator.learner import sinks
from coordinator.learner.errors import SinkMissing
from coordinator.wire.job import JobConfig


def config(made: ModuleType, *names: str) -> JobConfig:
    plain: JobConfig = made.config()
    return JobConfig.model_validate(plain.model_dump() | {"metrics": {"sinks": names}})


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / sinks.FILE).read_text().splitlines()]


def test_a_line_a_step(made: ModuleType, tmp_path: Path) -> None:
    opened = sinks.open_sinks(tmp_path / "job", "job-1", config(made))
    assert opened.logged == 0
    opened.write(0, 100.5, {"entropy": 1.25, "reward/all/mean": 0.5})
    opened.write(1, 101.0, {"entropy": 1.0})
    expected = [{"step": 0, "at": 100.5, "entropy": 1.25, "reward/all/mean": 0.5}, {"step": 1, "at": 101.0, "entropy": 1.0}]
    assert lines(tmp_path / "job") == expected  # there before anybody closes it
    opened.close()
    again = sinks.open_sinks(tmp_path / "job", "job-1", config(made))
    assert again.logged == 2
    again.write(2, 102.0, {})
    again.close()
    assert lines(tmp_path / "job") == [*expected, {"step": 2, "at": 102.0}]


@pytest.mark.parametrize("tail", [b'{"step": 1, "at": 2', b'{"step": 1}'])
def test_a_line_that_a_crash_cut_off_is_written_again(made: ModuleType, tmp_path: Path, tail: bytes) -> None:
    (tmp_path / sinks.FILE).write_bytes(b'{"step": 0, "at": 1.0}\n' + tail)
    opened = sinks.open_sinks(tmp_path, "job-1", config(made))
    assert opened.logged == 1
    opened.write(1, 2.0, {})
    opened.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]


@pytest.mark.parametrize("content", [b"not json\n", b"[1]\n", b"{}\n"])
def test_a_file_that_is_something_else_is_left_alone(
    made: ModuleType, tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / sinks.FILE).write_bytes(content)
    opened = sinks.open_sinks(tmp_path, "job-1", config(made))
    assert opened.logged is None  # not 0: the job's other sinks would get every step a second time
    opened.write(0, 1.0, {})
    opened.close()
    assert (tmp_path / sinks.FILE).read_bytes() == content
    assert "cannot be continued and is left out" in capsys.readouterr().err


def test_without_a_directory_nothing_is_written(made: ModuleType) -> None:
    opened = sinks.open_sinks(None, "job-1", config(made, "wandb"))
    opened.write(0, 1.0, {"entropy": 1.0})
    opened.close()


class Broken:
    """A sink whose service is gone."""

    def write(self, step: int, at: float, figures: Mapping[str, float]) -> None:
        raise ConnectionError("no route")

    def close(self) -> None:
        raise ConnectionError("no route")


def test_a_sink_that_fails_costs_nothing_but_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = sinks.Sinks({"wandb": Broken(), sinks.FILE: sinks.JsonLines(tmp_path / sinks.FILE)}, logged=0)
    both.write(0, 1.0, {})
    both.write(1, 2.0, {})
    both.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 1]
    assert capsys.readouterr().err.count("wandb failed at step 0") == 1
    sinks.Sinks({"wandb": Broken()}, logged=0).close()
    assert "wandb could not be closed: no route" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["tensorboard", "trackio", "wandb"])
def test_a_package_that_is_missing_is_named_with_its_extra(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard" if name == "tensorboard" else name, None)
    with pytest.raises(SinkMissing, match=rf"pip install 'echo2\[{name}\]'"):
        sinks.open_sinks(tmp_path, "job-1", config(made, name))


@pytest.mark.parametrize(("name", "place"), [("trackio", {"name": "job-1"}), ("wandb", {"id": "job-1", "name": "test"})])
def test_trackers_keep_a_jobs_place(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, place: dict[str, str]
) -> None:
    """Checked against the calls that both packages document; the packages themselves are not installed here."""
    seen: dict[str, Any] = {"logged": []}
    run = SimpleNamespace(
        log=lambda figures, step: seen["logged"].append((step, figures)), finish=lambda: seen.update(is_finished=True)
    )
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=lambda **given: seen.update(given) or run))  # type: ignore[func-returns-value]
    opened = sinks.open_sinks(tmp_path, "job-1", config(made, name))
    opened.write(4, 9.0, {"entropy": 1.0})
    opened.close()
    assert {key: seen[key] for key in place} == place
    assert (seen["project"], seen["resume"], seen["is_finished"]) == ("echo2", "allow", True)
    assert seen["config"]["name"] == "test"
    assert seen["logged"] == [(4, {"entropy": 1.0, "at": 9.0})]


def test_tensorboard_holds_the_scalars(made: ModuleType, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    opened = sinks.open_sinks(tmp_path, "job-1", config(made, "tensorboard"))
    for step in range(3):
        opened.write(step, 100.0 + step, {"reward/all/mean": 0.25 * step})
    opened.close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    found = [(event.step, event.value, event.wall_time) for event in events.Scalars("reward/all/mean")]
    assert found == [(0, 0.0, 100.0), (1, 0.25, 101.0), (2, 0.5, 102.0)]


@pytest.mark.parametrize("name", ["trackio", "wandb"])
def test_a_service_that_cannot_be_reached_at_the_start_costs_nothing_but_its_sink(
    made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    def init(**_: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setitem(sys.modules, name, SimpleNamespace(init=init))
    opened = sinks.open_sinks(tmp_path, "job-1", config(made, name))
    opened.write(0, 1.0, {})
    opened.close()
    assert [line["step"] for line in lines(tmp_path)] == [0]
    assert f"metrics.sinks {name} could not be opened and is left out: no route" in capsys.readouterr().err


def test_a_full_disk_leaves_whole_lines_and_the_next_step_is_tried(
    made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The file size limit of this process stands for the disk: the kernel writes as much as fits, then refuses."""
    opened = sinks.open_sinks(tmp_path, "job-1", config(made))
    opened.write(0, 1.0, {"entropy": 1.0})
    room = (tmp_path / sinks.FILE).stat().st_size + 10
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        opened.write(1, 2.0, {"entropy": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert "failed at step 1 and lacks that step" in capsys.readouterr().err
    opened.write(2, 3.0, {"entropy": 1.0})
    opened.close()
    assert [line["step"] for line in lines(tmp_path)] == [0, 2]
