"""What a token counts: the constants by hand, and the sums against the papers'."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner import aggregation
from coordinator.wire.job import AlgorithmConfig
from tests.unit.learner import papers

LENGTHS, TRAINED, GROUP = [1, 4, 5, 2], [True, True, False, True], [0, 0, 1, 2]


def of(name: str, lengths: list[int], trained: list[bool], group: list[int]) -> list[float]:
    rollouts = aggregation.Rollouts(torch.tensor(lengths), torch.tensor(trained), torch.tensor(group), max_new_tokens=8)
    found = aggregation.RULES[name](rollouts)
    assert found.dtype == torch.float64
    return list(found.tolist())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token_mean", [1 / 7, 1 / 7, 0, 1 / 7]),  # 7 trained tokens
        ("sequence_mean", [1 / 3, 1 / 12, 0, 1 / 6]),  # 3 trained rollouts of 1, 4 and 2 tokens
        ("prompt_mean", [1 / 10, 1 / 10, 0, 1 / 4]),  # 2 trained groups of 5 and 2 tokens
        ("constant", [1 / 24, 1 / 24, 0, 1 / 24]),  # 3 trained rollouts of at most 8
    ],
)
def test_the_constants(name: str, expected: list[float]) -> None:
    assert of(name, LENGTHS, TRAINED, GROUP) == pytest.approx(expected)


@pytest.mark.parametrize("name", aggregation.RULES)
def test_nothing_trained_is_all_zero(name: str) -> None:
    assert of(name, LENGTHS, [False] * 4, GROUP) == [0.0] * 4


rollout = st.tuples(st.integers(1, 8), st.booleans(), st.booleans(), st.floats(-2, 2))


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", aggregation.RULES)
@given(rollouts=st.lists(rollout, min_size=1, max_size=8))
def test_the_weighted_sum_is_the_papers(name: str, rollouts: list[Any]) -> None:
    lengths = [length for length, _, _, _ in rollouts]
    trained = [is_trained for _, is_trained, _, _ in rollouts]
    group = torch.tensor([0] + [int(begins) for _, _, begins, _ in rollouts[1:]]).cumsum(0).tolist()
    found = sum(
        weight * length * value for weight, (length, _, _, value) in zip(of(name, lengths, trained, group), rollouts, strict=True)
    )
    kept = [place for place, is_trained in enumerate(trained) if is_trained]
    terms = [[torch.tensor(rollouts[place][3], dtype=torch.float64)] * lengths[place] for place in kept]
    expected = float(papers.aggregate(name, terms, [group[place] for place in kept], 8)) if kept else 0.0
    assert found == pytest.approx(expected, abs=1e-12)


def test_every_aggregation_of_the_job_file_is_here() -> None:
    assert set(aggregation.RULES) == set(AlgorithmConfig.model_fields["aggregation"].annotation.__args__)  # type: ignore[union-attr]
