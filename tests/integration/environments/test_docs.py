"""docs/environments.md: every section of a job file in it is accepted, every function in it runs."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.base import Completion, EnvironmentSpec, Scores
from coordinator.environments.build import build_environment
from coordinator.environments.episodes import is_episodic, look
from coordinator.environments.rendering import Renderer
from coordinator.environments.replay import Asked, PlayLimits, Replay
from coordinator.service.ports import PlayedTurn
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


def test_the_rollout_is_played(tmp_path: Path, made: ModuleType) -> None:
    """It calls its tool when the model does, and scores the answer."""
    code = tmp_path / "shop.py"
    code.write_text(next(function for function in FUNCTIONS if "async def rollout" in function))
    rows = str(made.write_rows(tmp_path / "t.jsonl", [{"prompt": "price?", "answer": "3 coins"}]))
    spec = EnvironmentSpec("python:shop.py:rollout", 0, "", train=rows, code=str(code), max_turns=3)
    environment = build_environment(spec)
    template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    renderer = Renderer(made.write_model(tmp_path / "m", chat_template=template), system_prompt=None, use_chat_template=False)
    turns: list[PlayedTurn] = []
    for text in (None, '<tool_call>{"name": "price", "arguments": {"item": "egg"}}</tool_call>', "3 coins"):
        turns += [] if text is None else [PlayedTurn(tuple(made.ids_of(text)), "stop")]
        assert is_episodic(environment)
        said = look(environment, "train", 0, Replay(renderer, turns, PlayLimits(3, 500), tool_parser="hermes"), seed=0, limit_s=9)
        if turns and isinstance(said, Asked):
            turns[-1] = replace(turns[-1], placed=said.token_ids)
            assert renderer.decode(said.token_ids) == "3 coins"
    assert isinstance(said, Scores)
    assert said.outcomes[0].reward == 1.0
