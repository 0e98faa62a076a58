"""Group-relative advantages: pure functions of rewards and group membership, both [N]; the result is float64 [N].

A NaN reward is "no score": it is no part of its group's baseline, and its advantage is 0. The caller keeps such a
rollout out of the loss; here it only must not spoil its neighbours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

ZERO_VARIANCE_TOLERANCE = 1e-6
STD_EPSILON = 1e-4

Advantages = Callable[[Tensor, Tensor], Tensor]


def mean(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean of its group's scored rewards (Dr. GRPO, arXiv 2503.20783).

    Args:
        rewards: float [N]; NaN means not scored.
        group: int64 [N], the group of each rollout, from 0.
    """
    scored = ~torch.isnan(rewards)
    plain = torch.where(scored, rewards, 0.0).double()
    return torch.where(scored, plain - _group_mean(plain, scored, group), 0.0)


def group_std(rewards: Tensor, group: Tensor) -> Tensor:
    """`mean` over the (population) standard deviation of the group's scored rewards (GRPO, arXiv 2402.03300).

    A group whose rewards agree to within 1e-6 has no signal: its advantages are exactly 0, not rounding noise over epsilon.
    Shapes as for `mean`.
    """
    scored = ~torch.isnan(rewards)
    centred = mean(rewards, group)
    std = _group_mean(centred.square(), scored, group).sqrt()
    return torch.where(std > ZERO_VARIANCE_TOLERANCE, centred / (std + STD_EPSILON), 0.0)


def leave_one_out(rewards: Tensor, group: Tensor) -> Tensor:
    """Reward minus the mean of the *other* scored rewards of its group (RLOO, arXiv 2402.14740); 0 for one that is alone.

    With n scored rewards that is n / (n - 1) times `mean`. Shapes as for `mean`.
    """
    scored = ~torch.isnan(rewards)
    count = _group_sum(scored.double(), group)
    return mean(rewards, group) * count / (count - 1).clamp_min(1)


def batch_std(rewards: Tensor, group: Tensor) -> Tensor:
    """`mean` over its own (population) standard deviation in the whole batch (ScaleRL, arXiv 2510.13786).

    Lite PPO (arXiv 2508.08221) divides by that of the rewards themselves, which grows with how much the groups' means differ.
    Zero for all where no group has signal. Shapes as for `mean`.
    """
    scored = ~torch.isnan(rewards)
    centred = mean(rewards, group)
    std = (centred.square().sum() / scored.sum().clamp_min(1)).sqrt()
    return centred / (std + STD_EPSILON) if float(std) > ZERO_VARIANCE_TOLERANCE else torch.zeros_like(centred)


RULES: dict[str, Advantages] = {
    "mean": mean,
    "group_std": group_std,
    "leave_one_out": leave_one_out,
    "batch_std": batch_std,
}


def _group_mean(values: Tensor, scored: Tensor, group: Tensor) -> Tensor:
    """The mean of each rollout's group over its scored members, spread back to [N]; 0 for a group with none."""
    return _group_sum(values * scored, group) / _group_sum(scored.to(values.dtype), group).clamp_min(1)


def _group_sum(values: Tensor, group: Tensor) -> Tensor:
    """The sum over each rollout's group, spread back to [N]."""
    groups = int(group.max()) + 1 if len(group) else 0
    return torch.zeros(groups, dtype=values.dtype).index_add_(0, group, values)[group]
