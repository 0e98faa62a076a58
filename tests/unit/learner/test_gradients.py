"""Golden gradients, in float64: every split and padding gives the gradient of a plain reference, token by token."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.learner import collate, metrics, model, step
from coordinator.learner.batch_file import Batch
from coordinator.wire.job import AlgorithmConfig

TOLERANCE = 1e-6
TEMPERATURE = 0.8
LOSSES: dict[str, dict[str, Any]] = {
    "dppo": {"loss": "dppo", "drift_penalty": 0.05, "tv_low": 0.005, "tv_high": 0.003, "ratio_cap": 1.3},
    "dppo, group std": {"loss": "dppo", "advantage": "group_std", "tv_low": 0.005, "tv_high": 0.003, "ratio_cap": 1.3},
    "ppo_clip": {"loss": "ppo_clip", "dual_clip": 1.4},
    "ppo_clip, group std, no dual clip": {"loss": "ppo_clip", "dual_clip": None, "advantage": "group_std", "truncated": "keep"},
}


class Case:
    """A float64 learner, and a batch of its own tokens on which every branch of the losses is taken."""

    def __init__(self, made: ModuleType, directory: Path, algorithm: dict[str, Any]) -> None:
        policy = model.load(directory)
        policy.model.double()
        self.learner = step.start(policy, made.config(temperature=TEMPERATURE, **algorithm))
        plain: Batch = made.batch(seed=5)
        self.batch: Batch = made.batch(
            seed=5,
            logprobs=self._sampler(plain),
            rewards=np.array([1, 0, math.nan, 1, 0.5, 0, 1, 0.25], np.float32),
            truncated=np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8),
            weight=np.array([1, 1, 1, 1, 1, 0, 1, 0.5], np.float32),
        )

    def _sampler(self, batch: Batch) -> np.ndarray:
        """Log-probs of the policy, moved by up to a factor of 2, those of rollout 6 by one of 150 in one place."""
        noise = np.random.default_rng(0).uniform(-0.7, 0.7, len(batch.logprobs))
        own = np.concatenate([each.detach().numpy() for each in rollout_logprobs(self.learner, batch)])
        moved = np.minimum(own + noise, -1e-3)
        first_of_6 = int(batch.lengths[:6].sum())
        moved[first_of_6] = own[first_of_6] - math.log(150)
        return moved.astype(np.float32)

    def gradient(self, parts: list[list[int]]) -> list[torch.Tensor]:
        """By the learner's own code, for one way to split the batch."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        signal = collate.signal_of(self.batch, self.learner.config.algorithm)
        tally = metrics.Tally()
        for rows in parts:
            step.accumulate(self.learner, collate.collate(self.batch, signal, rows), signal.trained_tokens, tally)
        self.tally = tally
        return [parameter.grad.clone() for parameter in self.learner.policy.model.parameters()]


def rollout_logprobs(learner: step.Learner, batch: Batch) -> list[torch.Tensor]:
    """Log-probs of each rollout's completion, one sequence at a time, without padding."""
    found = []
    prompt_at = token_at = 0
    for prompt_length, length in zip(batch.prompt_lengths, batch.lengths, strict=True):
        prompt = batch.prompt_ids[prompt_at : prompt_at + prompt_length].tolist()
        tokens = batch.token_ids[token_at : token_at + length].tolist()
        logits = learner.policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0] / TEMPERATURE
        every = torch.log_softmax(logits, dim=-1)
        found.append(torch.stack([every[prompt_length - 1 + place, token] for place, token in enumerate(tokens)]))
        prompt_at, token_at = prompt_at + prompt_length, token_at + length
    return found


def reference_advantages(batch: Batch, rule: AlgorithmConfig) -> list[float]:
    """Reward minus the mean of the group's scored rewards, over their standard deviation if the rule says so."""
    rewards = [float(each) for each in batch.rewards]
    found = []
    for reward, group in zip(rewards, batch.group, strict=True):
        scored = [other for other, its in zip(rewards, batch.group, strict=True) if its == group and not math.isnan(other)]
        mean = sum(scored) / len(scored)
        std = math.sqrt(sum((other - mean) ** 2 for other in scored) / len(scored))
        scale = std + 1e-4 if rule.advantage == "group_std" else 1.0
        found.append(0.0 if math.isnan(reward) else (reward - mean) / scale)
    return found


def reference_token(rule: AlgorithmConfig, logprob: torch.Tensor, sampler: float, advantage: float) -> torch.Tensor:
    """The loss of one token, from the formula of the paper."""
    ratio = torch.exp(logprob - sampler)
    if rule.loss == "ppo_clip":
        clipped = min(max(ratio.item(), 1 - rule.clip_low), 1 + rule.clip_high)
        objective = ratio * advantage if (ratio * advantage).item() <= clipped * advantage else torch.tensor(clipped * advantage)
        if rule.dual_clip is not None and advantage < 0 and objective.item() < rule.dual_clip * advantage:
            objective = torch.tensor(rule.dual_clip * advantage)
        return -objective
    moved = math.exp(logprob.item()) - math.exp(sampler)
    masked = (advantage > 0 and moved > rule.tv_high) or (advantage < 0 and moved < -rule.tv_low)
    pull = torch.tensor(0.0) if masked else min(ratio.item(), rule.ratio_cap) * advantage * logprob
    return rule.drift_penalty * (logprob - sampler) ** 2 - pull


def reference_gradient(case: Case) -> list[torch.Tensor]:
    """Loops over rollouts and tokens; nothing is padded, batched or vectorised."""
    batch, rule, learner = case.batch, case.learner.config.algorithm, case.learner
    learner.optimizer.zero_grad(set_to_none=True)
    total, count, token_at = torch.tensor(0.0, dtype=torch.float64), 0, 0
    advantages = reference_advantages(batch, rule)
    for row, logprobs in enumerate(rollout_logprobs(learner, batch)):
        samplers = [float(each) for each in batch.logprobs[token_at : token_at + len(logprobs)]]
        token_at += len(logprobs)
        cut = rule.truncated == "mask" and batch.truncated[row]
        if math.isnan(batch.rewards[row]) or cut or batch.weight[row] == 0:
            continue
        count += len(logprobs)
        ratios = [math.exp(current.item() - sampler) for current, sampler in zip(logprobs, samplers, strict=True)]
        if not all(1e-4 <= ratio <= 100 for ratio in ratios):
            continue
        for logprob, sampler in zip(logprobs, samplers, strict=True):
            total = total + float(batch.weight[row]) * reference_token(rule, logprob, sampler, advantages[row])
    (total / count).backward()
    return [parameter.grad.clone() for parameter in learner.policy.model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= TOLERANCE * float(other.norm())


@pytest.fixture(scope="module", params=LOSSES, ids=list(LOSSES))
def case(request: pytest.FixtureRequest, made: ModuleType, tiny: Path) -> Case:
    return Case(made, tiny, LOSSES[request.param])


@pytest.fixture(scope="module")
def expected(case: Case) -> list[torch.Tensor]:
    return reference_gradient(case)


def test_the_case_takes_every_branch(case: Case) -> None:
    """Else the comparison below proves less than it says."""
    case.gradient([list(range(8))])
    assert case.tally.low > 0
    assert case.tally.high > 0
    assert case.tally.dropped == 1


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_every_token_budget_gives_the_reference_gradient(case: Case, expected: list[torch.Tensor], budget: int) -> None:
    parts = collate.split(case.batch, budget)
    assert_same(case.gradient(parts), expected)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(8)), cuts=st.sets(st.integers(1, 7)))
def test_any_partition_in_any_order_gives_the_reference_gradient(
    case: Case, expected: list[torch.Tensor], order: list[int], cuts: set[int]
) -> None:
    """Each partition pads differently: a short completion beside a long one, a long prompt beside a short one."""
    edges = [0, *sorted(cuts), 8]
    parts = [order[start:end] for start, end in pairwise(edges)]
    assert_same(case.gradient(parts), expected)


def test_the_reference_gradient_is_not_zero(expected: list[torch.Tensor]) -> None:
    assert all(float(each.norm()) > 0 for each in expected)
