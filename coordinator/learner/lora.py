"""Low-rank adapters (arXiv 2106.09685), by peft: the base stays as it was loaded, only the adapters learn.

What is published is the base with the adapters merged in, a version like any other, and beside it the adapters alone as peft saves
them. Version 0, for a KL to it, is the base alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from coordinator.learner.errors import ModelRefused
from coordinator.learner.parts import Merged, Part
from coordinator.wire.job import LoraConfig
from p2p.codec import peft_files

ADAPTER = "default"


def attach(model: nn.Module, config: LoraConfig) -> None:
    """Put an adapter on every target of every layer; nothing else takes a gradient from now on. Raises ModelRefused."""
    try:
        import peft
    except ImportError as error:
        raise ModelRefused("the job has [lora], but peft is not installed: pip install 'echo2[lora]'") from error
    known = sorted({name.rpartition(".")[2] for name, module in model.base_model.named_modules() if isinstance(module, nn.Linear)})
    unknown = sorted(set(config.targets) - set(known))
    if unknown:
        raise ModelRefused(f"lora.targets names {', '.join(unknown)}; this model has {', '.join(known)}")
    settings = peft.LoraConfig(
        r=config.rank, lora_alpha=config.alpha, target_modules=list(config.targets), lora_dropout=0.0, bias="none"
    )
    peft.inject_adapter_in_model(settings, model, adapter_name=ADAPTER)
    model.eval()


def published(model: nn.Module) -> dict[str, Part]:
    """The weights by the names of the model without adapters, merged where there is one; tied ones once."""
    merged = {f"{name}.weight": _merged(module) for name, module in _adapted(model)}
    parts: dict[str, Part] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if ".lora_" not in name:
            plain = name.replace(".base_layer.", ".")
            parts[plain] = merged.get(plain, tensor)
    return parts


def factors(model: nn.Module) -> dict[str, Tensor]:
    """The adapters' tensors, as peft names them in its files; none where the model has no adapters."""
    found: dict[str, Tensor] = {}
    for name, module in _adapted(model):
        found[peft_files.tensor_name(name, "down")] = module.lora_A[ADAPTER].weight
        found[peft_files.tensor_name(name, "up")] = module.lora_B[ADAPTER].weight
    return found


def description(model: nn.Module, base: str) -> bytes:
    """What peft reads beside the tensors, of a model with adapters; `base` names the model that they are put on."""
    adapted = _adapted(model)
    _, first = adapted[0]
    return peft_files.config(base, rank=first.r[ADAPTER], alpha=first.lora_alpha[ADAPTER], layers=[name for name, _ in adapted])


@contextmanager
def without(model: nn.Module) -> Iterator[None]:
    """Inside, the model computes with its base weights alone."""
    adapted = [module for _, module in _adapted(model)]
    for module in adapted:
        module.scaling[ADAPTER], module.kept_scaling = 0.0, module.scaling[ADAPTER]
    try:
        yield
    finally:
        for module in adapted:
            module.scaling[ADAPTER] = module.kept_scaling
            del module.kept_scaling


def _adapted(model: nn.Module) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if hasattr(module, "lora_A")]


def _merged(module: Any) -> Merged:
    base: Tensor = module.base_layer.weight
    return Merged(base, module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight, module.scaling[ADAPTER])
