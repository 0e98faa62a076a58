"""FSDP2: every rank holds a share of each tensor, and gathers a layer only while it computes it.

Gradients are summed, not averaged: each micro-batch's loss is already divided by the counts of the whole batch, so the sum over
ranks is the gradient that one rank would have found.
"""

from __future__ import annotations

from dataclasses import replace

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from coordinator.learner.model import Policy, Root
from coordinator.learner.team import Team


def shard(policy: Policy, team: Team) -> Policy:
    """The policy with its tensors spread over the ranks, a layer at a time; embeddings and head are one group, since they may be tied."""
    mesh = init_device_mesh(team.device.partition(":")[0], (team.size,))
    root = Root(policy.model)
    groups = [fully_shard(layer, mesh=mesh) for layer in policy.layers()]
    groups.append(fully_shard(root, mesh=mesh))
    for group in groups:
        assert isinstance(group, FSDPModule)
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return replace(policy, root=root)
