"""The chunked head against the plain formula: values, entropies and every gradient; and that it is chunked."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from coordinator.learner import collate, head, metrics, model, step
from coordinator.learner.head import Shape

TOKENS, HIDDEN, VOCAB = 13, 6, 40
SHAPES = [Shape(1.0), Shape(0.6), Shape(1.3, divisor=4.0), Shape(0.9, cap=1.5), Shape(1.0, divisor=2.0, cap=3.0)]


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, shape: Shape) -> tuple[torch.Tensor, torch.Tensor]:
    logits = hidden @ weight.T / shape.divisor
    if shape.cap is not None:
        logits = shape.cap * torch.tanh(logits / shape.cap)
    every = torch.log_softmax(logits / shape.temperature, dim=-1)
    return every.gather(1, targets[:, None])[:, 0], -(every.exp() * every).sum(dim=1)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(VOCAB, HIDDEN, dtype=torch.float64, requires_grad=True)
    return hidden, weight, torch.randint(VOCAB, (TOKENS,)), torch.randn(TOKENS, dtype=torch.float64)


@pytest.mark.parametrize("rows", [1, 4, 1000])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_plain_formula(shape: Shape, rows: int) -> None:
    hidden, weight, targets, pull = inputs()
    found, entropy = head.logprobs(hidden, weight, targets, shape, chunk_bytes=rows * VOCAB * 8)
    expected, its_entropy = plain(hidden, weight, targets, shape)
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(entropy, its_entropy, rtol=1e-11)
    assert not entropy.requires_grad
    gradients = torch.autograd.grad((found * pull).sum(), (hidden, weight))
    for mine, its in zip(gradients, torch.autograd.grad((expected * pull).sum(), (hidden, weight)), strict=True):
        assert torch.allclose(mine, its, rtol=1e-11, atol=1e-13)


def test_a_frozen_head_takes_no_gradient() -> None:
    hidden, weight, targets, pull = inputs()
    found, _ = head.logprobs(hidden, weight.detach(), targets, Shape(1.0))
    (gradient,) = torch.autograd.grad((found * pull).sum(), (hidden,))
    (its,) = torch.autograd.grad((plain(hidden, weight, targets, Shape(1.0))[0] * pull).sum(), (hidden,))
    assert torch.allclose(gradient, its)


class Shapes(TorchDispatchMode):
    """The shape of every tensor that any operation gave."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[torch.Size] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for each in found if isinstance(found, tuple | list) else (found,):
            if isinstance(each, torch.Tensor):
                self.found.add(each.shape)
        return found


def test_no_step_holds_the_logits_of_all_tokens(made: ModuleType, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, packed and padded; the same learner with chunks as large as you like shows that it would be seen."""
    learner = step.start(model.load(tiny), made.config())
    batch = made.batch(seed=1)
    chunk_bytes = 4 * made.VOCAB * 4
    seen = {}
    weight = learner.policy.model.lm_head.weight.T.shape
    for arrange in (collate.pack, collate.collate):
        for limit in (chunk_bytes, 1 << 30):
            monkeypatch.setattr(head, "CHUNK_BYTES", limit)
            micro = arrange(batch, collate.signal_of(batch, learner.config), list(range(8)))
            with Shapes() as shapes:
                step.accumulate(learner, micro, metrics.Tally())
            seen[arrange.__name__, limit] = max(shape.numel() for shape in shapes.found - {weight} if shape[-1:] == (made.VOCAB,))
    assert seen["pack", chunk_bytes] == seen["collate", chunk_bytes] == 4 * made.VOCAB
    assert seen["pack", 1 << 30] == seen["collate", 1 << 30] == len(batch.token_ids) * made.VOCAB
