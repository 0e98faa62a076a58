"""One behavioural suite over the built-in environments and an author's: what every environment promises."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

from coordinator.environments.base import Completion, Environment, EnvironmentSpec
from coordinator.environments.build import build_environment

REWARD = "def reward(completions, answer, **rest):\n    return [float(c.strip() == a) for c, a in zip(completions, answer)]\n"


@dataclass(frozen=True)
class Case:
    """An environment, how to build it again, and how to answer its prompts."""

    environment: Environment
    again: Callable[[], Environment]
    solve: Callable[[str], str]


def _digits(spec: EnvironmentSpec) -> Case:
    return Case(build_environment(spec), lambda: build_environment(spec), lambda prompt: "".join(sorted(prompt[:-1])))


@pytest.fixture(params=["digit_sort", "math", "python"])
def case(request: pytest.FixtureRequest, tmp_path: Path, made: ModuleType) -> Case:
    if request.param == "digit_sort":
        return _digits(EnvironmentSpec("digit_sort", 3, str(tmp_path)))
    rows = [{"prompt": f"{number} + {number}", "answer": str(2 * number)} for number in range(20)]
    files = {
        "train": str(made.write_rows(tmp_path / "train.jsonl", rows)),
        "eval": str(made.write_rows(tmp_path / "eval.jsonl", rows[:5])),
    }
    code = tmp_path / "rewards.py"
    code.write_text(REWARD)
    kind = "math" if request.param == "math" else "python:rewards.py:reward"
    spec = EnvironmentSpec(kind, 3, str(tmp_path), code=str(code), **files)
    return Case(build_environment(spec), lambda: build_environment(spec), lambda prompt: str(2 * int(prompt.split()[0])))


@pytest.mark.parametrize("split", ["train", "eval"])
def test_right_is_one_wrong_is_zero_in_order(case: Case, split: str) -> None:
    """Also when right and wrong are mixed."""
    for index in range(5):
        prompt = case.environment.prompt(split, index)
        assert isinstance(prompt, str)
        right = Completion([1], case.solve(prompt))
        wrong = Completion([1], "x")
        scores = case.environment.score(split, index, [right, wrong, wrong, right])
        assert [(one.kind, one.reward) for one in scores.outcomes] == [("scored", value) for value in (1.0, 0.0, 0.0, 1.0)]
        assert not scores.is_spent


@pytest.mark.parametrize("split", ["train", "eval"])
def test_white_space_around_the_answer_does_not_matter(case: Case, split: str) -> None:
    """A completion may end in a line break."""
    prompt = case.environment.prompt(split, 1)
    assert isinstance(prompt, str)
    (outcome,) = case.environment.score(split, 1, [Completion([1], f" {case.solve(prompt)}\n")]).outcomes
    assert outcome.reward == 1.0


def test_no_completions_give_no_outcomes(case: Case) -> None:
    """An empty request is no error."""
    assert case.environment.score("train", 0, []).outcomes == []


def test_prompts_are_a_function_of_split_and_index(case: Case) -> None:
    """A second process sees the same prompts, in any order."""
    again = case.again()
    for split in ("train", "eval"):
        forward = [case.environment.prompt(split, index) for index in range(5)]
        backward = [again.prompt(split, index) for index in reversed(range(5))]
        assert forward == backward[::-1]


@pytest.mark.parametrize("split", ["train", "eval"])
def test_sizes_are_kept(case: Case, split: str) -> None:
    """The last prompt exists, the next and the one before the first do not."""
    size = case.environment.size(split)
    last = 10**12 if size is None else size - 1
    assert case.environment.prompt(split, last)
    for index in [-1] if size is None else [-1, size]:
        with pytest.raises(IndexError, match=f"prompt {index} "):
            case.environment.prompt(split, index)


def test_the_demo_task_has_1024_distinct_held_out_problems(tmp_path: Path) -> None:
    """And an endless train split."""
    environment = build_environment(EnvironmentSpec("digit_sort", 0, str(tmp_path)))
    assert environment.size("train") is None
    assert environment.size("eval") == 1024
    assert len({environment.prompt("eval", index) for index in range(1024)}) == 1024


def test_without_an_eval_file_there_is_no_evaluation(tmp_path: Path, made: ModuleType) -> None:
    """Size 0."""
    train = made.write_rows(tmp_path / "t.jsonl", [{"prompt": "1", "answer": 1}])
    assert build_environment(EnvironmentSpec("math", 0, "", train=str(train))).size("eval") == 0
