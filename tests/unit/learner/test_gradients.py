"""Golden gradients, in float64: every split and padding gives the gradient of a plain reference, token by token."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
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
from tests.unit.learner import papers

TOLERANCE = 1e-6
TEMPERATURE = 0.8
TIGHT = {"clip_low": 0.05, "clip_high": 0.05}
LOSSES: dict[str, dict[str, Any]] = {
    "dppo": {"loss": "dppo", "drift_penalty": 0.05, "tv_low": 0.005, "tv_high": 0.003, "ratio_cap": 1.3},
    "dppo, group std": {"loss": "dppo", "advantage": "group_std", "tv_low": 0.005, "tv_high": 0.003, "ratio_cap": 1.3},
    "ppo_clip": {"loss": "ppo_clip", "dual_clip": 1.4},
    "ppo_clip, group std, no dual clip": {"loss": "ppo_clip", "dual_clip": None, "advantage": "group_std", "truncated": "keep"},
    "ppo_clip, kl, constant": {"loss": "ppo_clip", "reference_kl": 0.2, "aggregation": "constant"},
    "cispo, prompts": {"loss": "cispo", "ratio_cap": 1.2, "aggregation": "prompt_mean", "advantage": "batch_std"},
    "gspo": {"loss": "gspo", **TIGHT},
    "gspo, tokens, kl": {"loss": "gspo", **TIGHT, "aggregation": "token_mean", "reference_kl": 0.2},
    "reinforce, leave one out": {"loss": "reinforce", "ratio_floor": 0.8, "ratio_cap": 1.2, "advantage": "leave_one_out"},
    "reinforce, sequences": {"loss": "reinforce", "ratio_floor": 0.8, "ratio_cap": 1.2, "aggregation": "sequence_mean"},
    "decoupled": {"loss": "decoupled", **TIGHT, "ratio_floor": 0.8, "ratio_cap": 1.2},
}
CUTS_NO_GRADIENT = ("cispo",)
Arrange = Callable[[Batch, collate.Signal, list[int]], collate.MicroBatch]
SEVERAL_TURNS = "dppo", "ppo_clip, kl, constant", "gspo", "reinforce, sequences", "cispo, prompts", "decoupled"


class Case:
    """A float64 learner, and a batch of its own tokens on which every branch of the losses is taken."""

    def __init__(self, made: ModuleType, directory: Path, algorithm: dict[str, Any], *, has_turns: bool) -> None:
        policy = model.load(directory)
        policy.model.double()
        self.learner = step.start(policy, made.config(temperature=TEMPERATURE, **algorithm))
        _nudge(policy.model)
        plain: Batch = made.batch(seed=5)
        self.batch: Batch = made.batch(
            seed=5,
            logprobs=self._sampler(plain),
            rewards=np.array([1, 0, math.nan, 1, 0.5, 0, 1, 0.25], np.float32),
            truncated=np.array([0, 0, 0, 1, 0, 0, 0, 0], np.uint8),
            weight=np.array([1, 1, 1, 1, 1, 0, 1, 0.5], np.float32),
        )
        if has_turns:
            self._put_in_turns()

    def _sampler(self, batch: Batch) -> np.ndarray:
        """Log-probs of the policy, moved by up to a factor of 2 a token and less a rollout; one of rollout 6 by a factor of 150."""
        noise = np.random.default_rng(0).uniform(-0.7, 0.7, len(batch.logprobs))
        noise += np.repeat([-0.3, 0.3, 0, 0, 0.3, 0, 0, -0.3], batch.lengths)
        own = np.concatenate([each.detach().numpy() for each in rollout_logprobs(self.learner.policy, batch)])
        moved = np.minimum(own + noise, -1e-3)
        first_of_6 = int(batch.lengths[:6].sum())
        moved[first_of_6] = own[first_of_6] - math.log(150)
        return moved.astype(np.float32)

    def _put_in_turns(self) -> None:
        """Of each completion of three tokens and more, the environment put in the second and every third from there on."""
        places = np.concatenate([np.arange(length) for length in self.batch.lengths])
        sampled = ~((places % 3 == 1) & (np.repeat(self.batch.lengths, self.batch.lengths) >= 3))
        self.batch = replace(
            self.batch,
            sampled=sampled,
            logprobs=np.where(sampled, self.batch.logprobs, math.nan).astype(np.float32),
            versions=np.where(sampled, self.batch.versions, -1).astype(np.int32),
        )

    def gradient(self, parts: list[list[int]], arrange: Arrange = collate.collate) -> list[torch.Tensor]:
        """By the learner's own code, for one way to split the batch and lay it out."""
        self.learner.optimizer.zero_grad(set_to_none=True)
        signal = collate.signal_of(self.batch, self.learner.config)
        tally = metrics.Tally()
        for rows in parts:
            step.accumulate(self.learner, arrange(self.batch, signal, rows), tally)
        self.tally = tally
        return [parameter.grad.clone() for parameter in self.learner.policy.model.parameters()]


def _nudge(weights: torch.nn.Module) -> None:
    """Away from version 0, so that a KL to it has a slope."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in weights.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)


def rollout_logprobs(policy: model.Policy, batch: Batch) -> list[torch.Tensor]:
    """Log-probs of each rollout's completion, one sequence at a time, without padding."""
    found = []
    prompt_at = token_at = 0
    for prompt_length, length in zip(batch.prompt_lengths, batch.lengths, strict=True):
        prompt = batch.prompt_ids[prompt_at : prompt_at + prompt_length].tolist()
        tokens = batch.token_ids[token_at : token_at + length].tolist()
        logits = policy.model(input_ids=torch.tensor([prompt + tokens])).logits[0] / TEMPERATURE
        every = torch.log_softmax(logits, dim=-1)
        found.append(torch.stack([every[prompt_length - 1 + place, token] for place, token in enumerate(tokens)]))
        prompt_at, token_at = prompt_at + prompt_length, token_at + length
    return found


def reference_gradient(case: Case) -> list[torch.Tensor]:
    """Loops over rollouts and tokens, by the papers' formulas; nothing is padded, batched or vectorised."""
    batch, config, learner = case.batch, case.learner.config, case.learner
    rule = config.algorithm
    learner.optimizer.zero_grad(set_to_none=True)
    of_reference = rollout_logprobs(learner.reference, batch) if learner.reference is not None else None
    advantages = papers.advantages(rule.advantage, [float(each) for each in batch.rewards], batch.group.tolist())
    found, groups, token_at = [], [], 0
    for row, every in enumerate(rollout_logprobs(learner.policy, batch)):
        places = np.flatnonzero(batch.sampled[token_at : token_at + len(every)])
        here, logprobs = token_at + places, every[places]
        token_at += len(every)
        cut = rule.truncated == "mask" and batch.truncated[row]
        if math.isnan(batch.rewards[row]) or cut or batch.weight[row] == 0:
            continue
        samplers, ages = [float(each) for each in batch.logprobs[here]], (batch.step - batch.versions[here]).tolist()
        terms = [0.0 * logprobs[0]] * len(logprobs)
        if papers.is_sane(logprobs, samplers):
            terms = papers.LOSSES[rule.loss](rule, logprobs, samplers, ages, advantages[row])
            if of_reference is not None:
                pairs = zip(terms, logprobs, samplers, of_reference[row][places], strict=True)
                terms = [term + rule.reference_kl * papers.reference_kl(logp, mu, its.item()) for term, logp, mu, its in pairs]
        found.append([float(batch.weight[row]) * term for term in terms])
        groups.append(int(batch.group[row]))
    papers.aggregate(rule.aggregation, found, groups, config.sampling.max_new_tokens).backward()
    return [parameter.grad.clone() for parameter in learner.policy.model.parameters()]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert float((one - other).norm()) <= TOLERANCE * float(other.norm())


@pytest.fixture(scope="module", params=[*LOSSES, *(f"{name} | turns" for name in SEVERAL_TURNS)])
def case(request: pytest.FixtureRequest, made: ModuleType, tiny: Path) -> Case:
    name, _, turns = request.param.partition(" | ")
    return Case(made, tiny, LOSSES[name], has_turns=bool(turns))


@pytest.fixture(scope="module")
def expected(case: Case) -> list[torch.Tensor]:
    return reference_gradient(case)


def test_the_case_takes_every_branch(case: Case) -> None:
    """Else the comparison below proves less than it says."""
    case.gradient([list(range(8))])
    if case.learner.config.algorithm.loss in CUTS_NO_GRADIENT:
        assert case.tally.capped > 0
    else:
        assert case.tally.low > 0
        assert case.tally.high > 0
    assert case.tally.dropped == 1


@pytest.mark.parametrize("budget", [1, 20, 40, 1000])
def test_every_token_budget_gives_the_reference_gradient(case: Case, expected: list[torch.Tensor], budget: int) -> None:
    parts = collate.split(case.batch, budget)
    assert_same(case.gradient(parts), expected)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(order=st.permutations(range(8)), cuts=st.sets(st.integers(1, 7)), arrange=st.sampled_from([collate.collate, collate.pack]))
def test_any_partition_in_any_order_gives_the_reference_gradient(
    case: Case, expected: list[torch.Tensor], order: list[int], cuts: set[int], arrange: Arrange
) -> None:
    """Each partition pads differently: a short completion beside a long one, a long prompt beside a short one; or not at all."""
    edges = [0, *sorted(cuts), 8]
    parts = [order[start:end] for start, end in pairwise(edges)]
    assert_same(case.gradient(parts, arrange), expected)


def test_packed_and_padded_give_the_same_gradient(case: Case) -> None:
    """To rounding in float64."""
    padded = case.gradient([list(range(8))])
    for one, other in zip(case.gradient([list(range(8))], collate.pack), padded, strict=True):
        assert float((one - other).norm()) <= 1e-12 * float(other.norm())


def test_the_reference_gradient_is_not_zero(expected: list[torch.Tensor]) -> None:
    assert all(float(each.norm()) > 0 for each in expected)
