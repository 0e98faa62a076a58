"""Policy losses: pure tensor functions of token log-probs. Both ratios are against the *sampler's* recorded log-probs.

Shapes, for b samples padded to c completion tokens:
    logprobs      float [b, c]  log-probs of the current policy (carries the gradient), temperature applied
    sampler       float [b, c]  log-probs recorded when the token was sampled
    advantages    float [b]     one per sample
    weights       float [b, c]  0: padding or not trained; else the sample's weight
    denominator   float         trained tokens of the *whole* batch, so that the sum over micro-batches is the batch's loss

The denominator counts the tokens with weight > 0, before anything that depends on the current policy: a token whose
gradient is cut by a mask, a clip or the guard still counts, so the step gets shorter as data gets staler.
Every exponential is taken of a log-ratio inside the guard's limits, so nothing here overflows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from coordinator.wire.job import AlgorithmConfig

GUARD_LOWEST_RATIO = 1e-4
GUARD_HIGHEST_RATIO = 100.0


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of a micro-batch and which tokens the trust region stopped."""

    loss: Tensor  # scalar, already over the denominator
    low: Tensor  # bool [b, c]: no gradient because the policy moved down far enough
    high: Tensor  # bool [b, c]: no gradient because the policy moved up far enough (or the dual clip)
    dropped: Tensor  # bool [b]: the whole sample was guarded away


class Loss(Protocol):
    """What `RULES` holds."""

    def __call__(
        self, logprobs: Tensor, sampler: Tensor, *, advantages: Tensor, weights: Tensor, denominator: float, rule: AlgorithmConfig
    ) -> LossTerms: ...


def guard(log_ratio: Tensor, trained: Tensor) -> Tensor:
    """Which samples to keep, bool [b]: those with every trained token's ratio in [1e-4, 100] (SkyRL's outlier mask).

    A single absurd ratio says that the tokens and the log-probs of a sample do not belong together; a NaN counts as absurd.

    Args:
        log_ratio: float [b, c], current minus sampler.
        trained: bool [b, c].
    """
    sane = (log_ratio >= math.log(GUARD_LOWEST_RATIO)) & (log_ratio <= math.log(GUARD_HIGHEST_RATIO))
    return (sane | ~trained).all(dim=1)


def dppo(
    logprobs: Tensor, sampler: Tensor, *, advantages: Tensor, weights: Tensor, denominator: float, rule: AlgorithmConfig
) -> LossTerms:
    """DPPO with the binary total-variation mask (arXiv 2602.04879), a capped ratio, and a drift penalty (Kimi K2.5, prime-rl).

    With p and mu the current and the sampler's probability of the token, r = p / mu and A its advantage, a token gives
        -sg(min(r, ratio_cap)) * A * log p  +  drift_penalty * (log r)^2
    where the first term is absent if A > 0 and p - mu > tv_high, or A < 0 and p - mu < -tv_low: the policy has already moved
    that far in the wanted direction. sg stops the gradient; below the cap the first term's gradient is that of -r * A.
    Without the cap a token that went from 1e-6 to 1e-2 would pass the mask with a weight of 10,000.
    """
    log_ratio, weights, kept = _guarded(logprobs, sampler, weights)
    with torch.no_grad():
        moved = torch.exp(logprobs) - torch.exp(sampler)
        up = advantages[:, None] > 0
        high = up & (moved > rule.tv_high) & (weights > 0)
        low = (advantages[:, None] < 0) & (moved < -rule.tv_low) & (weights > 0)
        weight = torch.exp(log_ratio).clamp_max(rule.ratio_cap)
        pull = torch.where(high | low, 0.0, weight * advantages[:, None])
    current = torch.where(weights > 0, logprobs, 0.0)
    token_loss = rule.drift_penalty * log_ratio.square() - pull * current
    return LossTerms((weights * token_loss).sum() / denominator, low, high, ~kept)


def ppo_clip(
    logprobs: Tensor, sampler: Tensor, *, advantages: Tensor, weights: Tensor, denominator: float, rule: AlgorithmConfig
) -> LossTerms:
    """The clipped surrogate of PPO (arXiv 1707.06347), with the dual clip of arXiv 1912.09729 unless it is off.

    With r the ratio and A the advantage, a token gives -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), and where A < 0
    no more than -dual_clip * A: else a negative sample that became likely again could pull without limit.
    """
    log_ratio, weights, kept = _guarded(logprobs, sampler, weights)
    ratio = torch.exp(log_ratio)
    pull = advantages[:, None]
    surrogate = torch.minimum(ratio * pull, ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high) * pull)
    high = (pull > 0) & (ratio > 1 + rule.clip_high)
    if rule.dual_clip is not None:
        surrogate = torch.where(pull < 0, torch.maximum(surrogate, rule.dual_clip * pull), surrogate)
        high = high | ((pull < 0) & (ratio > rule.dual_clip))
    low = (pull < 0) & (ratio < 1 - rule.clip_low)
    trained = weights > 0
    return LossTerms((weights * -surrogate).sum() / denominator, low & trained, high & trained, ~kept)


RULES: dict[str, Loss] = {"dppo": dppo, "ppo_clip": ppo_clip}


def _guarded(logprobs: Tensor, sampler: Tensor, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The log-ratio (0 where nothing is trained), the weights without dropped samples, and which samples were kept."""
    log_ratio = logprobs - sampler
    kept = guard(log_ratio.detach(), weights > 0)
    weights = torch.where(kept[:, None], weights, 0.0)
    return torch.where(weights > 0, log_ratio, 0.0), weights, kept
