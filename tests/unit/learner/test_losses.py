"""Masks, clips and caps: what each promises for any input."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner import losses
from coordinator.wire.job import AlgorithmConfig

RULE = AlgorithmConfig(drift_penalty=0.0)
MORE = settings(max_examples=60, deadline=None)

logprob = st.floats(-12.0, -1e-4)
advantage = st.floats(-3.0, 3.0)


def slopes(name: str, current: list[float], sampler: list[float], advantage: float, **rule: Any) -> tuple[list[float], Any]:
    """d loss / d log-prob of each token of one sample, and the terms; denominator 1."""
    logprobs = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    terms = losses.RULES[name](
        logprobs,
        torch.tensor([sampler], dtype=torch.float64),
        advantages=torch.tensor([advantage], dtype=torch.float64),
        weights=torch.ones(1, len(current), dtype=torch.float64),
        denominator=1.0,
        rule=RULE.model_copy(update=rule),
    )
    terms.loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad[0].tolist(), terms


@MORE
@given(current=logprob, sampler=logprob, advantage=advantage)
def test_dppo_slope_is_the_capped_ratio_or_nothing(current: float, sampler: float, advantage: float) -> None:
    (slope,), terms = slopes("dppo", [current], [sampler], advantage)
    ratio, moved = math.exp(current - sampler), math.exp(current) - math.exp(sampler)
    stopped = (advantage > 0 and moved > 0.2) or (advantage < 0 and moved < -0.2)
    guarded = not 1e-4 <= ratio <= 100
    assert slope == pytest.approx(0.0 if stopped or guarded else -min(ratio, 2.0) * advantage, rel=1e-9)
    assert bool(terms.dropped[0]) == guarded


@MORE
@given(current=logprob, sampler=logprob)
def test_dppo_never_stops_a_token_that_would_come_back(current: float, sampler: float) -> None:
    """The mask knows the sign: only movement further away is stopped."""
    moved = math.exp(current) - math.exp(sampler)
    _, terms = slopes("dppo", [current], [sampler], -1.0 if moved > 0 else 1.0)
    assert not terms.low.any()
    assert not terms.high.any()


@MORE
@given(current=logprob, sampler=logprob)
def test_dppo_drift_penalty_pulls_towards_the_sampler(current: float, sampler: float) -> None:
    (slope,), terms = slopes("dppo", [current], [sampler], 0.0, drift_penalty=0.5)
    expected = 0.0 if terms.dropped[0] else 2 * 0.5 * (current - sampler)
    assert slope == pytest.approx(expected, rel=1e-9, abs=1e-12)


@MORE
@given(current=logprob, sampler=logprob, advantage=advantage)
def test_ppo_slope_is_the_ratio_or_nothing(current: float, sampler: float, advantage: float) -> None:
    (slope,), _ = slopes("ppo_clip", [current], [sampler], advantage)
    ratio = math.exp(current - sampler)
    inside = ratio < 1.2 if advantage > 0 else 0.8 < ratio < 2.0
    guarded = not 1e-4 <= ratio <= 100
    assert slope == pytest.approx(-ratio * advantage if inside and not guarded else 0.0, rel=1e-9)


@MORE
@given(current=logprob, sampler=logprob, advantage=st.floats(-3.0, -0.01))
def test_the_dual_clip_bounds_the_pull_of_a_negative_sample(current: float, sampler: float, advantage: float) -> None:
    (slope,), _ = slopes("ppo_clip", [current], [sampler], advantage, dual_clip=1.5)
    assert abs(slope) <= 1.5 * abs(advantage) + 1e-9


def test_without_dual_clip_a_negative_sample_pulls_as_far_as_its_ratio() -> None:
    (slope,), _ = slopes("ppo_clip", [-1.0], [-4.0], -1.0, dual_clip=None)
    assert slope == pytest.approx(math.exp(3.0))


@pytest.mark.parametrize("name", losses.RULES)
@pytest.mark.parametrize("gap", [math.log(101), math.log(0.99e-4), math.nan])
def test_one_absurd_ratio_drops_the_whole_sample(name: str, gap: float) -> None:
    found, terms = slopes(name, [-1.0, -1.0], [-1.0, -1.0 - gap], 1.0)
    assert found == [0.0, 0.0]
    assert float(terms.loss.detach()) == 0.0
    assert terms.dropped.tolist() == [True]


@pytest.mark.parametrize("name", losses.RULES)
@pytest.mark.parametrize("gap", [math.log(99), math.log(1.1e-4)])
def test_a_ratio_inside_the_guard_keeps_the_sample(name: str, gap: float) -> None:
    _, terms = slopes(name, [-10.0, -1.0], [-10.0 - gap, -1.0], 1.0)
    assert terms.dropped.tolist() == [False]


@pytest.mark.parametrize("name", losses.RULES)
def test_padding_may_hold_anything(name: str) -> None:
    """Values where the weight is 0 change neither loss nor slopes, and overflow nowhere."""
    found = []
    for junk in (0.0, -1e30, 500.0):
        logprobs = torch.tensor([[-1.0, junk], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
        terms = losses.RULES[name](
            logprobs,
            torch.tensor([[-1.1, -junk], [-2.1, -0.9]], dtype=torch.float64),
            advantages=torch.tensor([1.0, -1.0], dtype=torch.float64),
            weights=torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64),
            denominator=3.0,
            rule=RULE.model_copy(update={"drift_penalty": 0.1}),
        )
        terms.loss.backward()
        assert logprobs.grad is not None
        found.append((float(terms.loss.detach()), logprobs.grad.tolist()))
    assert found[0] == found[1] == found[2]
    assert found[0][1][0][1] == 0.0


@pytest.mark.parametrize("name", losses.RULES)
def test_the_denominator_and_the_weight_scale_the_slope(name: str) -> None:
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    losses.RULES[name](
        logprobs,
        torch.tensor([[-1.0]], dtype=torch.float64),
        advantages=torch.tensor([2.0], dtype=torch.float64),
        weights=torch.tensor([[0.5]], dtype=torch.float64),
        denominator=10.0,
        rule=RULE,
    ).loss.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-2.0 * 0.5 / 10)
