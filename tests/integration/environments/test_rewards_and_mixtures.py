"""Several weighted rewards, several sources, stages of difficulty: built from a spec, as a child builds them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.domain.mixing import Band
from coordinator.environments.base import (
    Completion,
    Environment,
    EnvironmentBroken,
    EnvironmentSpec,
    RewardSpec,
    SourceSpec,
    spec_from,
)
from coordinator.environments.build import build_environment

CODE = """
def brevity(completions, **_): return [1.0 / max(1, len(text)) for text in completions]
def sometimes(completions, **_): return [None if text == "skip" else 1.0 for text in completions]
def broken(completions, **_): raise ValueError("broken")
def best(completions, **_):
    longest = max(len(text) for text in completions)
    return [float(len(text) == longest) for text in completions]
def never(completions, **_): return [None for _ in completions]
"""


def python(name: str, weight: float, label: str | None = None) -> RewardSpec:
    return RewardSpec(f"python:rewards.py:{name}", label or name, weight)


@pytest.fixture
def build(tmp_path: Path, made: ModuleType) -> Any:
    code = tmp_path / "rewards.py"
    code.write_text(CODE)
    rows = made.write_rows(tmp_path / "t.jsonl", [{"prompt": f"{n}+{n}", "answer": 2 * n} for n in range(4)])

    def run(*rewards: RewardSpec, kind: str = "dataset", **more: Any) -> Environment:
        files = {} if kind == "digit_sort" else {"train": str(rows)}
        return build_environment(EnvironmentSpec(kind, 3, "", codes={"rewards.py": str(code)}, rewards=rewards, **files, **more))

    return run


def outcomes(environment: Environment, *texts: str, index: int = 1) -> list[tuple[str, float | None]]:
    scores = environment.score("train", index, [Completion([1], text) for text in texts])
    return [(one.kind, one.reward) for one in scores.outcomes]


def test_the_score_is_the_weighted_sum_and_each_part_a_metric(build: Any) -> None:
    """Row 1 asks 1+1. Brevity of "2" is 1, of "22" is 1/2."""
    environment = build(RewardSpec("math", "accuracy", 2.0), python("brevity", 0.5))
    scores = environment.score("train", 1, [Completion([1], "2"), Completion([1], "22")])
    assert [one.reward for one in scores.outcomes] == [2.0 + 0.5, 0.25]
    assert scores.metrics == {"accuracy": 0.5, "brevity": 0.75}
    assert scores.outcomes[0].detail == "accuracy=1; brevity=1"


def test_what_does_not_apply_is_left_out(build: Any) -> None:
    """Of the sum, and of the metric's mean; where nothing applies there is no score."""
    environment = build(python("sometimes", 3.0), python("brevity", 1.0))
    assert outcomes(environment, "skip", "yes") == [("scored", 0.25), ("scored", pytest.approx(3 + 1 / 3))]
    assert environment.score("train", 0, [Completion([1], "skip"), Completion([1], "x")]).metrics["sometimes"] == 1.0
    assert outcomes(build(python("never", 1.0), python("never", 2.0, "again")), "x") == [("unscored", None)]


def test_a_part_that_fails_makes_the_sum_unknown_unless_it_is_a_metric(build: Any) -> None:
    """Half a reward would be a wrong one."""
    environment = build(python("brevity", 1.0), python("broken", 1.0))
    (one,) = environment.score("train", 0, [Completion([1], "x")]).outcomes
    assert (one.kind, one.reward) == ("failed", None)
    assert one.detail.startswith("broken: ValueError: broken (rewards.py line 4)")
    assert outcomes(build(python("brevity", 1.0), python("broken", 0.0)), "x") == [("scored", 1.0)]


def test_a_function_sees_all_completions_it_is_asked_about_at_once(build: Any) -> None:
    """So a reward may compare a group's members."""
    assert outcomes(build(python("best", 1.0)), "a", "bbb", "cc") == [("scored", 0.0), ("scored", 1.0), ("scored", 0.0)]


def test_a_procedural_task_may_have_further_rewards(build: Any) -> None:
    """Its own scorer under its own type."""
    environment = build(RewardSpec("digit_sort", "right", 1.0), python("brevity", 1.0), kind="digit_sort")
    prompt = environment.prompt("train", 5)
    answer = "".join(sorted(prompt[:-1]))
    assert outcomes(environment, answer, "x", index=5) == [("scored", 1.0 + 1 / len(answer)), ("scored", 1.0)]
    assert environment.size("train") is None


@pytest.mark.parametrize(
    ("rewards", "kind", "words"),
    [
        ([], "dataset", "list environment.rewards"),
        ([RewardSpec("digit_sort", "a", 1.0)], "dataset", "scores its own problems only"),
        ([RewardSpec("maths", "a", 1.0)], "dataset", "environment.type is 'maths'"),
        ([RewardSpec("python:other.py:f", "a", 1.0)], "dataset", "'other.py', which was not uploaded"),
        ([RewardSpec("python:rewards.py:gone", "a", 1.0)], "dataset", "no function 'gone'"),
    ],
)
def test_rewards_that_cannot_score_are_refused(build: Any, rewards: list[RewardSpec], kind: str, words: str) -> None:
    with pytest.raises(EnvironmentBroken, match=words):
        build(*rewards, kind=kind)


def mixed(tmp_path: Path, made: ModuleType, *, seed: int = 3) -> Environment:
    """Source a: 3 rows, weight 3. Source b: 50 rows, weight 1. Held out: 1 and 3."""
    sources = []
    for label, count, weight, held_out in (("a", 3, 3.0, 1), ("b", 50, 1.0, 3)):
        rows = [{"prompt": f"{label}{n}", "answer": n} for n in range(count)]
        train = made.write_rows(tmp_path / f"{label}.jsonl", rows)
        evaluation = made.write_rows(tmp_path / f"{label}-eval.jsonl", rows[:held_out])
        sources.append(SourceSpec("math", label, weight, str(train), str(evaluation)))
    spec = EnvironmentSpec("math", seed, "", sources=sources)
    return build_environment(spec_from(spec.to_json()))  # as it travels


def test_sources_are_mixed_by_weight_each_gone_through_evenly(tmp_path: Path, made: ModuleType) -> None:
    """1,000 groups: 750 of a, each of its rows 250 times; 250 of b, each 5 times."""
    environment = mixed(tmp_path, made)
    assert environment.size("train") is None
    counts = Counter(environment.prompt("train", number) for number in range(1000))
    assert counts == {f"a{n}": 250 for n in range(3)} | {f"b{n}": 5 for n in range(50)}


def test_each_epoch_of_a_source_has_an_order_of_its_own(tmp_path: Path, made: ModuleType) -> None:
    """Five epochs of b's 50 rows: five orders, each holding every row; the same order again would pair the same groups."""
    environment = mixed(tmp_path, made)
    prompts = [environment.prompt("train", number) for number in range(1000)]
    own = [prompt for prompt in prompts if prompt.startswith("b")]  # type: ignore[union-attr]
    epochs = [tuple(own[start : start + 50]) for start in range(0, 250, 50)]
    assert all(sorted(epoch) == sorted(epochs[0]) for epoch in epochs)  # type: ignore[type-var]
    assert len(set(epochs)) == 5


def test_a_restart_gives_the_same_prompt_for_the_same_group(tmp_path: Path, made: ModuleType) -> None:
    """A new process, asked from the middle on and backwards."""
    numbers = range(0, 3000, 7)
    first, again, other = mixed(tmp_path, made), mixed(tmp_path, made), mixed(tmp_path, made, seed=4)
    forward = [first.prompt("train", number) for number in numbers]
    assert forward == [again.prompt("train", number) for number in reversed(numbers)][::-1]
    assert forward != [other.prompt("train", number) for number in numbers]


def test_each_source_scores_its_own_prompts(tmp_path: Path, made: ModuleType) -> None:
    environment = mixed(tmp_path, made)
    for number in range(20):
        prompt = environment.prompt("train", number)
        scores = environment.score("train", number, [Completion([1], prompt[1:]), Completion([1], "77")])
        assert [one.reward for one in scores.outcomes] == [1.0, 0.0]
        assert scores.metrics == {f"source/{prompt[0]}": 0.5}


def test_held_out_prompts_take_turns(tmp_path: Path, made: ModuleType) -> None:
    environment = mixed(tmp_path, made)
    assert environment.size("eval") == 4
    assert [environment.prompt("eval", index) for index in range(4)] == ["a0", "b0", "b1", "b2"]
    assert environment.score("eval", 1, [Completion([1], "0")]).metrics == {}
    with pytest.raises(IndexError):
        environment.prompt("eval", 4)


def test_a_source_that_is_broken_is_named(tmp_path: Path, made: ModuleType) -> None:
    good = made.write_rows(tmp_path / "good.jsonl", [{"prompt": "q", "answer": 1}])
    bad = made.write_rows(tmp_path / "bad.jsonl", [{"prompt": "q"}])
    for sources, words in [
        (
            [SourceSpec("math", "x", 1.0, str(good)), SourceSpec("math", "y", 1.0, str(bad))],
            "environment.sources, y: bad.jsonl line 1",
        ),
        ([SourceSpec("math", "x", 1.0, str(good)), SourceSpec("math", "y", 1e-9, str(good))], "at least 1/1000"),
    ]:
        with pytest.raises(EnvironmentBroken, match=words):
            build_environment(EnvironmentSpec("math", 0, "", sources=sources))


def staged(tmp_path: Path, made: ModuleType, *bands: Band, column: str = "pass_rate", seed: int = 5) -> Environment:
    """Rows 0 to 9 with pass rates 0.0 to 0.9."""
    rows = made.write_rows(tmp_path / "s.jsonl", [{"prompt": str(n), "answer": n, "pass_rate": n / 10} for n in range(10)])
    return build_environment(EnvironmentSpec("math", seed, "", train=str(rows), bands=bands, difficulty_column=column))


def test_stages_serve_the_rows_of_their_band_evenly(tmp_path: Path, made: ModuleType) -> None:
    """Groups 0 to 11 easy ones, three times each; then hard ones for ever."""
    environment = staged(tmp_path, made, Band(0.6, 1.0, until=12), Band(0.1, 0.3))
    prompts = [environment.prompt("train", number) for number in range(18)]
    assert Counter(prompts[:12]) == dict.fromkeys("6789", 3)
    assert Counter(prompts[12:]) == dict.fromkeys("123", 2)
    again = staged(tmp_path, made, Band(0.6, 1.0, until=12), Band(0.1, 0.3))
    assert [again.prompt("train", number) for number in reversed(range(18))][::-1] == prompts
    other = staged(tmp_path, made, Band(0.6, 1.0, until=12), Band(0.1, 0.3), seed=6)
    assert [other.prompt("train", number) for number in range(18)] != prompts
    scores = environment.score("train", 13, [Completion([1], prompts[13])])
    assert scores.outcomes[0].reward == 1.0


def test_a_band_without_rows_and_a_column_without_numbers_are_refused(tmp_path: Path, made: ModuleType) -> None:
    with pytest.raises(EnvironmentBroken, match=r"no row has a pass_rate from 0.95 to 1 \(the rows have 0 to 0.9\)"):
        staged(tmp_path, made, Band(0.95, 1.0))
    with pytest.raises(
        EnvironmentBroken, match=r"s.jsonl line 1: column 'level' holds NoneType; environment.curriculum needs a number"
    ):
        staged(tmp_path, made, Band(0.0, 1.0), column="level")
    with pytest.raises(EnvironmentBroken, match="makes its own problems"):
        build_environment(EnvironmentSpec("digit_sort", 0, "", bands=[Band(0, 1)]))
