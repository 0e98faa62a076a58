"""Load the policy from a Hugging Face directory: allow-listed architectures, safetensors, no code from the directory.

Masters are fp32 whatever the directory holds. Dropout is off for good (the model stays in eval mode), so that a step is a
function of weights, optimiser state and batch alone, and a replay is bit-exact.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from coordinator.learner import lora
from coordinator.learner.errors import ModelRefused
from coordinator.learner.parts import Merged, Part, like, local, whole

ARCHITECTURES = frozenset(
    {"llama", "qwen2", "qwen3", "mistral", "gemma", "gemma2", "gemma3_text", "phi3", "smollm3", "olmo2", "granite"}
)
ATTENTIONS = (None, "eager", "sdpa")  # any other name is a library, or a repository whose code would be downloaded
HALF_PRECISIONS = {"BF16": torch.bfloat16, "F16": torch.float16}
CONFIG_LIMIT_BYTES = 1 << 20
Result = TypeVar("Result")


class Root(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """What FSDP wraps around a whole model: inside a call, embeddings and head are gathered, and each layer while it computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[nn.Module], Any]) -> Any:
        """What `work` makes of the model; tensors in it carry the gradient back through FSDP's hooks."""
        return work(self.model)


@dataclass(frozen=True, slots=True)
class Policy:
    """The model being trained and what the coordinator must know of it."""

    model: nn.Module
    directory: Path  # where its configuration and tokenizer files lie
    vocab_size: int
    stop_token_ids: tuple[int, ...]
    root: Root | None = None  # where the model is sharded

    def call(self, work: Callable[[nn.Module], Result]) -> Result:
        """`work` on the model. A collective where it is sharded: every rank calls, in the same order."""
        if self.root is None:
            return work(self.model)
        try:
            found: Result = self.root(work)
            return found
        finally:
            if not torch.is_grad_enabled():  # else the backward pass does it
                self.root.reshard()

    def layers(self) -> list[nn.Module]:
        """The decoder's layers, first to last."""
        return list(self.model.base_model.layers)

    def tensors(self) -> dict[str, Part]:
        """The weights by name, tied ones once (under the name that comes first), in a fixed order, adapters merged."""
        seen: set[int] = set()
        unique: dict[str, Part] = {}
        for name, part in lora.published(self.model).items():
            place = id(part.base if isinstance(part, Merged) else part)
            if place not in seen:
                seen.add(place)
                unique[name] = part
        return unique

    def trained(self) -> dict[str, nn.Parameter]:
        """What learns, by name: all parameters, or the adapters."""
        return {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}

    def frozen_copy(self) -> Policy:
        """The policy as it is now, apart from what becomes of this one; nothing in it takes a gradient."""
        return replace(self, model=copy.deepcopy(self.model).requires_grad_(False))

    def parameters(self) -> int:
        """How many numbers are trained."""
        return sum(parameter.numel() for parameter in self.trained().values())


def load(directory: Path, *, device: str = "cpu") -> Policy:
    """The policy in `directory`, in fp32. Raises ModelRefused, with the way out in words."""
    return _loaded(directory, device, torch.float32)


def load_mapped(directory: Path) -> Policy:
    """As `load`, for a policy that will be sharded: its weights may still lie in their files, in half precision, unread.

    `sharding.shard` raises a layer at a time to fp32, so that no rank ever holds the whole model. Where the files are not all of one
    half precision, or the model computes a constant in it, the policy is whole and in fp32 after all. Raises ModelRefused.
    """
    kind = _half_precision_of(directory)
    if kind is None:
        return load(directory)
    policy = _loaded(directory, "cpu", kind)
    is_exact = all(buffer.dtype != kind for buffer in policy.model.buffers())  # gemma's scale of embeddings is rounded
    return policy if is_exact else load(directory)


def _half_precision_of(directory: Path) -> torch.dtype | None:
    """Of all weights in the directory's files; None: they are of others as well, or cannot be read."""
    found: set[str] = set()
    try:
        for path in directory.glob("*.safetensors"):
            with safe_open(path, framework="pt") as opened:
                found |= {opened.get_slice(name).get_dtype() for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError):
        return None  # `load` says what is wrong
    return HALF_PRECISIONS.get(found.pop()) if len(found) == 1 else None


def _loaded(directory: Path, device: str, dtype: torch.dtype) -> Policy:
    config = read_json(directory / "config.json")
    _check_architecture(config, directory)
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=dtype,
            trust_remote_code=False,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError, StrictDataclassError) as error:
        raise ModelRefused(f"model {directory} cannot be loaded: {error}") from error
    _check_complete(report, directory)
    return Policy(model.to(device).eval(), directory, int(model.config.vocab_size), _stop_token_ids(config, directory))


@contextmanager
def published_bits(policy: Policy) -> Iterator[None]:
    """Inside, the policy computes with exactly what is published: the masters rounded to bf16, still in fp32. A collective."""
    masters: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        try:
            for part in policy.tensors().values():
                target = part.base if isinstance(part, Merged) else part
                if target.is_floating_point():
                    share = local(target)
                    masters.append((share, share.clone()))
                    share.copy_(local(like(whole(part), target) if isinstance(part, Merged) else part).to(torch.bfloat16))
            with lora.without(policy.model):
                yield
        finally:
            for share, master in masters:
                share.copy_(master)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of at most 1 MiB. Raises ModelRefused."""
    try:
        if path.stat().st_size > CONFIG_LIMIT_BYTES:
            raise ModelRefused(f"{path} has {path.stat().st_size} bytes, at most {CONFIG_LIMIT_BYTES} are read")
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelRefused(f"{path} cannot be read: {error}; model must name a Hugging Face directory") from error
    except ValueError as error:
        raise ModelRefused(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path} holds a {type(value).__name__}, expected a JSON object")
    return value


def _check_architecture(config: dict[str, Any], directory: Path) -> None:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        raise ModelRefused(f"model_type of {directory} is {kind!r}; allowed are {', '.join(sorted(ARCHITECTURES))}")
    for key in ("auto_map", "quantization_config"):
        if config.get(key):
            raise ModelRefused(f"config.json of {directory} has {key}: remove it; code and quantised weights are not loaded")
    for key in ("attn_implementation", "_attn_implementation"):
        if config.get(key) not in ATTENTIONS:
            raise ModelRefused(f"config.json of {directory} has {key} {config[key]!r}: remove it; only eager and sdpa are used")
    if (directory / "adapter_config.json").exists():
        raise ModelRefused(f"{directory} holds an adapter (adapter_config.json): merge it into the model and save that")


def _check_complete(report: dict[str, Any], directory: Path) -> None:
    """Weights that the files lack would be drawn at random, silently."""
    for key in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report.get(key):
            names = ", ".join(sorted(str(name) for name in report[key])[:5])
            raise ModelRefused(f"model {directory} does not fit its config.json: {key} {names}; export it again, whole")


def _stop_token_ids(config: dict[str, Any], directory: Path) -> tuple[int, ...]:
    path = directory / "generation_config.json"
    generation = read_json(path) if path.exists() else {}
    stop = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = tuple(stop) if isinstance(stop, list) else (stop,)
    if not ids or not all(isinstance(each, int) and 0 <= each < int(config.get("vocab_size", 0)) for each in ids):
        raise ModelRefused(
            f"eos_token_id of {directory} is {stop!r}: name at least one id in generation_config.json or config.json"
        )
    return ids
