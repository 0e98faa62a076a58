"""Reward functions with TRL's signature. Functions here are ours, so they run without the jail."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments.author_code import load_function
from coordinator.environments.base import Completion, EnvironmentBroken, Scores
from coordinator.environments.datasets import Dataset
from coordinator.environments.python_reward import PythonReward

ROW = {"prompt": "ask", "answer": "4", "level": 3}
CHAT = {"prompt": [{"role": "user", "content": "ask"}], "answer": "4", "level": 3}
DONE = [Completion([5, 6], "four"), Completion([7], "4")]

Score = Callable[..., Scores]


@pytest.fixture
def score(tmp_path: Path, made: ModuleType) -> Score:
    def run(function: Callable[..., Any], row: dict[str, Any] = ROW) -> Scores:
        data = Dataset(made.write_rows(tmp_path / "rows.jsonl", [row]), prompt_column="prompt")
        return PythonReward({"train": data}, function, file_name="rewards.py").score("train", 0, DONE)

    return run


def kinds(scores: Scores) -> list[tuple[str, float | None]]:
    return [(one.kind, one.reward) for one in scores.outcomes]


def test_a_function_with_kwargs_gets_everything_trl_passes(score: Score) -> None:
    """Lists of one entry per completion, and every dataset column but the prompt."""
    seen: dict[str, Any] = {}

    def reward(prompts: list[str], completions: list[str], **rest: Any) -> list[float]:
        seen.update(rest, prompts=prompts, completions=completions)
        return [0.5, 1]

    assert kinds(score(reward)) == [("scored", 0.5), ("scored", 1.0)]
    log_extra, log_metric = seen.pop("log_extra"), seen.pop("log_metric")
    assert callable(log_extra)
    assert callable(log_metric)
    assert seen == {
        "prompts": ["ask", "ask"],
        "completions": ["four", "4"],
        "completion_ids": [[5, 6], [7]],
        "trainer_state": None,
        "environments": None,
        "answer": ["4", "4"],
        "level": [3, 3],
    }


def test_a_function_gets_only_what_it_names(score: Score) -> None:
    """No **kwargs needed; keyword-only names and defaults work."""

    def reward(completions: list[str], *, answer: list[str], weight: float = 2.0) -> list[float]:
        return [weight * (done == right) for done, right in zip(completions, answer, strict=True)]

    assert kinds(score(reward)) == [("scored", 0.0), ("scored", 2.0)]


def test_chat_rows_bring_message_lists(score: Score) -> None:
    """As TRL does for conversational data."""

    def reward(prompts: list[Any], completions: list[Any]) -> list[float]:
        assert prompts == [CHAT["prompt"]] * 2
        assert completions == [[{"role": "assistant", "content": "four"}], [{"role": "assistant", "content": "4"}]]
        return [1.0, 2.0]

    assert kinds(score(reward, CHAT)) == [("scored", 1.0), ("scored", 2.0)]


def test_an_async_function_is_awaited(score: Score) -> None:
    """Also one that waits."""

    async def reward(completions: list[str]) -> list[float]:
        import asyncio

        await asyncio.sleep(0)
        return [float(len(done)) for done in completions]

    assert kinds(score(reward)) == [("scored", 4.0), ("scored", 1.0)]


def test_none_is_unscored_and_other_numbers_are_floats(score: Score) -> None:
    """Numpy scalars and arrays, booleans, tuples."""
    import numpy as np

    assert kinds(score(lambda completions: (None, True))) == [("unscored", None), ("scored", 1.0)]
    assert kinds(score(lambda completions: np.array([0.25, 1.0], np.float32))) == [("scored", 0.25), ("scored", 1.0)]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "1", [1.0], {}, 10**400, Decimal("sNaN"), 1j])
def test_what_is_no_finite_number_fails_alone(score: Score, value: object) -> None:
    """Its neighbour keeps its score."""
    first, second = score(lambda completions: [value, 1.0]).outcomes
    assert (first.kind, first.reward) == ("failed", None)
    assert "the reward is" in first.detail
    assert second.reward == 1.0


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ([1.0], "returned 1 rewards for 2 completions"),
        (1.0, "returned float; return a list"),
        ("ab", "returned str"),
        (None, "NoneType"),
    ],
)
def test_a_wrong_answer_fails_in_words(score: Score, result: object, words: str) -> None:
    """Never a score."""
    for outcome in score(lambda completions: result).outcomes:
        assert outcome.kind == "failed"
        assert words in outcome.detail


@pytest.mark.parametrize("error", [ValueError("bad answer"), SystemExit(3), MemoryError(), KeyboardInterrupt()])
def test_whatever_is_raised_is_failed_with_its_words(score: Score, error: BaseException) -> None:
    """The last line of the traceback; a process that ran out of memory or was told to exit is spent."""

    def reward(completions: list[str]) -> list[float]:
        raise error

    scores = score(reward)
    assert kinds(scores) == [("failed", None)] * 2
    assert type(error).__name__ in scores.outcomes[0].detail
    assert scores.is_spent is not isinstance(error, ValueError)


def test_long_words_are_bounded(score: Score) -> None:
    """An exception may carry a whole completion."""

    def reward(completions: list[str]) -> list[float]:
        raise ValueError("x" * 100_000)

    assert len(score(reward).outcomes[0].detail) < 600


def test_logged_values_are_kept(score: Score) -> None:
    """log_extra as each completion's detail, log_metric as the mean of its calls."""

    def reward(completions: list[str], log_extra: Any, log_metric: Any) -> list[float | None]:
        log_extra("found", completions)
        log_metric("accuracy", 0.0)
        log_metric("accuracy", 1.0)
        return [1.0, None]

    scores = score(reward)
    assert [one.detail for one in scores.outcomes] == ["found=four", "found=4"]
    assert scores.metrics == {"accuracy": 0.5}


def test_extra_words_that_cannot_be_said_are_a_failure_in_words(score: Score) -> None:
    class Odd:
        def __str__(self) -> str:
            raise SystemExit("odd")

    def reward(completions: list[str], log_extra: Any) -> list[float]:
        log_extra("odd", [Odd(), Odd()])
        return [1.0, 1.0]

    for outcome in score(reward).outcomes:
        assert (outcome.kind, outcome.reward) == ("failed", None)
        assert "SystemExit: odd" in outcome.detail


def test_log_extra_needs_one_value_per_completion(score: Score) -> None:
    """Else the words say so."""
    scores = score(lambda completions, log_extra: log_extra("found", [1]))
    assert "log_extra('found') got 1 values for 2 completions" in scores.outcomes[0].detail


@pytest.mark.parametrize("function", [lambda completions, solution: [], lambda completions, /: [], lambda prompt, completions: []])
def test_a_demand_nobody_can_meet_is_refused_at_the_start(score: Score, function: Callable[..., Any]) -> None:
    """The parameter and the columns are named."""
    with pytest.raises(EnvironmentBroken, match="the reward function demands"):
        score(function)


def test_the_framework_wins_over_columns_of_its_names(score: Score) -> None:
    """A dataset cannot replace the completions."""

    def reward(completions: list[str], **rest: Any) -> list[float]:
        assert completions == ["four", "4"]
        assert "prompt" not in rest
        assert "completion" not in rest
        return [1.0, 1.0]

    assert kinds(score(reward, ROW | {"completions": "mine", "completion": "mine"})) == [("scored", 1.0)] * 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("def other(): ...\n_hidden = 1\n", r"no function 'reward' \(it has: other\)"),
        ("reward = 3\n", r"no function 'reward' \(it has: none\)"),
        ("\n\nimport no_such_module\n", r"ModuleNotFoundError: No module named 'no_such_module' \(rewards.py line 3\)"),
        ("def reward(:\n", "SyntaxError"),
        ("raise SystemExit(2)\n", "SystemExit"),
    ],
)
def test_code_that_does_not_load_is_refused_in_words(tmp_path: Path, code: str, words: str) -> None:
    """With the line."""
    path = tmp_path / "rewards.py"
    path.write_text(code)
    with pytest.raises(EnvironmentBroken, match=words):
        load_function(path, "reward")


def test_a_file_without_suffix_loads(tmp_path: Path) -> None:
    """Uploads are stored under their digest."""
    path = tmp_path / "0123abcd"
    path.write_text("from __future__ import annotations\ndef reward(completions: list[str]) -> list[float]:\n    return [7.0]\n")
    assert load_function(path, "reward")(completions=["a"]) == [7.0]
    with pytest.raises(EnvironmentBroken, match="absent"):
        load_function(tmp_path / "gone", "reward")


@pytest.mark.parametrize("value", [1e31, -1e39, 1.7e308])
def test_a_reward_that_a_batch_cannot_carry_is_a_failure(score: Score, value: float) -> None:
    """Batches hold float32: beyond its range a reward would be an infinity there, and stop the learner."""

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [value, 1.0]

    assert kinds(score(reward)) == [("failed", None), ("scored", 1.0)]


def test_a_column_that_a_row_lacks_is_none(tmp_path: Path, made: ModuleType) -> None:
    """As in a Hugging Face dataset: the columns are those of all rows."""

    def reward(completions: list[str], answer: list[Any], hint: list[Any]) -> list[float]:
        seen.append((answer, hint))
        return [1.0, 1.0]

    seen: list[Any] = []
    rows = [{"prompt": "a", "answer": "4"}, {"prompt": "b", "hint": "h"}]
    data = Dataset(made.write_rows(tmp_path / "rows.jsonl", rows), prompt_column="prompt")
    environment = PythonReward({"train": data}, reward, file_name="rewards.py")
    assert [kinds(environment.score("train", index, DONE))[0][0] for index in (0, 1)] == ["scored", "scored"]
    assert seen == [(["4", "4"], [None, None]), ([None, None], ["h", "h"])]


def test_a_callable_without_a_signature_is_refused_in_words(tmp_path: Path, made: ModuleType) -> None:
    """Some built-in functions have none."""
    data = Dataset(made.write_rows(tmp_path / "rows.jsonl", [ROW]), prompt_column="prompt")
    with pytest.raises(EnvironmentBroken, match="no signature"):
        PythonReward({"train": data}, max, file_name="rewards.py")
