"""The math environment on GSM8K: every reference answer is right, every perturbed one wrong."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from coordinator.environments.base import Completion, Environment, EnvironmentSpec
from coordinator.environments.build import build_environment

DATA = Path(__file__).parents[2] / "data" / "gsm8k"


@pytest.fixture(scope="module")
def environment() -> Environment:
    spec = EnvironmentSpec("math", 0, "", train=str(DATA / "train.jsonl"), eval=str(DATA / "test.jsonl"))
    return build_environment(spec)


@pytest.fixture(scope="module")
def answers() -> list[str]:
    return [json.loads(line)["answer"] for line in (DATA / "test.jsonl").read_text().splitlines()]


def rewards(environment: Environment, texts: list[str]) -> list[float | None]:
    return [environment.score("eval", index, [Completion([1], text)]).outcomes[0].reward for index, text in enumerate(texts)]


def test_the_whole_test_split_is_there(environment: Environment) -> None:
    """1,319 rows; the training split is cut to 500."""
    assert environment.size("eval") == 1319
    assert environment.size("train") == 500
    assert str(environment.prompt("eval", 0)).startswith("Janet")


def test_all_reference_solutions_score_one(environment: Environment, answers: list[str]) -> None:
    """The worked solution as the completion."""
    assert rewards(environment, answers) == [1.0] * 1319


@pytest.mark.parametrize(
    "dress",
    ["The answer is {}.", r"so \boxed{{{}}}", "#### {}", "#### ${}.00", "Hence 7 and then, in all, {} dollars", "{}.0 apples"],
)
def test_the_number_alone_scores_one_in_any_dress(environment: Environment, answers: list[str], dress: str) -> None:
    """Prose, box, hashes, currency and trailing zeros."""
    finals = [answer.rsplit("####", 1)[1].strip() for answer in answers]
    assert rewards(environment, [dress.format(final) for final in finals]) == [1.0] * 1319


def _perturbed(answer: str, change: int) -> str:
    head, _, final = answer.rpartition("####")
    return f"{head}#### {int(re.sub(r'[,$]', '', final)) + change}"


@pytest.mark.parametrize("change", [1, -1, 10, 1000003])
def test_perturbed_answers_score_zero(environment: Environment, answers: list[str], change: int) -> None:
    """The same solution with another last number."""
    assert rewards(environment, [_perturbed(answer, change) for answer in answers]) == [0.0] * 1319


def test_the_negated_and_the_scaled_answer_score_zero(environment: Environment, answers: list[str]) -> None:
    """Sign and scale count (zero answers aside, which negate to themselves)."""
    finals = [int(re.sub(r"[,$]", "", answer.rsplit("####", 1)[1])) for answer in answers]
    assert [r for r, f in zip(rewards(environment, [str(-f) for f in finals]), finals, strict=True) if f] == [0.0] * sum(
        map(bool, finals)
    )
    assert [r for r, f in zip(rewards(environment, [f"{f}.5" for f in finals]), finals, strict=True)] == [0.0] * 1319
