"""Masks, clips and caps: what each promises for any input, and every loss against its paper's formula (`papers.py`)."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.learner import losses
from coordinator.wire.job import LOSS_FIELDS, AlgorithmConfig
from tests.unit.learner import papers

MORE = settings(max_examples=60, deadline=None)
NAMES = tuple(losses.RULES)

logprob = st.floats(-12.0, -1e-4)
advantage = st.floats(-3.0, 3.0)


def rule_of(name: str, **given: Any) -> AlgorithmConfig:
    """Without a drift penalty, which has its own tests."""
    plain = {"drift_penalty": 0.0} if "drift_penalty" in LOSS_FIELDS[name] else {}
    return AlgorithmConfig.model_validate({"loss": name, **plain, **given})


def tokens(
    current: torch.Tensor,
    sampler: list[list[float]],
    advantages: list[float],
    *,
    weights: list[list[float]] | None = None,
    ages: list[list[int]] | None = None,
    reference: list[list[float]] | None = None,
) -> losses.Tokens:
    """Float64, all trained with weight 1 and of age 1 unless said."""
    return losses.Tokens(
        current,
        torch.tensor(sampler, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        torch.ones_like(current) if weights is None else torch.tensor(weights, dtype=torch.float64),
        torch.ones(current.shape, dtype=torch.int32) if ages is None else torch.tensor(ages, dtype=torch.int32),
        None if reference is None else torch.tensor(reference, dtype=torch.float64),
    )


def slopes(name: str, current: list[float], sampler: list[float], advantage: float, **rule: Any) -> tuple[list[float], Any]:
    """d loss / d log-prob of each token of one sample, and the terms."""
    logprobs = torch.tensor([current], dtype=torch.float64, requires_grad=True)
    terms = losses.policy_loss(tokens(logprobs, [sampler], [advantage]), rule_of(name, **rule))
    terms.loss.backward()
    assert logprobs.grad is not None
    return logprobs.grad[0].tolist(), terms


token = st.tuples(st.floats(-6.0, -1e-3), st.floats(-1.5, 1.5), st.integers(0, 7), st.floats(-6.0, -1e-3))
sample = st.tuples(st.lists(token, min_size=1, max_size=5), advantage, st.floats(0.1, 2.0))


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("reference_kl", [0.0, 0.3])
@pytest.mark.parametrize("name", NAMES)
@given(samples=st.lists(sample, min_size=1, max_size=3))
def test_loss_and_slopes_are_the_papers(name: str, reference_kl: float, samples: list[Any]) -> None:
    """Ragged samples, any ratios and ages, padded here with junk; the reference loops over the tokens that are there."""
    rule = AlgorithmConfig.model_validate({"loss": name, "reference_kl": reference_kl})
    width = max(len(parts) for parts, _, _ in samples)

    def padded(place: int, junk: float) -> list[list[Any]]:
        return [[part[place] for part in parts] + [junk] * (width - len(parts)) for parts, _, _ in samples]

    current = padded(0, -3.0)
    sampler = [
        [min(0.0, logp + gap) for logp, gap in zip(*pair, strict=True)] for pair in zip(current, padded(1, 50.0), strict=True)
    ]
    logprobs = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    found = losses.policy_loss(
        tokens(
            logprobs,
            sampler,
            [pull for _, pull, _ in samples],
            weights=[[weight] * len(parts) + [0.0] * (width - len(parts)) for parts, _, weight in samples],
            ages=padded(2, 0),
            reference=padded(3, 40.0) if reference_kl else None,
        ),
        rule,
    ).loss
    (slope,) = torch.autograd.grad(found, logprobs)

    leaves = torch.tensor(current, dtype=torch.float64, requires_grad=True)
    expected = 0.0 * leaves.sum()
    for row, (parts, pull, weight) in enumerate(samples):
        logps, mus = [leaves[row, at] for at in range(len(parts))], sampler[row][: len(parts)]
        if not papers.is_sane(logps, mus):
            continue
        of_paper = papers.LOSSES[name](rule, logps, mus, [part[2] for part in parts], pull)
        for term, logp, mu, part in zip(of_paper, logps, mus, parts, strict=True):
            expected = expected + weight * (term + reference_kl * papers.reference_kl(logp, mu, part[3]))
    (wanted,) = torch.autograd.grad(expected, leaves)
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-9, abs=1e-9)
    torch.testing.assert_close(slope, wanted, rtol=1e-9, atol=1e-9)


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


@MORE
@given(current=logprob, sampler=logprob, advantage=advantage)
def test_cispo_cuts_the_weight_and_never_the_gradient(current: float, sampler: float, advantage: float) -> None:
    (slope,), terms = slopes("cispo", [current], [sampler], advantage)
    ratio = math.exp(current - sampler)
    guarded = not 1e-4 <= ratio <= 100
    assert slope == pytest.approx(0.0 if guarded else -min(ratio, 5.0) * advantage, rel=1e-9)
    assert bool(terms.capped.any()) == (5.0 < ratio <= 100)
    assert not (terms.low | terms.high).any()


@MORE
@given(gaps=st.lists(st.floats(-2.0, 2.0), min_size=1, max_size=6), advantage=advantage)
def test_gspo_gives_every_token_of_a_sample_the_same_slope(gaps: list[float], advantage: float) -> None:
    found, _ = slopes("gspo", [-3.0] * len(gaps), [-3.0 - gap for gap in gaps], advantage, clip_low=0.2, clip_high=0.2)
    ratio = math.exp(sum(gaps) / len(gaps))
    inside = ratio < 1.2 if advantage > 0 else ratio > 0.8
    assert found == pytest.approx([-ratio * advantage if inside else 0.0] * len(gaps), rel=1e-9)


@MORE
@given(current=logprob, sampler=logprob, advantage=advantage)
def test_reinforce_stops_on_both_sides_whatever_the_sign(current: float, sampler: float, advantage: float) -> None:
    (slope,), terms = slopes("reinforce", [current], [sampler], advantage)
    ratio = math.exp(current - sampler)
    guarded = not 1e-4 <= ratio <= 100
    assert slope == pytest.approx(-ratio * advantage if 0.5 <= ratio <= 5.0 else 0.0, rel=1e-9)
    assert (bool(terms.low.any()), bool(terms.high.any())) == (ratio < 0.5 and not guarded, ratio > 5.0 and not guarded)


@pytest.mark.parametrize(("age", "expected"), [(0, 1.0), (1, 0.0), (2, 0.5), (4, 0.75)])
def test_the_proximal_policy_is_one_version_old(age: int, expected: float) -> None:
    """The share of the way from the sampler (0) to the current policy (1)."""
    current, sampler = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    found = losses.proximal(current, sampler, torch.tensor([[age]]))
    assert found.tolist() == [[pytest.approx(-3.0 + 2.0 * expected)]]


@MORE
@given(current=st.floats(-4.0, -0.1), gap=st.floats(-1.5, 1.5), advantage=advantage)
def test_decoupled_is_ppo_on_data_one_version_old(current: float, gap: float, advantage: float) -> None:
    """As long as the mask lets it: the behaviour weight of age 1 is 1, so it always does."""
    sampler = min(0.0, current - gap)
    ours, _ = slopes("decoupled", [current], [sampler], advantage)
    plain, _ = slopes("ppo_clip", [current], [sampler], advantage, dual_clip=None)
    assert ours == pytest.approx(plain, rel=1e-9)


def test_decoupled_masks_what_is_far_from_its_sampler() -> None:
    """Truncation alone would leave a weight of 2 on a token whose ratio is 50; one that would come back is not stopped."""
    gap = math.log(3)
    for advantage in (1.0, -1.0):
        logprobs = torch.tensor([[-1.5, -3.0, -1.5]], dtype=torch.float64, requires_grad=True)
        sampler = [[-1.5 - gap, -3.0 + gap, -1.5]]
        found = losses.policy_loss(
            tokens(logprobs, sampler, [advantage], ages=[[8, 8, 8]]), rule_of("decoupled", clip_low=0.3, clip_high=0.3)
        )
        found.loss.backward()
        assert logprobs.grad is not None
        moved_up, moved_down, unmoved = logprobs.grad[0].tolist()
        assert unmoved == -advantage
        if advantage > 0:
            assert (moved_up, moved_down) == (0.0, pytest.approx(-(3 ** (-7 / 8)) * 3 ** (-1 / 8)))
        else:
            assert (moved_up, moved_down) == (pytest.approx(2.0 * 3 ** (1 / 8)), 0.0)


@pytest.mark.parametrize("name", NAMES)
def test_without_correction_every_ratio_is_one(name: str) -> None:
    """The plain policy gradient, whatever the sampler recorded."""
    found, terms = slopes(name, [-1.0, -2.0], [-9.0, -0.1], 1.5, correction="none")
    assert found == pytest.approx([-1.5, -1.5])
    assert not terms.dropped.any()


@MORE
@given(current=st.floats(-8.0, -0.01), gap=st.floats(-1.0, 1.0), reference=st.floats(-8.0, -0.01))
def test_the_kl_pulls_towards_the_reference(current: float, gap: float, reference: float) -> None:
    """Its slope is the ratio times the distance, so that it is right on data of another policy too."""
    logprobs = torch.tensor([[current]], dtype=torch.float64, requires_grad=True)
    sampler = current - gap
    terms = losses.policy_loss(tokens(logprobs, [[sampler]], [0.0], reference=[[reference]]), rule_of("dppo", reference_kl=0.5))
    terms.loss.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(0.5 * math.exp(gap) * (current - reference), rel=1e-7, abs=1e-9)
    assert float(terms.reference_kl) >= 0.0


def test_the_kl_of_stale_data_is_that_of_the_current_policy() -> None:
    """Three tokens, each weighted by how often the *sampler* draws it: the mean is the KL of the current policy to the reference."""
    current, sampler, reference = (
        torch.tensor([each], dtype=torch.float64).log() for each in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.3, 0.3, 0.4])
    )
    seen = losses.Trained(current, sampler, torch.zeros(1, 1), torch.ones(1, 3), torch.ones(1, 3, dtype=torch.bool))
    found = (sampler.exp() * losses.reference_kl(seen, reference)).sum()
    assert float(found) == pytest.approx(float((current.exp() * (current - reference)).sum()))


def test_a_reference_that_knows_better_by_far_stays_a_number() -> None:
    """And pulls towards itself: a rho that merely stood still beyond its limit would push away, 485 million times as hard."""
    logprobs = torch.tensor([[-200.0]], requires_grad=True)
    seen = losses.Trained(
        logprobs, torch.tensor([[-200.0]]), torch.zeros(1, 1), torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    )
    found = losses.reference_kl(seen, torch.tensor([[0.0]]))
    found.sum().backward()
    assert bool(torch.isfinite(found).all())
    assert logprobs.grad is not None
    assert float(logprobs.grad) == -200.0


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [math.log(101), math.log(0.99e-4), math.nan])
def test_one_absurd_ratio_drops_the_whole_sample(name: str, gap: float) -> None:
    found, terms = slopes(name, [-1.0, -1.0], [-1.0, -1.0 - gap], 1.0)
    assert found == [0.0, 0.0]
    assert float(terms.loss.detach()) == 0.0
    assert terms.dropped.tolist() == [True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gap", [math.log(99), math.log(1.1e-4)])
def test_a_ratio_inside_the_guard_keeps_the_sample(name: str, gap: float) -> None:
    _, terms = slopes(name, [-10.0, -1.0], [-10.0 - gap, -1.0], 1.0)
    assert terms.dropped.tolist() == [False]


@pytest.mark.parametrize("name", NAMES)
def test_padding_may_hold_anything(name: str) -> None:
    """Values where the weight is 0 change neither loss nor slopes, and overflow nowhere."""
    found = []
    for junk in (0.0, -1e30, 500.0, math.nan):
        logprobs = torch.tensor([[-1.0, junk], [-2.0, -1.0]], dtype=torch.float64, requires_grad=True)
        terms = losses.policy_loss(
            tokens(
                logprobs,
                [[-1.1, -junk], [-2.1, -0.9]],
                [1.0, -1.0],
                weights=[[1.0, 0.0], [1.0, 1.0]],
                reference=[[-1.0, junk], [-2.0, -1.0]],
            ),
            rule_of(name, reference_kl=0.1),
        )
        terms.loss.backward()
        assert logprobs.grad is not None
        found.append((float(terms.loss.detach()), logprobs.grad.tolist()))
    assert found[0] == found[1] == found[2] == found[3]
    assert found[0][1][0][1] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_the_weight_scales_the_slope(name: str) -> None:
    logprobs = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
    losses.policy_loss(tokens(logprobs, [[-1.0]], [2.0], weights=[[0.05]]), rule_of(name)).loss.backward()
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-2.0 * 0.05)


def test_every_loss_of_the_job_file_is_here() -> None:
    assert set(losses.RULES) == set(LOSS_FIELDS) == set(papers.LOSSES)
