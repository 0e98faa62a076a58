"""Policy losses: pure tensor functions of token log-probs. All ratios are against the *sampler's* recorded log-probs.

The loss of a batch is the sum over its tokens of weight * token loss, where the weights already hold the job's aggregation
(`aggregation.py`): so the sum over micro-batches is the batch's loss, however it was split. Which tokens count is decided before
the first forward pass: a token whose gradient is cut by a mask, a clip or the guard still counts, so the step gets shorter as
data gets staler. Every exponential is taken of a log-ratio inside the guard's limits, so nothing here overflows.

Below, r is a token's ratio pi / mu (current over sampler), A its advantage, and sg stops the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from coordinator.wire.job import AlgorithmConfig

GUARD_LOWEST_RATIO = 1e-4
GUARD_HIGHEST_RATIO = 100.0
REFERENCE_LIMIT = 20.0  # most that the reference's log-prob may be above the current one: e^20 is still a number in fp32


@dataclass(frozen=True, slots=True)
class Tokens:
    """b samples padded to c completion tokens."""

    logprobs: Tensor  # float [b, c]  of the current policy (carries the gradient), temperature applied
    sampler: Tensor  # float [b, c]  recorded when the token was sampled
    advantages: Tensor  # float [b]  one per sample
    weights: Tensor  # float [b, c]  0: padding, or not trained; else the token's weight in the batch's loss
    age: Tensor  # int [b, c]  the step minus the version that sampled the token
    reference: Tensor | None = None  # float [b, c]  of version 0, where the job asks for a KL to it


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of a micro-batch, and what became of its tokens."""

    loss: Tensor  # scalar
    low: Tensor  # bool [b, c]: no gradient because the policy moved down far enough
    high: Tensor  # bool [b, c]: no gradient because the policy moved up far enough (or the dual clip)
    capped: Tensor  # bool [b, c]: a gradient of less weight than its ratio
    dropped: Tensor  # bool [b]: the whole sample was guarded away
    reference_kl: Tensor  # float [b, c]: what each trained token adds to the KL to version 0 (0 without a reference), no gradient


@dataclass(frozen=True, slots=True)
class Trained:
    """What a rule sees: where nothing is trained, log-probs are 0, so that padding may hold anything."""

    current: Tensor  # float [b, c], carries the gradient
    sampler: Tensor  # float [b, c]
    pull: Tensor  # float [b, 1], the advantage
    age: Tensor  # int [b, c]
    mask: Tensor  # bool [b, c]: trained

    @property
    def log_ratio(self) -> Tensor:
        """Log r, [b, c]."""
        return self.current - self.sampler


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A rule's answer: [b, c] each. low, high and capped as in `LossTerms`, but may also mark tokens that are not trained."""

    value: Tensor
    low: Tensor
    high: Tensor
    capped: Tensor


Rule = Callable[[Trained, AlgorithmConfig], TokenLoss]


def policy_loss(tokens: Tokens, rule: AlgorithmConfig) -> LossTerms:
    """The job's loss on a micro-batch: guard, the rule of `rule.loss`, the KL to the reference, the weighted sum."""
    sampler = tokens.logprobs.detach() if rule.correction == "none" else tokens.sampler
    kept = guard((tokens.logprobs - sampler).detach(), tokens.weights > 0)
    weights = torch.where(kept[:, None], tokens.weights, 0.0)
    trained = weights > 0
    seen = Trained(
        torch.where(trained, tokens.logprobs, 0.0),
        torch.where(trained, sampler, 0.0),
        tokens.advantages[:, None],
        tokens.age,
        trained,
    )
    found = RULES[rule.loss](seen, rule)
    value, drift = found.value, torch.zeros_like(weights)
    if tokens.reference is not None:
        drift = reference_kl(seen, torch.where(trained, tokens.reference, 0.0))
        value = value + rule.reference_kl * drift
    low, high, capped = found.low & trained, found.high & trained, found.capped & trained
    return LossTerms((weights * value).sum(), low, high, capped, ~kept, drift.detach())


def guard(log_ratio: Tensor, trained: Tensor) -> Tensor:
    """Which samples to keep, bool [b]: those with every trained token's ratio in [1e-4, 100] (SkyRL's outlier mask).

    A single absurd ratio says that the tokens and the log-probs of a sample do not belong together; a NaN counts as absurd.

    Args:
        log_ratio: float [b, c], current minus sampler.
        trained: bool [b, c].
    """
    sane = (log_ratio >= math.log(GUARD_LOWEST_RATIO)) & (log_ratio <= math.log(GUARD_HIGHEST_RATIO))
    return (sane | ~trained).all(dim=1)


def reference_kl(seen: Trained, reference: Tensor) -> Tensor:
    """The KL to the reference by k3 (GRPO, arXiv 2402.03300), weighted by r (DeepSeek-V3.2, arXiv 2512.02556), [b, c].

    A token gives r * (rho - log rho - 1) with rho = reference / pi: on data of another policy its mean is the KL, and its slope
    r * (log pi - log reference) is the KL's. GRPO's own form has neither once data lags. Beyond e^20 the value's rho stands still;
    the slope is written out, as that of a rho which stands still would push the other way, e^20 times as hard.
    """
    with torch.no_grad():
        ratio, gap = torch.exp(seen.log_ratio), reference - seen.current
        value = ratio * (torch.expm1(gap.clamp_max(REFERENCE_LIMIT)) - gap)
        slope = -ratio * gap
    return value + slope * (seen.current - seen.current.detach())


def dppo(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """DPPO with the binary total-variation mask (arXiv 2602.04879), a capped ratio, and a drift penalty (Kimi K2.5, prime-rl).

    A token gives  -sg(min(r, ratio_cap)) * A * log pi  +  drift_penalty * (log r)^2,
    where the first term is absent if A > 0 and pi - mu > tv_high, or A < 0 and pi - mu < -tv_low: the policy has already moved
    that far in the wanted direction. Below the cap the first term's gradient is that of -r * A. Without the cap a token that
    went from 1e-6 to 1e-2 would pass the mask with a weight of 10,000.
    """
    with torch.no_grad():
        moved = torch.exp(seen.current) - torch.exp(seen.sampler)
        high = (seen.pull > 0) & (moved > rule.tv_high)
        low = (seen.pull < 0) & (moved < -rule.tv_low)
        ratio = torch.exp(seen.log_ratio)
        pull = torch.where(high | low, 0.0, ratio.clamp_max(rule.ratio_cap) * seen.pull)
    value = rule.drift_penalty * seen.log_ratio.square() - pull * seen.current
    return TokenLoss(value, low, high, (ratio > rule.ratio_cap) & ~high & ~low)


def ppo_clip(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """The clipped surrogate of PPO (arXiv 1707.06347), with the dual clip of arXiv 1912.09729 unless it is off.

    A token gives -min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A), and where A < 0 no more than -dual_clip * A: else a
    negative sample that became likely again could pull without limit. With clip_high above clip_low it is DAPO's (arXiv 2503.14476).
    """
    ratio = torch.exp(seen.log_ratio)
    value, low, high = _clipped(ratio, seen.pull, rule)
    if rule.dual_clip is not None:
        value = torch.where(seen.pull < 0, torch.minimum(value, -rule.dual_clip * seen.pull), value)
        high = high | ((seen.pull < 0) & (ratio > rule.dual_clip))
    return TokenLoss(value, low, high, torch.zeros_like(high))


def cispo(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """CISPO (MiniMax-M1, arXiv 2506.13585): a token gives -sg(min(r, ratio_cap)) * A * log pi.

    No token loses its gradient; only the weight is cut, from above alone, as in the paper. That is no trust region: under lag it
    was seen to drift (arXiv 2602.04879).
    """
    with torch.no_grad():
        ratio = torch.exp(seen.log_ratio)
        weight = ratio.clamp_max(rule.ratio_cap)
    none = torch.zeros_like(seen.mask)
    return TokenLoss(-weight * seen.pull * seen.current, none, none, ratio > rule.ratio_cap)


def gspo(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """GSPO (arXiv 2507.18071): PPO's clip on one ratio a sample, the geometric mean of those of its trained tokens.

    With s = exp(mean log r), every token of the sample gives -min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A). With the
    aggregation "sequence_mean", its default, the sum is the paper's: each sample counts once.
    """
    count = seen.mask.sum(dim=1, keepdim=True).clamp_min(1)
    ratio = torch.exp(seen.log_ratio.sum(dim=1, keepdim=True) / count)
    value, low, high = (each.expand_as(seen.mask) for each in _clipped(ratio, seen.pull, rule))
    return TokenLoss(value, low, high, torch.zeros_like(seen.mask))


def reinforce(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """Importance-weighted REINFORCE (Williams 1992) with a clip on both sides (IcePop, arXiv 2510.18855).

    A token gives -sg(r) * A * log pi if ratio_floor <= r <= ratio_cap, else nothing, whatever the sign of A.
    """
    with torch.no_grad():
        ratio = torch.exp(seen.log_ratio)
        low, high = ratio < rule.ratio_floor, ratio > rule.ratio_cap
        pull = torch.where(low | high, 0.0, ratio * seen.pull)
    return TokenLoss(-pull * seen.current, low, high, torch.zeros_like(low))


def decoupled(seen: Trained, rule: AlgorithmConfig) -> TokenLoss:
    """Decoupled PPO (arXiv 2110.00641; AReaL, arXiv 2505.24298) with a mask on the behaviour ratio.

    With pi' the proximal policy (`proximal`), a token gives -min(w, ratio_cap) * min(q * A, clip(q, 1 - clip_low, 1 + clip_high) * A)
    with q = pi / pi' and w = sg(pi' / mu), or nothing if A > 0 and w > ratio_cap, or A < 0 and w < ratio_floor. Without the mask nothing
    bounds how far the learner goes from the sampler (measured: unstable from S = 3 on); a mask that ignores the sign of A also stops
    the tokens that would come back, and drifts as well.
    """
    anchor = proximal(seen.current.detach(), seen.sampler, seen.age)
    weight = torch.exp(anchor - seen.sampler)
    under, over = (seen.pull < 0) & (weight < rule.ratio_floor), (seen.pull > 0) & (weight > rule.ratio_cap)
    value, low, high = _clipped(torch.exp(seen.current - anchor), seen.pull, rule)
    low, high = low | under, high | over
    capped = (weight > rule.ratio_cap) & ~high & ~low
    return TokenLoss(torch.where(under | over, 0.0, weight.clamp_max(rule.ratio_cap) * value), low, high, capped)


def proximal(current: Tensor, sampler: Tensor, age: Tensor) -> Tensor:
    """Log-probs of the policy one version before the current one, [b, c], from the sampler's `age` versions before it.

    Log-linear between the two (A-3PO, arXiv 2512.06547): at age 1 it is the sampler, so the loss is plain PPO; at age 0 the
    current policy itself. The recomputed one needs another forward pass, and with one optimiser step a batch never clips.
    """
    steps = age.to(current.dtype)
    share = torch.where(age > 0, (steps - 1) / steps.clamp_min(1), 1.0)
    return sampler + share * (current - sampler)


RULES: dict[str, Rule] = {
    "dppo": dppo,
    "ppo_clip": ppo_clip,
    "cispo": cispo,
    "gspo": gspo,
    "reinforce": reinforce,
    "decoupled": decoupled,
}


def _clipped(ratio: Tensor, pull: Tensor, rule: AlgorithmConfig) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's pessimistic token loss, and where it has no gradient (below, above)."""
    value = -torch.minimum(ratio * pull, ratio.clamp(1 - rule.clip_low, 1 + rule.clip_high) * pull)
    return value, (pull < 0) & (ratio < 1 - rule.clip_low), (pull > 0) & (ratio > 1 + rule.clip_high)
