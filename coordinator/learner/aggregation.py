"""How token losses become one number: a weight for every token of a rollout, so that the batch's loss is a plain weighted sum.

Pure functions of all of a batch's rollouts, [N] each; the result is float64 [N], the weight of one token of each rollout, 0 for
rollouts that are not trained. The constants count the very rollouts and tokens that are summed over, in the whole batch, so no
split into micro-batches or ranks changes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What the weights depend on. At least one rollout is trained, or all weights are 0."""

    lengths: Tensor  # int64 [N], completion tokens that the policy sampled
    trained: Tensor  # bool [N]
    group: Tensor  # int64 [N], from 0
    max_new_tokens: int


Aggregation = Callable[[Rollouts], Tensor]


def token_mean(of: Rollouts) -> Tensor:
    """Every token counts the same: 1 / trained tokens of the batch (DAPO, arXiv 2503.14476)."""
    return _over(of, _sum(of.lengths, of).expand_as(of.lengths))


def sequence_mean(of: Rollouts) -> Tensor:
    """Every rollout counts the same: 1 / (its tokens * trained rollouts) (GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071)."""
    return _over(of, of.lengths * of.trained.sum())


def prompt_mean(of: Rollouts) -> Tensor:
    """Every group counts the same: 1 / (trained tokens of its group * groups with a trained rollout) (ScaleRL, arXiv 2510.13786)."""
    groups = int(of.group.max()) + 1
    tokens = torch.zeros(groups, dtype=torch.int64).index_add_(0, of.group, of.lengths * of.trained)
    return _over(of, tokens[of.group] * (tokens > 0).sum())


def constant(of: Rollouts) -> Tensor:
    """No length decides: 1 / (max_new_tokens * trained rollouts) (Dr. GRPO, arXiv 2503.20783)."""
    return _over(of, (of.max_new_tokens * of.trained.sum()).expand_as(of.lengths))


RULES: dict[str, Aggregation] = {
    "token_mean": token_mean,
    "sequence_mean": sequence_mean,
    "prompt_mean": prompt_mean,
    "constant": constant,
}


def _sum(values: Tensor, of: Rollouts) -> Tensor:
    return (values * of.trained).sum()


def _over(of: Rollouts, constants: Tensor) -> Tensor:
    return torch.where(of.trained, 1.0 / constants.clamp_min(1).double(), 0.0)
