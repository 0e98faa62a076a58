"""What a step reports: prime-rl's names, with TRL's for the figures people look up first. Pure.

Rewards, lengths and truncation are raw: over all rollouts of the batch, before any filter. Token figures are over all
completion tokens that the policy sampled, shares of stopped tokens over the trained ones. A mean over nothing is left out,
not reported as 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from coordinator.learner.batch_file import Batch
from coordinator.learner.collate import MicroBatch
from coordinator.learner.losses import LossTerms
from coordinator.learner.team import Team

ALIASES = {
    "reward/all/mean": "reward",
    "reward/all/std": "reward_std",
    "mismatch_kl/all/mean": "kl",
    "entropy/all/mean": "entropy",
    "zero_variance/mean": "frac_reward_zero_std",
    "seq_len/all/mean": "completions/mean_length",
    "is_truncated/all/mean": "completions/clipped_ratio",
    "is_masked_low/mean": "clip_ratio/low_mean",
    "is_masked_high/mean": "clip_ratio/high_mean",
    "is_masked/mean": "clip_ratio/region_mean",
    "ratio/all/min": "sampling/importance_sampling_ratio/min",
    "ratio/all/mean": "sampling/importance_sampling_ratio/mean",
    "ratio/all/max": "sampling/importance_sampling_ratio/max",
    "logprob_gap/all/mean": "sampling/sampling_logp_difference/mean",
    "logprob_gap/all/max": "sampling/sampling_logp_difference/max",
    "optim/grad_norm": "grad_norm",
    "optim/lr": "learning_rate",
}
ZERO_VARIANCE_TOLERANCE = 1e-6


@dataclass(slots=True)
class Tally:
    """Sums over the micro-batches of one step, in float64."""

    loss: float = 0.0
    tokens: float = 0.0
    entropy: float = 0.0
    mismatch_kl: float = 0.0
    mismatch_kl_max: float = 0.0
    gap: float = 0.0
    gap_max: float = 0.0
    trained: float = 0.0
    low: float = 0.0
    high: float = 0.0
    capped: float = 0.0
    dropped: float = 0.0
    trained_rollouts: float = 0.0
    reference_kl: float = 0.0
    kept: float = 0.0
    ratio: float = 0.0
    ratio_squared: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = 0.0

    def add(self, micro: MicroBatch, terms: LossTerms, logprobs: Tensor, entropy: Tensor) -> None:
        """Count one micro-batch. `logprobs` and `entropy` are [b, c], without gradient."""
        log_ratio = logprobs.double() - micro.sampler.double()
        trained = micro.weights > 0
        self.loss += float(terms.loss.detach())
        self.entropy += float(entropy.double()[micro.sampled].sum())
        self._add_mismatch(log_ratio[micro.sampled])
        self._add_ratios(torch.exp(log_ratio[trained & ~terms.dropped[:, None]]))
        self.trained += float(trained.sum())
        self.low += float(terms.low.sum())
        self.high += float(terms.high.sum())
        self.capped += float(terms.capped.sum())
        self.reference_kl += float(terms.reference_kl.double().sum())
        self.dropped += float((terms.dropped & trained.any(dim=1)).sum())
        self.trained_rollouts += float(trained.any(dim=1).sum())

    def over(self, team: Team) -> Tally:
        """The same over all ranks."""
        names = [field.name for field in fields(self)]
        least, most = ["ratio_min"], ["mismatch_kl_max", "gap_max", "ratio_max"]
        sums = [name for name in names if name not in (*least, *most)]
        found = dict(zip(sums, team.total([getattr(self, name) for name in sums]), strict=True))
        found |= dict(zip(least, team.least([getattr(self, name) for name in least]), strict=True))
        found |= dict(zip(most, team.most([getattr(self, name) for name in most]), strict=True))
        return Tally(**found)

    def _add_mismatch(self, log_ratio: Tensor) -> None:
        mismatch = torch.exp(log_ratio) - log_ratio - 1
        self.tokens += len(log_ratio)
        self.mismatch_kl += float(mismatch.sum())
        self.mismatch_kl_max = max(self.mismatch_kl_max, float(mismatch.max()))
        self.gap += float(log_ratio.abs().sum())
        self.gap_max = max(self.gap_max, float(log_ratio.abs().max()))

    def _add_ratios(self, ratio: Tensor) -> None:
        if not len(ratio):
            return
        self.kept += len(ratio)
        self.ratio += float(ratio.sum())
        self.ratio_squared += float(ratio.square().sum())
        self.ratio_min = min(self.ratio_min, float(ratio.min()))
        self.ratio_max = max(self.ratio_max, float(ratio.max()))


def report(
    batch: Batch, tally: Tally, *, lr: float, grad_norm: float, applied: bool, with_reference: bool = False
) -> dict[str, float]:
    """All figures of one step but times. `docs/metrics.md` says what each is."""
    figures = {
        "loss/mean": tally.loss,
        "optim/lr": lr,
        "optim/grad_norm": grad_norm,
        "optim/applied": float(applied),
        **_batch_figures(batch),
        **_token_figures(tally, with_reference=with_reference),
    }
    return figures | {alias: figures[name] for name, alias in ALIASES.items() if name in figures}


def _batch_figures(batch: Batch) -> dict[str, float]:
    scored = batch.rewards[~np.isnan(batch.rewards)].astype(np.float64)
    ages = batch.staleness()
    figures = {
        "off_policy/mean": float(np.mean(ages)),
        "off_policy/max": float(max(ages)),
        "seq_len/all/mean": float(batch.sampled_lengths.mean()),
        "seq_len/all/max": float(batch.sampled_lengths.max()),
        "is_truncated/all/mean": float(batch.truncated.mean()),
        "unscored/mean": 1.0 - len(scored) / batch.rollouts,
        "zero_variance/mean": _zero_variance_share(batch),
    }
    if len(scored):
        figures |= {"reward/all/mean": float(scored.mean()), "reward/all/std": float(scored.std())}
    return figures


def _zero_variance_share(batch: Batch) -> float:
    """Share of groups whose scored rewards all agree (or that have none)."""
    groups = int(batch.group.max()) + 1
    flat = 0
    for number in range(groups):
        rewards = batch.rewards[batch.group == number]
        rewards = rewards[~np.isnan(rewards)]
        flat += len(rewards) == 0 or float(rewards.max() - rewards.min()) <= ZERO_VARIANCE_TOLERANCE
    return flat / groups


def _token_figures(tally: Tally, *, with_reference: bool) -> dict[str, float]:
    entropy = tally.entropy / tally.tokens
    kl = tally.mismatch_kl / tally.tokens
    figures = {
        "entropy/all/mean": entropy,
        "mismatch_kl/all/mean": kl,
        "mismatch_kl/all/max": tally.mismatch_kl_max,
        "logprob_gap/all/mean": tally.gap / tally.tokens,
        "logprob_gap/all/max": tally.gap_max,
        "tokens": tally.tokens,
        "trained_tokens": tally.trained,
        "trained_rollouts": tally.trained_rollouts,
    }
    if entropy > 0:
        figures["kl_ent_ratio/mean"] = kl / entropy
    return figures | _trained_figures(tally, with_reference=with_reference)


def _trained_figures(tally: Tally, *, with_reference: bool) -> dict[str, float]:
    if not tally.trained:
        return {}
    figures = {
        "is_masked/mean": (tally.low + tally.high) / tally.trained,
        "is_masked_low/mean": tally.low / tally.trained,
        "is_masked_high/mean": tally.high / tally.trained,
        "is_capped/mean": tally.capped / tally.trained,
        "is_guarded/mean": tally.dropped / tally.trained_rollouts,
    }
    if tally.kept:
        figures |= {
            "ratio/all/min": tally.ratio_min,
            "ratio/all/mean": tally.ratio / tally.kept,
            "ratio/all/max": tally.ratio_max,
            "effective_sample_size": tally.ratio**2 / tally.ratio_squared / tally.trained,
        }
        if with_reference:
            figures["reference_kl/all/mean"] = tally.reference_kl / tally.kept
    return figures
