"""docker-compose.yml holds to the Compose schema, and every command and variable in it is one that our programs know."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
BIN = Path(sys.executable).parent
OURS = {name: service for name, service in COMPOSE["services"].items() if "build" in service}


def test_schema() -> None:
    """The file is a Compose file."""
    schema = json.loads((ROOT / "tests/data/compose/compose_spec.json").read_text())
    jsonschema.Draft7Validator(schema).validate(COMPOSE)


@pytest.mark.parametrize("name", OURS)
def test_commands_are_ours(name: str) -> None:
    """Each command's program, sub-command and options exist."""
    program, verb, *rest = OURS[name]["command"]
    env = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "COLUMNS": "200", "TERM": "dumb"}
    shown = subprocess.run([BIN / program, verb, "--help"], capture_output=True, text=True, check=True, env=env).stdout
    options = [word for word in rest if word.startswith("--")]
    assert options
    for option in options:
        assert re.search(rf"{re.escape(option)}\b", shown), f"{program} {verb} knows no {option}"


@pytest.mark.parametrize("name", OURS)
def test_variables_are_read(name: str) -> None:
    """Each ECHO2_ variable is read by a settings class."""
    from coordinator.config import Settings

    known = {f"ECHO2_{field.upper()}" for field in Settings.model_fields}
    known |= set(re.findall(r"ECHO2_[A-Z_]+", (ROOT / "worker_node/config.py").read_text()))
    assert set(OURS[name]["environment"]) <= known


def test_containerfile_copies_every_package() -> None:
    """A package that the wheel holds but the image does not would break every container."""
    text = (ROOT / "Containerfile").read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    packages = re.search(r"packages = \[([^\]]+)\]", pyproject)
    assert packages
    for package in re.findall(r'"(\w+)"', packages[1]):
        assert f"COPY {package} {package}" in text


def test_serves_as_composed(tmp_path: Path) -> None:
    """The coordinator's command line starts as written (with paths and port of this test)."""
    command = [str(BIN / "echo2"), *OURS["coordinator"]["command"][1:]]
    command[command.index("--data-dir") + 1] = str(tmp_path / "data")
    command[command.index("--port") + 1] = "0"
    command[command.index("--host") + 1] = "127.0.0.1"
    command[command.index("--root") + 1] = str(tmp_path)
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env={"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        process.terminate()
        process.communicate(timeout=30)
    assert line.startswith("coordinator at http://127.0.0.1:")
    assert process.returncode == 0
