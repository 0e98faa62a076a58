"""What bf16 and gradient checkpointing change, and what they must not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from coordinator.learner import collate, model, step


def gradient(made: ModuleType, tiny: Path, **learner: Any) -> list[torch.Tensor]:
    one = step.start(model.load(tiny), made.config(truncated="keep", learner=learner))
    step.gradients(one, made.batch(seed=5))
    return [parameter.grad for parameter in one.policy.trained().values()]


def relative(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    gap = sum(float((one - other).square().sum()) for one, other in zip(found, expected, strict=True))
    return (gap / sum(float(other.square().sum()) for other in expected)) ** 0.5


@pytest.mark.parametrize("packing", [True, False])
def test_gradient_checkpointing_gives_the_same_bits(made: ModuleType, tiny: Path, packing: bool) -> None:
    found, expected = (gradient(made, tiny, packing=packing, gradient_checkpointing=each) for each in (True, False))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_gradient_checkpointing_keeps_a_layers_input_alone(made: ModuleType, tiny: Path) -> None:
    """What autograd holds between the passes, counted: with it, less than half."""
    held = {}
    for on in (True, False):
        one = step.start(model.load(tiny), made.config(learner={"gradient_checkpointing": on}))
        batch = made.batch(seed=5)
        micro = collate.pack(batch, collate.signal_of(batch, one.config), list(range(8)))
        own = {parameter.untyped_storage().data_ptr() for parameter in one.policy.model.parameters()}
        saved: dict[int, int] = {}

        def keep(tensor: torch.Tensor, own: set[int] = own, saved: dict[int, int] = saved) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            step.token_logprobs(one.policy, micro, 1.0)
        held[on] = sum(saved.values())
    assert held[True] < held[False] / 2


def test_bf16_moves_the_gradient_by_its_rounding_and_no_more(made: ModuleType, tiny: Path) -> None:
    """bf16 has 8 bits: 2^-8 a rounding. Below 5 % of the whole gradient, and not nothing; with checkpointing the same bits."""
    exact, rounded = gradient(made, tiny), gradient(made, tiny, dtype="bfloat16")
    assert 1e-4 < relative(rounded, exact) < 0.05
    assert all(each.dtype == torch.float32 for each in rounded)
    again = gradient(made, tiny, dtype="bfloat16", gradient_checkpointing=True)
    assert all(torch.equal(one, other) for one, other in zip(rounded, again, strict=True))


def test_under_bf16_masters_log_probs_and_moments_stay_float32(made: ModuleType, tiny: Path) -> None:
    one = step.start(model.load(tiny), made.config(truncated="keep", learner={"dtype": "bfloat16"}))
    figures = step.take_step(one, made.batch(step=0))
    assert figures["optim/applied"] == 1.0
    assert {parameter.dtype for parameter in one.policy.model.parameters()} == {torch.float32}
    assert {each.dtype for state in one.optimizer.state.values() for each in state.values()} == {torch.float32}
    batch = made.batch()
    micro = collate.pack(batch, collate.signal_of(batch, one.config), list(range(8)))
    logprobs, entropy = step.token_logprobs(one.policy, micro, 1.0, is_autocast=True)
    assert logprobs.dtype == entropy.dtype == torch.float32


def test_under_bf16_the_head_is_exact(made: ModuleType, tiny: Path) -> None:
    """From the same hidden states, the log-probs are those of a head in float64, to float32's rounding."""
    one = step.start(model.load(tiny), made.config())
    batch = made.batch()
    micro = collate.pack(batch, collate.signal_of(batch, one.config), list(range(8)))
    with torch.no_grad():
        found, _ = step.token_logprobs(one.policy, micro, 1.0, is_autocast=True)
        hidden = step._hidden(one.policy.model, micro, is_autocast=True)[0].double()
        logits = hidden[micro.before] @ one.policy.model.lm_head.weight.double().T
        expected = torch.log_softmax(logits, dim=-1).gather(1, micro.targets.flatten()[micro.cells][:, None])[:, 0]
    assert torch.allclose(found[micro.sampled].double(), expected, atol=2e-5)
