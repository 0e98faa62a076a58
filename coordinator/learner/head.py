"""Log-probs of given tokens without the logits of all: vocabulary x tokens is never held, only a chunk of tokens at a time.

In fp32 at least, whatever the layers below compute in. The backward pass makes each chunk's logits again, which costs one more
matrix product of the head and spares the memory of the largest tensor that a step would need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

CHUNK_BYTES = 32 << 20  # of logits; twice that is held at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """What is done to a hidden state's product with the head before the softmax: / divisor, soft cap, / temperature."""

    temperature: float
    divisor: float = 1.0  # granite's logits_scaling
    cap: float | None = None  # gemma2's and gemma3's final_logit_softcapping

    def apply(self, products: Tensor) -> Tensor:
        """Logits [n, V] from products, in place."""
        if self.divisor != 1.0:
            products.div_(self.divisor)
        if self.cap is not None:
            products.div_(self.cap).tanh_().mul_(self.cap)
        return products.div_(self.temperature) if self.temperature != 1.0 else products

    def slope_(self, gradient: Tensor, logits: Tensor) -> Tensor:
        """The gradient of the products from that of the logits, in place; `logits` are lost."""
        if self.cap is not None:
            gradient.mul_(logits.mul_(self.temperature / self.cap).square_().neg_().add_(1.0))
        factor = self.divisor * self.temperature
        return gradient.div_(factor) if factor != 1.0 else gradient


def shape_of(model: nn.Module, temperature: float) -> Shape:
    """As the model's own configuration says."""
    config = model.config
    return Shape(temperature, getattr(config, "logits_scaling", 1.0), getattr(config, "final_logit_softcapping", None))


def logprobs(
    hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape, *, chunk_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs [n] of `targets` [n] after hidden states [n, h] under the head's `weight` [V, h], and the entropies [n] (no gradient)."""
    kind = torch.promote_types(weight.dtype, torch.float32)
    rows = max(1, (chunk_bytes or CHUNK_BYTES) // (weight.shape[0] * kind.itemsize))
    found: tuple[Tensor, Tensor] = _Logprobs.apply(hidden.to(kind), weight.to(kind), targets, shape, rows)
    return found


class _Logprobs(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped here
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, shape: Shape, rows: int) -> tuple[Tensor, Tensor]:
        found, entropies, totals = (hidden.new_empty(len(hidden)) for _ in range(3))  # FSDP warns of views
        for at in range(0, len(hidden), rows):
            here = slice(at, at + rows)
            logits = shape.apply(hidden[here] @ weight.T)
            most = logits.amax(dim=1, keepdim=True)
            logits.sub_(most)
            found[here] = logits.gather(1, targets[here, None])[:, 0]
            masses = logits.exp()
            total = masses.sum(dim=1)
            entropies[here] = total.log() - masses.mul_(logits).sum(dim=1) / total
            totals[here] = total.log()
            found[here] -= totals[here]
            totals[here] += most[:, 0]
        ctx.save_for_backward(hidden, weight, targets, totals)
        ctx.shape, ctx.rows = shape, rows
        ctx.mark_non_differentiable(entropies)
        return found, entropies

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, targets, totals = ctx.saved_tensors
        of_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for at in range(0, len(hidden), ctx.rows):
            here = slice(at, at + ctx.rows)
            logits = ctx.shape.apply(hidden[here] @ weight.T)
            slope = (logits - totals[here, None]).exp_().mul_(-gradient[here, None])
            slope.scatter_add_(1, targets[here, None], gradient[here, None])
            ctx.shape.slope_(slope, logits)
            if of_hidden is not None:
                torch.mm(slope, weight, out=of_hidden[here])
            if of_weight is not None:
                of_weight.addmm_(slope.T, hidden[here])
        return of_hidden, of_weight, None, None, None
