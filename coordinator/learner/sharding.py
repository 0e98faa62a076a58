"""FSDP2: every rank holds a share of each tensor, and gathers a layer only while it computes it.

Gradients are summed, not averaged: each micro-batch's loss is already divided by the counts of the whole batch, so the sum over
ranks is the gradient that one rank would have found.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from coordinator.learner.model import HALF_PRECISIONS, Policy, Root
from coordinator.learner.team import Team


def shard(policy: Policy, team: Team) -> Policy:
    """The policy with its tensors spread over the ranks, a layer at a time; embeddings and head are one group, since they may be tied.

    What is in half precision (`model.load_mapped`) becomes fp32 on the way, a group at a time.
    """
    mesh = init_device_mesh(team.device.partition(":")[0], (team.size,))
    root = Root(policy.model)
    for module in (*policy.layers(), root):
        _raise_precision(module)
        group = fully_shard(module, mesh=mesh)
        assert isinstance(group, FSDPModule)
        group.set_gradient_divide_factor(1.0)
        group.set_force_sum_reduction_for_comms(True)  # gloo has no other
    return replace(policy, root=root)


def _raise_precision(module: nn.Module) -> None:
    for parameter in module.parameters():
        if parameter.dtype in HALF_PRECISIONS.values():
            parameter.data = parameter.data.float()
