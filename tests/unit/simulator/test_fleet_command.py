"""`echo2 simulate` as it is typed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coordinator.cli import app
from coordinator.commands.simulate import SimulationStopped, run

SMALL = """
name = "two workers"
hours = 0.2
[job]
group_size = 2
groups_per_step = 2
staleness = 2
train_s = 5.0
[snapshot]
keyframe_bytes = 1e6
load_s = 1.0
[[fleet]]
name = "a"
count = 2
completions_per_second = 0.6
slots = 2
up_mbps = 100
down_mbps = 100
usd_per_hour = 0.5
"""


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_json_and_files_say_the_same(scenario: Path, tmp_path: Path) -> None:
    """`--json` prints what `--out` writes; the plot is a PNG; --seed replaces the file's."""
    reply = CliRunner().invoke(app, ["simulate", str(scenario), "--json", "--seed", "7", "--out", str(tmp_path / "out")])
    assert reply.exit_code == 0, reply.output
    written = json.loads((tmp_path / "out" / "result.json").read_text())
    assert written["seed"] == 7
    assert written["steps"] > 50
    assert (tmp_path / "out" / "fleet.png").read_bytes().startswith(b"\x89PNG")
    assert "steps in" in (tmp_path / "out" / "summary.txt").read_text()


def test_a_wrong_key_is_named(scenario: Path) -> None:
    """One line, with the file."""
    scenario.write_text(SMALL.replace("slots", "slotz"))
    with pytest.raises(SimulationStopped, match=r"small.toml: there is no key fleet.0.slotz"):
        run(scenario, seed=None, out=None, as_json=False)


def test_a_folder_that_cannot_be_written(scenario: Path) -> None:
    """Named, with the reason."""
    with pytest.raises(SimulationStopped, match=r"small.toml/out cannot be written: Not a directory"):
        run(scenario, seed=None, out=scenario / "out", as_json=False)


def test_the_summary_comes_in_words(scenario: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On standard output."""
    run(scenario, seed=None, out=None, as_json=False)
    assert "two workers:" in capsys.readouterr().out


def test_serving_does_not_load_the_simulator() -> None:
    """The command line knows the command and nothing of the simulator until it is called."""
    words = "import sys, coordinator.cli, coordinator.app; print(any(name.split('.')[0] == 'simulator' for name in sys.modules))"
    shown = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "False"
