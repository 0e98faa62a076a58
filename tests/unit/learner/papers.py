"""Losses, advantages and aggregations as their papers write them: loops over numbers, one sample and one token at a time.

Written from the formulas, without a look at the product's tensor code, in float64. A log-prob may be a torch scalar, so that a
gradient comes out. `terms(rule, ...)` gives one term for each token of a sample, to be summed with the aggregation's weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

Scalar = torch.Tensor


def clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))


def surrogate(ratio: Scalar, advantage: float, low: float, high: float) -> Scalar:
    """PPO eq. 7: the lesser of the plain and the clipped objective; a constant where the clipped one is less."""
    plain, cut = ratio.item() * advantage, clip(ratio.item(), low, high) * advantage
    return ratio * advantage if plain <= cut else torch.tensor(cut, dtype=torch.float64)


def dppo(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """DPPO: the policy gradient weighted by the (capped) ratio, masked by the change of probability, plus a squared log-ratio."""
    found = []
    for logp, mu in zip(logps, mus, strict=True):
        moved = math.exp(logp.item()) - math.exp(mu)
        masked = (advantage > 0 and moved > rule.tv_high) or (advantage < 0 and -moved > rule.tv_low)
        weight = 0.0 if masked else min(math.exp(logp.item() - mu), rule.ratio_cap)
        found.append(-weight * advantage * logp + rule.drift_penalty * (logp - mu) ** 2)
    return found


def ppo_clip(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """PPO's clip; dual clip (eq. 5 of its paper): for A < 0 the objective is at least c * A."""
    found = []
    for logp, mu in zip(logps, mus, strict=True):
        objective = surrogate(torch.exp(logp - mu), advantage, 1 - rule.clip_low, 1 + rule.clip_high)
        if advantage < 0 and rule.dual_clip is not None and objective.item() < rule.dual_clip * advantage:
            objective = torch.tensor(rule.dual_clip * advantage, dtype=torch.float64)
        found.append(-objective)
    return found


def cispo(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """CISPO eq. 4: sg(clipped importance weight) * A * log pi, no lower bound on the weight."""
    return [-min(math.exp(logp.item() - mu), rule.ratio_cap) * advantage * logp for logp, mu in zip(logps, mus, strict=True)]


def gspo(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """GSPO eq. 5 and 7: one ratio a sequence, (pi(y) / mu(y)) ^ (1 / |y|)."""
    likelihood = torch.tensor(1.0, dtype=torch.float64)
    for logp, mu in zip(logps, mus, strict=True):
        likelihood = likelihood * (torch.exp(logp) / math.exp(mu))
    ratio = likelihood ** (1 / len(logps))
    return [-surrogate(ratio, advantage, 1 - rule.clip_low, 1 + rule.clip_high)] * len(logps)


def reinforce(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """IcePop: M(k) = k inside the window, 0 outside; M(k) * A * grad log pi."""
    found = []
    for logp, mu in zip(logps, mus, strict=True):
        k = math.exp(logp.item()) / math.exp(mu)
        inside = rule.ratio_floor <= k <= rule.ratio_cap
        found.append(-(k if inside else 0.0) * advantage * logp)
    return found


def decoupled(rule: Any, logps: Sequence[Scalar], mus: Sequence[float], ages: Sequence[int], advantage: float) -> list[Scalar]:
    """Decoupled PPO: (pi_prox / pi_behav) * PPO's objective with ratio pi / pi_prox; pi_prox^d = pi_behav * pi^(d - 1) (A-3PO)."""
    found = []
    for logp, mu, age in zip(logps, mus, ages, strict=True):
        current, behaviour = math.exp(logp.item()), math.exp(mu)
        prox = current if age == 0 else (behaviour * current ** (age - 1)) ** (1 / age)
        weight = prox / behaviour
        if (advantage > 0 and weight > rule.ratio_cap) or (advantage < 0 and weight < rule.ratio_floor):
            weight = 0.0
        found.append(
            -min(weight, rule.ratio_cap) * surrogate(torch.exp(logp) / prox, advantage, 1 - rule.clip_low, 1 + rule.clip_high)
        )
    return found


LOSSES: dict[str, Callable[..., list[Scalar]]] = {
    "dppo": dppo,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "decoupled": decoupled,
}


def reference_kl(logp: Scalar, mu: float, reference: float) -> Scalar:
    """GRPO eq. 4, pi_ref / pi - log(pi_ref / pi) - 1, times pi / mu (DeepSeek-V3.2, section 3.1)."""
    ratio = math.exp(reference) / torch.exp(logp)
    return torch.exp(logp) / math.exp(mu) * (ratio - torch.log(ratio) - 1)


def is_sane(logps: Sequence[Scalar], mus: Sequence[float]) -> bool:
    """SkyRL's outlier mask: every ratio of the sample in [1e-4, 100]."""
    return all(1e-4 <= math.exp(logp.item() - mu) <= 100 for logp, mu in zip(logps, mus, strict=True))


def advantages(name: str, rewards: Sequence[float], groups: Sequence[int]) -> list[float]:
    """Of each rollout; a NaN reward is none, in no baseline, and its advantage is 0."""
    members: dict[int, list[float]] = {}
    for reward, group in zip(rewards, groups, strict=True):
        members.setdefault(group, []).extend([] if math.isnan(reward) else [reward])

    def centred(reward: float, group: int) -> float:
        return reward - sum(members[group]) / len(members[group])

    def one(reward: float, group: int) -> float:
        scored = members[group]
        if math.isnan(reward):
            return 0.0
        if name == "leave_one_out":
            others = (sum(scored) - reward) / (len(scored) - 1) if len(scored) > 1 else reward
            return reward - others
        if name == "mean":
            return centred(reward, group)
        if name == "group_std":
            spread = [centred(other, group) for other in scored]
        else:
            spread = [centred(other, its) for its, all_of_it in members.items() for other in all_of_it]
        std = math.sqrt(sum(each**2 for each in spread) / len(spread))
        return centred(reward, group) / (std + 1e-4) if std > 1e-6 else 0.0

    return [one(reward, group) for reward, group in zip(rewards, groups, strict=True)]


def aggregate(name: str, losses: Sequence[Sequence[Scalar]], groups: Sequence[int], max_new_tokens: int) -> Scalar:
    """One number from the token losses of the rollouts that are trained, as the papers write the sums."""
    zero = torch.tensor(0.0, dtype=torch.float64)
    if name == "token_mean":
        return sum((sum(each, zero) for each in losses), zero) / sum(len(each) for each in losses)
    if name == "sequence_mean":
        return sum((sum(each, zero) / len(each) for each in losses), zero) / len(losses)
    if name == "constant":
        return sum((sum(each, zero) / max_new_tokens for each in losses), zero) / len(losses)
    prompts = sorted(set(groups))
    total = zero
    for prompt in prompts:
        tokens = [token for each, group in zip(losses, groups, strict=True) if group == prompt for token in each]
        total = total + sum(tokens, zero) / len(tokens)
    return total / len(prompts)
