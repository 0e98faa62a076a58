"""Gradient checkpointing: a layer keeps its input alone, and computes the rest again in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint


def apply(layers: Sequence[nn.Module]) -> None:
    """From now on, for these layers. Before FSDP wraps them, so that a layer is gathered once for both of its forward passes.

    Transformers' own switch works in training mode only, and the learner never leaves eval mode: it has no dropout.
    """
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)
