"""Packages for verifiers itself that take several turns: tools with state, stops, and an environment that asks back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments.base import EnvironmentBroken, Scores
from coordinator.environments.episodes import look
from coordinator.environments.rendering import Renderer
from coordinator.environments.replay import PlayLimits, Replay
from coordinator.environments.verifiers_rollouts import VerifiersRollouts
from coordinator.environments.verifiers_tasks import Verifiers
from coordinator.service.ports import PlayedTurn

SHOP = '''
import verifiers.v1 as vf

class ShopState(vf.State):
    spent: int = 0

class ShopData(vf.TaskData):
    goal: int = 0

class Shop(vf.Toolset[vf.ToolsetConfig, ShopState]):
    TOOL_PREFIX = "shop"

    async def setup_task(self, task):
        self.goal = task.goal

    @vf.tool
    def buy(self, item: str, count: int = 1) -> str:
        """Buy some items; each costs as much as its name has letters."""
        if item == "none":
            raise ValueError("sold out")
        self.state.spent += len(item) * count
        return f"spent {self.state.spent} of {self.goal}"

class ShopTask(vf.Task[ShopData, ShopState]):
    @classmethod
    def toolsets(cls, config):
        return [Shop(vf.ToolsetConfig())]

    @vf.stop
    async def broke(self, trace: vf.Trace) -> bool:
        return trace.state.spent > self.data.goal

    @vf.reward(weight=2.0)
    async def exact(self, trace: vf.Trace) -> float:
        return float(trace.state.spent == self.data.goal)

    @vf.metric
    async def stopped(self, trace: vf.Trace) -> float:
        return float(trace.stop_condition == "broke")
{more}
class ShopTaskset(vf.Taskset[ShopTask, vf.TasksetConfig]):
    def load(self):
        yield ShopTask(ShopData(prompt="Spend 4", system_prompt="You shop.", goal=4), self.config.task)

__all__ = ["ShopTaskset"]
'''
QUIZ = """
import verifiers.v1 as vf

class QuizData(vf.TaskData):
    answers: list[str] = []

class QuizTask(vf.Task[QuizData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        said = [m.content for m in trace.assistant_messages]
        return sum(a == b for a, b in zip(said, self.data.answers)) / len(self.data.answers)

class QuizTaskset(vf.Taskset[QuizTask, vf.TasksetConfig]):
    def load(self):
        yield QuizTask(QuizData(prompt="1 + 1?", answers=["2", "4", "8"]), self.config.task)

class QuizConfig(vf.EnvConfig):
    student: vf.AgentConfig = vf.AgentConfig()
{more}
class QuizEnv(vf.Env[QuizConfig]):
    async def run(self, task, agents):
        async with agents.student.interaction(task) as talk:
            segment = await talk.turn()
            for question in ("2 + 2?", "4 + 4?"):
                if segment.terminated:
                    break
                segment = await talk.turn(f"You said {{segment.last_reply}}. {{question}}")

    async def finalize(self, task, episode):
        episode.traces[0].record_metric("asked", 3.0)

__all__ = ["QuizTaskset", "QuizEnv"]
"""
TEMPLATE = (
    "{% if tools %}<|tools|>{{ tools | map(attribute='function') | map(attribute='name') | join(' ') }}\n{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes an importable package, under a name of its own."""
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("the extra verifiers is not installed")
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(name: str, source: str, more: str = "") -> str:
        (folder / f"{name}.py").write_text(source.replace("{more}", more).replace("{{", "{").replace("}}", "}"))
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # type: ignore[arg-type]
        sys.modules.pop(name)
        return name

    return make


class Table:
    """Plays a package with the model's answers given."""

    def __init__(self, directory: Path, made: ModuleType, environment: VerifiersRollouts) -> None:
        model = made.write_model(directory / "m", chat_template=TEMPLATE)
        self.renderer = Renderer(model, system_prompt=None, use_chat_template=False)
        self._made = made
        self._environment = environment

    def play(self, *texts: str, max_turns: int = 6) -> tuple[Scores | None, str]:
        """The scores, if it came to them, and the whole record as text."""
        turns: list[PlayedTurn] = []
        opening: tuple[int, ...] | None = None
        for text in (None, *texts):
            if text is not None:
                turns.append(PlayedTurn(tuple(self._made.ids_of(text)), "stop"))
            replay = Replay(self.renderer, turns, PlayLimits(max_turns, 2000), tool_parser="hermes", prompt_ids=opening)
            said = look(self._environment, "train", 0, replay, seed=0, limit_s=10.0)
            if isinstance(said, Scores):
                return said, self._words(opening, turns)
            if opening is None:
                opening = said.token_ids
            else:
                turns[-1] = replace(turns[-1], placed=said.token_ids)
        return None, self._words(opening, turns)

    def _words(self, opening: tuple[int, ...] | None, turns: list[PlayedTurn]) -> str:
        ids = [*(opening or ()), *(token for turn in turns for token in (*turn.token_ids, *turn.placed))]
        return self.renderer.decode(ids, specials=True)


def call(item: str, count: int = 1) -> str:
    return f'<tool_call>{{"name": "shop_buy", "arguments": {{"item": "{item}", "count": {count}}}}}</tool_call>'


def outcome(scores: Scores | None) -> tuple[str, float | None]:
    assert scores is not None
    return scores.outcomes[0].kind, scores.outcomes[0].reward


def test_tools_are_called_and_their_state_is_the_rollouts(tmp_path: Path, made: ModuleType, package: Callable[..., str]) -> None:
    """Each look at the record runs them anew, from an empty state; a failed call is told to the model."""
    table = Table(tmp_path, made, VerifiersRollouts(package("shop_a", SHOP), options={}))
    scores, record = table.play(call("none"), call("ab", 2), "done")
    assert outcome(scores) == ("scored", 2.0)
    assert "<|tools|>shop_buy\n<|system|>You shop.<eos><|user|>Spend 4<eos><|assistant|>" in record
    assert "sold out" in record
    assert "<|tool|>spent 4 of 4<eos><|assistant|>done<eos>" in record
    assert scores is not None
    assert scores.metrics == {"exact": 1.0, "stopped": 0.0, "turns": 3.0}


def test_stops_and_limits_end_a_rollout_which_is_scored_as_it_is(
    tmp_path: Path, made: ModuleType, package: Callable[..., str]
) -> None:
    table = Table(tmp_path, made, VerifiersRollouts(package("shop_b", SHOP), options={}))
    scores, _ = table.play(call("abcdef"), "never asked")
    assert outcome(scores) == ("scored", 0.0)
    assert scores is not None
    assert scores.metrics["stopped"] == 1.0
    scores, _ = table.play(call("abcd"), "never asked", max_turns=1)
    assert outcome(scores) == ("scored", 2.0)


def test_what_is_no_call_is_an_answer(tmp_path: Path, made: ModuleType, package: Callable[..., str]) -> None:
    table = Table(tmp_path, made, VerifiersRollouts(package("shop_c", SHOP), options={}))
    assert outcome(table.play('<tool_call>{"name": </tool_call>')[0]) == ("scored", 0.0)
    scores, record = table.play('<tool_call>{"name": "steal"}</tool_call>', "done")
    assert "error: unknown tool 'steal'" in record
    assert outcome(scores) == ("scored", 0.0)


def test_an_environment_of_the_package_asks_its_agent_back(tmp_path: Path, made: ModuleType, package: Callable[..., str]) -> None:
    table = Table(tmp_path, made, VerifiersRollouts(package("quiz_a", QUIZ), options={}))
    scores, record = table.play("2", "5", "8")
    assert outcome(scores) == ("scored", pytest.approx(2 / 3))
    assert "<|user|>You said 2. 2 + 2?<eos>" in record
    assert scores is not None
    assert scores.metrics == {"asked": 3.0, "right": pytest.approx(2 / 3), "turns": 3.0}
    assert table.play("2", "4")[0] is None


RUNTIME = """
    async def setup(self, trace, runtime: vf.Runtime) -> None:
        pass
"""
INTERCEPT = """
    @vf.intercept
    async def look(self, request: vf.Request) -> None:
        return None
"""


@pytest.mark.parametrize(
    ("name", "source", "more", "words"),
    [
        ("bad_a", SHOP, RUNTIME, "a runtime for its set-up"),
        ("bad_b", SHOP, INTERCEPT, "interception of requests"),
        ("bad_c", SHOP, "\n    NEEDS_CONTAINER = True\n", "a container"),
        ("bad_d", QUIZ, "    judge: vf.AgentConfig = vf.AgentConfig()\n", r"2 agents \(student, judge\)"),
    ],
)
def test_what_one_agent_in_process_cannot_serve_is_refused(
    package: Callable[..., str], name: str, source: str, more: str, words: str
) -> None:
    with pytest.raises(EnvironmentBroken, match=words):
        VerifiersRollouts(package(name, source, more), options={})


def test_tools_need_turns(package: Callable[..., str]) -> None:
    with pytest.raises(EnvironmentBroken, match=r"needs tools.*environment.max_turns \(8, say\)"):
        Verifiers(package("shop_d", SHOP), options={}, limit_s=10)


@pytest.mark.long
async def test_in_the_jail(tmp_path: Path, made: ModuleType, package: Callable[..., str]) -> None:
    """verifiers, its tools and MCP's library load and run there, within the memory that a child has."""
    environment: dict[str, Any] = {"type": f"verifiers:{package('shop_e', SHOP)}", "max_turns": 4}
    plane = made.make_plane(made.write_model(tmp_path / "jailed", chat_template=TEMPLATE), environment=environment)
    await plane.start()
    (prompt,) = await plane.prompts("train", [0])
    turns = [PlayedTurn(tuple(made.ids_of(call("abcd"))), "stop")]
    said = await plane.play("train", 0, prompt.token_ids, turns)
    turns = [replace(turns[0], placed=said.token_ids), PlayedTurn(tuple(made.ids_of("done")), "stop")]
    graded = await plane.play("train", 0, prompt.token_ids, turns)
    assert (graded.outcome, graded.reward) == ("scored", 2.0)
    await plane.close()
