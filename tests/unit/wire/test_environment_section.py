"""The [environment] section: what it names, and which combinations are refused."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from coordinator.wire.environment import EnvironmentConfig, code_of, is_known

CODE = "python:r.py:f"


def section(**values: Any) -> EnvironmentConfig:
    return EnvironmentConfig.model_validate({"type": "math", **values})


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"type": "dataset", "train": "t.jsonl"}, "'dataset' scores nothing by itself: list environment.rewards"),
        ({"rewards": [{"type": "math"}, {"type": "math"}]}, "two entries named 'math'"),
        ({"rewards": [{"type": CODE}, {"type": "python:s.py:f"}]}, "two entries named 'f'"),
        ({"rewards": [{"type": "math", "weight": 0}]}, "every weight is 0"),
        ({"train": "t.jsonl", "sources": [{"train": "a.jsonl"}]}, "must be absent with environment.sources"),
        ({"sources": [{"train": "a", "name": "x"}, {"train": "b", "name": "x"}]}, "two entries named 'x'"),
        ({"sources": [{"train": "a", "weight": 0}]}, "greater than 0"),
        ({"curriculum": [{"until_group": 5}]}, "the last stage ends at group 5"),
        ({"curriculum": [{}, {}]}, "must rise from stage to stage"),
        ({"curriculum": [{"until_group": 5}, {"until_group": 5}, {}]}, "must rise from stage to stage"),
        ({"curriculum": [{"low": 0.8, "high": 0.2}]}, "low 0.8 is above high 0.2"),
        ({"rewards": [{"type": "math", "weigth": 1}]}, "weigth"),
        ({"rewards": [{"type": "math", "weight": float("nan")}]}, "finite"),
    ],
)
def test_combinations_that_mean_nothing_are_refused_in_words(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        section(**values)


def test_every_file_is_listed_with_its_field() -> None:
    config = section(
        type="dataset",
        sources=[{"train": "a.jsonl", "eval": "b.jsonl"}, {"train": "c.jsonl", "type": "python:s.py:g"}],
        rewards=[{"type": "math"}, {"type": CODE, "weight": 0.5}],
    )
    assert [(named.field, named.name, named.kind) for named in config.files()] == [
        ("environment.sources.0.train", "a.jsonl", "dataset"),
        ("environment.sources.0.eval", "b.jsonl", "dataset"),
        ("environment.sources.1.train", "c.jsonl", "dataset"),
        ("environment.rewards.1.type", "r.py", "code"),
        ("environment.sources.1.type", "s.py", "code"),
    ]
    plain = section(type=CODE, train="t.jsonl", eval="e.jsonl")
    assert [named.field for named in plain.files()] == ["environment.train", "environment.eval", "environment.type"]


def test_a_section_survives_its_own_json() -> None:
    """Rows of jobs hold it so."""
    config = section(
        type="reasoning_gym:chain_sum",
        options={"min_terms": 2, "allow_negation": True, "scale": 0.5, "digits": [1, 2], "names": ["a"], "word": "x"},
        curriculum=[{"low": 0.5, "until_group": 10}, {"high": 0.5}],
    )
    again = EnvironmentConfig.model_validate_json(config.model_dump_json())
    assert again == config
    assert again.options["allow_negation"] is True


@pytest.mark.parametrize("kind", ["math", "digit_sort", "dataset", "reasoning_gym:leg_counting", CODE, "python:upload:0abc:f"])
def test_types_that_exist(kind: str) -> None:
    assert is_known(kind)


@pytest.mark.parametrize(
    "kind", ["maths", "reasoning_gym:", "reasoning_gym:a b", "python:r.py", "python::f", "python:r.py:a-b", ""]
)
def test_types_that_do_not(kind: str) -> None:
    assert not is_known(kind)


def test_the_code_of_a_type() -> None:
    assert code_of("python:upload:0abc:f") == "upload:0abc"
    assert code_of("math") is None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"type": "guess_number"}, "environment.type 'guess_number' takes several turns: set environment.max_turns (8, say)"),
        ({"type": "guess_number", "max_turns": 8}, None),
        (
            {"type": "countdown", "max_turns": 2},
            "environment.max_turns is 2, and 'countdown' asks for one completion only: remove it",
        ),
        ({"type": "countdown"}, None),
        ({"type": "python:a.py:f", "max_turns": 2}, None),
        ({"type": "verifiers:words"}, None),
        ({"type": "math", "sources": ({"train": "a"}, {"type": "guess_number"})}, "'guess_number' takes several turns"),
        ({"type": "math", "max_turns": 2, "sources": ({"train": "a"}, {"type": "python:a.py:f"})}, None),
    ],
)
def test_turns_without_an_environment_that_takes_them(section: dict[str, object], words: str | None) -> None:
    """As far as the types tell; code is asked when the learner starts."""
    found = EnvironmentConfig.model_validate(section).turns_refused()
    assert found is None if words is None else words in str(found)
