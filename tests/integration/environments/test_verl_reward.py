"""Reward functions with verl's signature. Functions here are ours, so they run without the jail."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments.base import Completion, EnvironmentBroken, EnvironmentSpec, Scores
from coordinator.environments.build import build_environment
from coordinator.environments.datasets import Dataset
from coordinator.environments.verl_reward import VerlReward, is_verl

VERL_ROW = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "2 + 2?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"index": 7},
}
DONE = [Completion([5, 6], "four"), Completion([7], "4")]
Score = Callable[..., Scores]


@pytest.fixture
def score(tmp_path: Path, made: ModuleType) -> Score:
    def run(function: Callable[..., Any], row: dict[str, Any] = VERL_ROW) -> Scores:
        data = Dataset(made.write_rows(tmp_path / "rows.jsonl", [row]), prompt_column="prompt")
        return VerlReward({"train": data}, function, file_name="rewards.py", answer_column="answer").score("train", 0, DONE)

    return run


def kinds(scores: Scores) -> list[tuple[str, float | None]]:
    return [(one.kind, one.reward) for one in scores.outcomes]


def test_verls_own_row_reaches_the_function_one_completion_at_a_time(score: Score) -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        seen.append((data_source, solution_str, ground_truth, extra_info))
        return float(solution_str == ground_truth)

    assert kinds(score(compute_score)) == [("scored", 0.0), ("scored", 1.0)]
    assert seen == [("openai/gsm8k", text, "4", {"index": 7}) for text in ("four", "4")]


def test_a_dict_gives_its_score_and_metrics(score: Score) -> None:
    """Numbers are averaged over the completions; all is shown beside the rollout."""

    def compute_score(solution_str: str, ground_truth: str, **_: Any) -> dict[str, Any]:
        return {"score": 0.5, "acc": solution_str == ground_truth, "pred": solution_str}

    scores = score(compute_score)
    assert kinds(scores) == [("scored", 0.5), ("scored", 0.5)]
    assert scores.metrics == {"acc": 0.5}
    assert scores.outcomes[1].detail == "acc=True; pred=4"


def test_what_raises_or_returns_no_number_fails_alone(score: Score) -> None:
    """Its neighbour keeps its score; None does not apply."""

    def compute_score(solution_str: str, **_: Any) -> Any:
        if solution_str == "four":
            raise ValueError("no digits")
        return 1

    scores = score(compute_score)
    assert kinds(scores) == [("failed", None), ("scored", 1.0)]
    assert "ValueError: no digits" in scores.outcomes[0].detail
    assert not scores.is_spent
    assert kinds(score(lambda solution_str: None)) == [("unscored", None)] * 2
    assert kinds(score(lambda solution_str: "1")) == [("failed", None)] * 2
    assert kinds(score(lambda solution_str: float("nan"))) == [("failed", None)] * 2
    no_score = score(lambda solution_str: {"acc": 1.0})
    assert "without 'score' (it has: acc)" in no_score.outcomes[0].detail


def test_exit_and_memory_make_the_process_spent(score: Score) -> None:
    def compute_score(solution_str: str) -> float:
        raise SystemExit(1)

    scores = score(compute_score)
    assert kinds(scores) == [("failed", None)] * 2
    assert scores.is_spent


@pytest.mark.parametrize(
    ("row", "truth"),
    [
        ({"prompt": "q", "answer": "5"}, "5"),
        ({"prompt": "q", "reward_model": json.dumps({"ground_truth": "6"}), "answer": "5"}, "6"),
        ({"prompt": "q", "reward_model": "no json", "answer": "5"}, "5"),
        ({"prompt": "q"}, None),
    ],
)
def test_the_ground_truth_is_verls_or_the_answer_column(score: Score, row: dict[str, Any], truth: object) -> None:
    seen = []

    def compute_score(data_source: str, solution_str: str, ground_truth: Any) -> float:
        seen.append((data_source, ground_truth))
        return 1.0

    score(compute_score, row)
    assert seen == [("train", truth)] * 2


def test_an_async_function_is_awaited(score: Score) -> None:
    async def compute_score(solution_str: str) -> float:
        return float(len(solution_str))

    assert kinds(score(compute_score)) == [("scored", 4.0), ("scored", 1.0)]


def test_a_demand_verl_never_meets_is_refused_at_the_start(score: Score) -> None:
    with pytest.raises(EnvironmentBroken, match="demands 'tokenizer' too"):
        score(lambda solution_str, tokenizer: 1.0)


def test_the_signature_decides(tmp_path: Path, made: ModuleType) -> None:
    """One file may hold both."""
    code = tmp_path / "rewards.py"
    code.write_text(
        "def trl(completions, answer, **_):\n    return [float(len(completions))] * len(completions)\n"
        "def verl(data_source, solution_str, ground_truth, extra_info=None):\n    return float(solution_str == ground_truth)\n"
    )
    rows = str(made.write_rows(tmp_path / "t.jsonl", [{"prompt": "q", "answer": "4"}]))
    found = {}
    for name in ("trl", "verl"):
        spec = EnvironmentSpec(f"python:rewards.py:{name}", 0, "", train=rows, code=str(code))
        found[name] = kinds(build_environment(spec).score("train", 0, DONE))
    assert found == {"trl": [("scored", 2.0)] * 2, "verl": [("scored", 0.0), ("scored", 1.0)]}
    assert not is_verl(max)
