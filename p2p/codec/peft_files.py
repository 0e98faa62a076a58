"""An adapter as peft writes it: which files it lies in, what they call a factor, and what they say of the scale. Written and read here alone."""

from __future__ import annotations

import json
from collections.abc import Iterable

from p2p.errors import SnapshotError

FOLDER = "adapter"  # below the directory of the version that it makes
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_PREFIX = "base_model.model."  # how peft calls the model that the adapters are put on
_HALVES = {"down": ".lora_A.weight", "up": ".lora_B.weight"}


def tensor_name(layer: str, half: str) -> str:
    """What the file calls a factor of a layer; `half` is down or up."""
    return f"{_PREFIX}{layer}{_HALVES[half]}"


def place(name: str) -> tuple[str, str]:
    """The inverse of `tensor_name`: layer and half. Raises SnapshotError."""
    for half, ending in _HALVES.items():
        if name.startswith(_PREFIX) and name.endswith(ending):
            return name.removeprefix(_PREFIX).removesuffix(ending), half
    raise SnapshotError(f"{name[:120]!r} is no factor of an adapter as peft names them")


def config(base: str, *, rank: int, alpha: int, layers: Iterable[str]) -> bytes:
    """The configuration: adapters on layers of these names, without dropout, counted alpha / rank times; `base` names their model."""
    fields = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in layers}),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    return json.dumps(fields, indent=2, sort_keys=True).encode()


def scale(data: bytes) -> float:
    """What a configuration multiplies the product of the factors by. Raises SnapshotError."""
    try:
        fields = json.loads(data)
        return float(fields["lora_alpha"]) / int(fields["r"])
    except (ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError, RecursionError) as error:
        raise SnapshotError(f"{CONFIG} does not say lora_alpha and r as numbers: {error!r}") from error
