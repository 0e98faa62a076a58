"""The verifiers package itself: a taskset written as its documentation shows one, loaded and scored by it."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments import verifiers_tasks
from coordinator.environments.base import Completion, EnvironmentBroken
from coordinator.environments.verifiers_tasks import Verifiers

TASKSET = """
import verifiers.v1 as vf


class WordData(vf.TaskData):
    word: str = ""


class WordConfig(vf.TasksetConfig):
    count: int = 6


class WordTask(vf.Task[WordData]):
    @vf.reward(weight=2.0)
    async def backwards(self, trace: vf.Trace) -> float:
        if trace.last_reply == "raise":
            raise ValueError("no word")
        while trace.last_reply == "hang":
            pass
        return float(trace.last_reply == self.data.word[::-1])

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))
{more}

class WordTaskset(vf.Taskset[WordTask, WordConfig]):
    def load(self):
        for n in range(self.config.count):
            word = "abcdefgh"[n : n + 3]
            yield WordTask(WordData(prompt=f"Reverse {{word}}", word=word), self.config.task)


__all__ = ["WordTaskset"]
"""
RUNTIME = """
    @vf.reward
    async def checked(self, trace: vf.Trace, runtime: vf.Runtime) -> float:
        return 1.0
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an importable package of the taskset, under a name of its own."""
    if importlib.util.find_spec("verifiers") is None:
        pytest.skip("the extra verifiers is not installed")
    folder = tmp_path / "installed"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))

    def make(name: str, more: str = "") -> str:
        (folder / f"{name}.py").write_text(TASKSET.format(more=more))
        importlib.invalidate_caches()
        monkeypatch.setitem(sys.modules, name, sys.modules.get(name))  # type: ignore[arg-type]
        sys.modules.pop(name)
        return name

    return make


def outcomes(environment: Verifiers, *texts: str) -> list[tuple[str, float | None]]:
    scores = environment.score("train", 1, [Completion([1], text) for text in texts])
    return [(one.kind, one.reward) for one in scores.outcomes]


def test_tasks_are_scored_by_their_own_rewards(package: Any) -> None:
    """The weight counts; rewards and metrics are metrics; options reach the taskset."""
    environment = Verifiers(package("words_a"), options={"count": 4}, limit_s=10)
    assert (environment.size("train"), environment.size("eval")) == (4, 0)
    assert environment.prompt("train", 1) == "Reverse bcd"
    scores = environment.score("train", 1, [Completion([1], "dcb"), Completion([1], "d")])
    assert [one.reward for one in scores.outcomes] == [2.0, 0.0]
    assert scores.metrics == {"backwards": 0.5, "length": 2.0}


def test_errors_and_time_outs_are_not_zeros(package: Any) -> None:
    environment = Verifiers(package("words_b"), options={}, limit_s=1.5)
    assert outcomes(environment, "raise", "hang", "dcb") == [("failed", None), ("timeout", None), ("scored", 2.0)]


def test_what_one_turn_cannot_serve_is_refused_by_name(package: Any) -> None:
    """verifiers itself leaves such a reward out, and the rest would look like a score."""
    with pytest.raises(EnvironmentBroken, match="needs a runtime for its rewards"):
        Verifiers(package("words_c", RUNTIME), options={}, limit_s=10)
    with pytest.raises(EnvironmentBroken, match="needs a container"):
        Verifiers(package("words_d", "\n    NEEDS_CONTAINER = True\n"), options={}, limit_s=10)


def test_a_package_or_option_that_does_not_exist_is_refused(package: Any) -> None:
    with pytest.raises(EnvironmentBroken, match="'no_such_words' could not be loaded"):
        Verifiers("no_such_words", options={}, limit_s=10)
    with pytest.raises(EnvironmentBroken, match=r"with options \{'counts': 3\}"):
        Verifiers(package("words_e"), options={"counts": 3}, limit_s=10)


def test_without_the_package_the_words_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(verifiers_tasks.importlib, "import_module", absent)
    with pytest.raises(EnvironmentBroken, match=r"needs the package verifiers .*pip install 'echo2\[verifiers\]'"):
        Verifiers("words", options={}, limit_s=10)


@pytest.mark.long
async def test_in_the_jail(tmp_path: Path, made: ModuleType, package: Any) -> None:
    """It loads and scores there, within the memory that a child has."""
    plane = made.make_plane(made.write_model(tmp_path / "m"), environment={"type": f"verifiers:{package('words_f')}"})
    info = await plane.start()
    assert (info.train_prompts, info.eval_prompts) == (6, 0)
    (prompt,) = await plane.prompts("train", [1])
    assert prompt.text == "Reverse bcd"
    graded = await plane.grade("train", 1, [made.ids_of("dcb"), made.ids_of("x")])
    assert [(one.outcome, one.reward) for one in graded] == [("scored", 2.0), ("scored", 0.0)]
    await plane.close()
