"""One optimiser step: what it changes, what it reports, and what it does with a batch that teaches nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from coordinator.domain import interlocks
from coordinator.learner import collate, metrics, model, step
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import LOSS_FIELDS


def learner(made: ModuleType, tiny: Path, **algorithm: Any) -> step.Learner:
    return step.start(model.load(tiny), made.config(**algorithm))


def weights(one: step.Learner) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in one.policy.model.parameters()]


def moments(one: step.Learner) -> list[torch.Tensor]:
    """AdamW's, of every parameter that has them."""
    return [state[name].clone() for state in one.optimizer.state.values() for name in ("exp_avg", "exp_avg_sq", "step")]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def own(one: step.Learner, batch: Batch) -> Batch:
    """The batch as the learner's very policy would have sampled it: every ratio is 1."""
    signal = collate.signal_of(batch, one.config)
    values = []
    for row in range(batch.rollouts):
        micro = collate.collate(batch, signal, [row])
        with torch.no_grad():
            values.append(step.token_logprobs(one.policy, micro, one.config.sampling.temperature)[0][0].numpy())
    return replace(batch, logprobs=np.minimum(np.concatenate(values), 0).astype(np.float32))


def test_on_policy_data_gives_ratio_one(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny)
    figures = step.take_step(one, own(one, made.batch()))
    assert figures["kl"] == pytest.approx(0.0, abs=1e-9)
    assert figures["effective_sample_size"] == pytest.approx(1.0, abs=1e-6)
    assert figures["is_masked/mean"] == 0.0
    assert one.step == 1


@pytest.mark.parametrize("loss", LOSS_FIELDS)
def test_a_step_makes_rewarded_completions_more_likely(made: ModuleType, tiny: Path, loss: str) -> None:
    one = learner(made, tiny, loss=loss)
    batch = own(one, made.batch())
    step.take_step(one, batch)
    after = own(one, batch).logprobs.astype(np.float64)
    change = np.add.reduceat(after - batch.logprobs, np.cumsum(batch.lengths) - batch.lengths)
    means = np.array([batch.rewards[batch.group == group].mean() for group in batch.group])
    assert float(((batch.rewards - means) * change).sum()) > 0


def test_the_same_step_twice_gives_the_same_bits(made: ModuleType, tiny: Path) -> None:
    found = []
    for _ in range(2):
        one = learner(made, tiny)
        figures = [step.take_step(one, made.batch(step=number, seed=number)) for number in range(3)]
        found.append((weights(one), figures))
    assert same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


NOTHING: dict[str, dict[str, Any]] = {
    "zero weight": {"weight": np.zeros(8, np.float32)},
    "no score": {"rewards": np.full(8, math.nan, np.float32)},
    "all truncated": {"truncated": np.ones(8, np.uint8)},
}


@pytest.mark.parametrize("reason", NOTHING)
def test_a_batch_without_signal_is_a_step_that_changes_nothing(made: ModuleType, tiny: Path, reason: str) -> None:
    one = learner(made, tiny)
    step.take_step(one, made.batch(step=0))
    before, then = weights(one), moments(one)
    figures = step.take_step(one, made.batch(step=1, **NOTHING[reason]))
    assert one.step == 2
    assert same(before, weights(one))
    assert same(then, moments(one))
    assert figures["optim/applied"] == 0.0
    assert figures["grad_norm"] == 0.0
    assert all(math.isfinite(value) for value in figures.values())


def test_a_batch_that_is_guarded_away_is_no_step_along_old_moments(made: ModuleType, tiny: Path) -> None:
    """Every sample dropped by the guard: the gradient is zero, and AdamW must not go on where it went before."""
    one = learner(made, tiny)
    step.take_step(one, own(one, made.batch(step=0)))
    before, then = weights(one), moments(one)
    assert any(float(each.abs().max()) > 0 for each in then)
    tokens = len(made.batch().logprobs)
    figures = [step.take_step(one, made.batch(step=number, logprobs=np.full(tokens, -60, np.float32))) for number in (1, 2, 3)]
    assert (figures[0]["is_guarded/mean"], figures[0]["grad_norm"], figures[0]["optim/applied"]) == (1.0, 0.0, 0.0)
    assert same(before, weights(one))
    assert same(then, moments(one))
    found = interlocks.alarms(figures, step=3, first_entropy=None, bound=4)
    (alarm,) = [each for each in found if each.code == "nothing_trained"]
    assert "100% of the trained rollouts have an absurd ratio" in alarm.words


def test_a_batch_whose_every_token_is_stopped_is_no_step_along_old_moments(made: ModuleType, tiny: Path) -> None:
    """reinforce with all ratios below its floor, yet none absurd."""
    one = learner(made, tiny, loss="reinforce")
    step.take_step(one, own(one, made.batch(step=0)))
    before = weights(one)
    far = own(one, made.batch(step=1))
    figures = step.take_step(one, replace(far, logprobs=np.minimum(far.logprobs + 2, 0).astype(np.float32)))
    assert (figures["is_masked/mean"], figures["is_guarded/mean"], figures["optim/applied"]) == (1.0, 0.0, 0.0)
    assert same(before, weights(one))


def test_a_gradient_that_is_not_finite_is_not_applied(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny)
    batch = own(one, made.batch())
    with torch.no_grad():
        next(one.policy.model.parameters())[2:] *= 1e38
    before = weights(one)
    figures = step.take_step(one, batch)
    assert not math.isfinite(figures["grad_norm"])
    assert figures["optim/applied"] == 0.0
    assert one.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, weights(one), strict=True))


def test_warm_up_is_linear_then_constant(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny, warmup_steps=4, learning_rate=1e-3)
    rates = []
    for number in range(6):
        one.step = number
        rates.append(step.learning_rate(one))
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_gradients_are_clipped_to_the_jobs_norm(made: ModuleType, tiny: Path) -> None:
    """AdamW's first moment after one step is (1 - beta1) times the clipped gradient."""
    one = learner(made, tiny, grad_clip=0.01, betas=(0.9, 0.95))
    figures = step.take_step(one, own(one, made.batch()))
    assert figures["grad_norm"] > 0.01
    moments = [state["exp_avg"] for state in one.optimizer.state.values()]
    norm = math.sqrt(sum(float(each.square().sum()) for each in moments))
    assert norm == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_weight_decay_is_for_matrices_only(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny, weight_decay=0.1)
    decays = {group["weight_decay"]: {each.dim() for each in group["params"]} for group in one.optimizer.param_groups}
    assert decays == {0.1: {2}, 0.0: {1}}


def test_metrics_are_raw_and_named_for_both_worlds(made: ModuleType, tiny: Path) -> None:
    one = learner(made, tiny)
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, math.nan], np.float32)
    batch = made.batch(
        step=3,
        rewards=rewards,
        truncated=np.array([1, 0, 0, 0, 0, 0, 0, 0], np.uint8),
        versions=np.full(len(made.batch().versions), 1, np.int32),
    )
    figures = step.take_step(one, batch)
    assert figures["reward"] == figures["reward/all/mean"] == pytest.approx(4 / 7)
    assert figures["off_policy/mean"] == figures["off_policy/max"] == 2.0
    assert figures["is_truncated/all/mean"] == 1 / 8
    assert figures["unscored/mean"] == pytest.approx(1 / 8)
    assert figures["frac_reward_zero_std"] == 0.5
    assert figures["seq_len/all/mean"] == pytest.approx(float(batch.lengths.mean()))
    assert figures["trained_rollouts"] == 6
    assert set(metrics.ALIASES.values()) <= set(figures)


def test_temperature_is_applied_before_the_log_probs(made: ModuleType, tiny: Path) -> None:
    """A higher temperature flattens: more entropy."""
    found = []
    for temperature in (0.5, 2.0):
        one = step.start(model.load(tiny), made.config(temperature=temperature))
        found.append(step.take_step(one, made.batch())["entropy"])
    assert found[0] < found[1]
