"""Group-relative advantages, against figures worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner import advantages
from tests.unit.learner import papers

NAN = math.nan


def of(rule: str, rewards: list[float], group: list[int]) -> list[float]:
    return list(advantages.RULES[rule](torch.tensor(rewards, dtype=torch.float32), torch.tensor(group)).tolist())


def test_mean_subtracts_the_groups_own_mean() -> None:
    assert of("mean", [1, 0, 0, 0, 5, 3], [0, 0, 0, 0, 1, 1]) == [0.75, -0.25, -0.25, -0.25, 1, -1]


def test_group_std_divides_by_the_population_deviation() -> None:
    std = math.sqrt(0.25 * 0.75) + 1e-4
    assert of("group_std", [1, 0, 0, 0], [0] * 4) == pytest.approx([0.75 / std] + [-0.25 / std] * 3)


def test_leave_one_out_compares_with_the_others() -> None:
    assert of("leave_one_out", [1, 0, 0, 0, 5, 3], [0, 0, 0, 0, 1, 1]) == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 2, -2])


@pytest.mark.parametrize("rule", advantages.RULES)
def test_one_score_alone_is_no_signal(rule: str) -> None:
    assert of(rule, [7, NAN, 1, 0], [0, 0, 1, 1])[:2] == [0.0, 0.0]


def test_batch_std_is_one_scale_for_all_groups() -> None:
    """Group 0 is centred to 1 and -1, group 1 to 3 and -3: their deviation is the square root of 5."""
    scale = math.sqrt(5) + 1e-4
    assert of("batch_std", [1, -1, 6, 0], [0, 0, 1, 1]) == pytest.approx([1 / scale, -1 / scale, 3 / scale, -3 / scale])


def test_batch_std_without_any_signal_is_zero() -> None:
    assert of("batch_std", [1, 1, 0, 0], [0, 0, 1, 1]) == [0.0] * 4


score = st.floats(-10, 10, width=32) | st.just(NAN)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("rule", advantages.RULES)
@given(groups=st.lists(st.lists(score, min_size=1, max_size=6), min_size=1, max_size=4))
def test_every_rule_is_its_papers(rule: str, groups: list[list[float]]) -> None:
    """Any scores, groups of any sizes, some scores missing; up to rounding where a deviation is nearly zero."""
    rewards = [reward for group in groups for reward in group]
    number = [place for place, group in enumerate(groups) for _ in group]
    found, expected = of(rule, rewards, number), papers.advantages(rule, rewards, number)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6 if "std" not in rule else 1e-2)


@pytest.mark.parametrize("rule", advantages.RULES)
def test_a_missing_score_is_out_of_the_baseline_and_gets_nothing(rule: str) -> None:
    assert of(rule, [1, NAN, 0], [0, 0, 0])[1] == 0.0
    without = of(rule, [1, 0], [0, 0])
    assert [of(rule, [1, NAN, 0], [0, 0, 0])[place] for place in (0, 2)] == without


@pytest.mark.parametrize("rule", advantages.RULES)
def test_a_group_without_any_score_gets_nothing(rule: str) -> None:
    assert of(rule, [NAN, NAN, 1, 0], [0, 0, 1, 1])[:2] == [0.0, 0.0]


def test_equal_rewards_are_no_signal_even_with_rounding() -> None:
    assert of("group_std", [0.1, 0.1, 0.1 + 1e-8], [0, 0, 0]) == [0.0, 0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(rewards=st.lists(st.floats(-10, 10, width=32) | st.just(NAN), min_size=1, max_size=12), shift=st.integers(-5, 5))
def test_advantages_of_a_group_add_up_to_zero_and_ignore_a_shift(rewards: list[float], shift: int) -> None:
    found = of("mean", rewards, [0] * len(rewards))
    moved = of("mean", [reward + shift for reward in rewards], [0] * len(rewards))
    assert sum(found) == pytest.approx(0.0, abs=1e-5)
    assert moved == pytest.approx(found, abs=1e-4)
    assert all(math.isfinite(each) for each in found)
