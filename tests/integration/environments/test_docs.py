"""docs/environments.md: every section of a job file in it is accepted, every function in it runs."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.base import Completion, EnvironmentSpec
from coordinator.environments.build import build_environment
from coordinator.wire.environment import EnvironmentConfig

TEXT = (Path(__file__).parents[3] / "docs" / "environments.md").read_text()
SECTIONS = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
FUNCTIONS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("section", SECTIONS)
def test_every_section_is_accepted(section: str) -> None:
    EnvironmentConfig.model_validate(tomllib.loads(section)["environment"])


def test_every_function_scores(tmp_path: Path, made: ModuleType) -> None:
    """On a row, as the page says."""
    code = tmp_path / "rewards.py"
    code.write_text("\n\n".join(FUNCTIONS))
    rows = str(made.write_rows(tmp_path / "t.jsonl", [{"prompt": "2+2?", "answer": "4"}]))
    found = {}
    for name in re.findall(r"^def (\w+)", code.read_text(), re.MULTILINE):
        spec = EnvironmentSpec(f"python:rewards.py:{name}", 0, "", train=rows, code=str(code))
        outcomes = build_environment(spec).score("train", 0, [Completion([1], text) for text in ("4", "please")]).outcomes
        found[name] = [one.reward for one in outcomes]
    assert found == {
        "accuracy": [1.0, 0.0],
        "compute_score": [1.0, 0.0],
        "best_of_group": [1.0, 0.0],
        "brevity": [1 / 2, 1 / 7],
        "politeness": [0.0, 1.0],
    }
