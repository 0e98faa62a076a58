"""Resumable learner state as one directory, renamed into place: there whole, or not there. safetensors and JSON only.

    weights.safetensors     fp32 masters, tied ones once
    optimizer.safetensors   AdamW's moments and counters per parameter ("NAME|exp_avg"), and the RNG state ("|rng")
    state.json              format, job, step, ledger position, digests of the two files and of the settings that shape a step

Resuming and replaying the batches sealed since gives the same bits as never having stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from coordinator.learner import tensor_file
from coordinator.learner.errors import CheckpointInvalid
from coordinator.learner.step import Learner
from coordinator.wire.job import JobConfig
from p2p.adapters.durable import REAL_FILES, FileLayer, hash_file, make_directory_durably, replace_directory_durably

FORMAT = "echo2-checkpoint-1"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
BEFORE_RENAME = "learner.checkpoint.before_rename"
_RNG = "|rng"


def settings_digest(config: JobConfig) -> str:
    """BLAKE3 of the settings that shape a step. Staleness, budget and the rest may change between start and resume."""
    shaping = {
        "algorithm": config.algorithm.model_dump(
            mode="json", exclude={"micro_batch_tokens", "max_replacements", "no_signal_limit"}
        ),
        "temperature": config.sampling.temperature,
        "seed": config.seed,
    }
    return blake3(json.dumps(shaping, sort_keys=True).encode()).hexdigest()


def write(
    learner: Learner,
    directory: Path,
    *,
    job_id: str,
    ledger_step: int,
    reached: Callable[[str], None] = lambda _: None,
    files: FileLayer = REAL_FILES,
) -> None:
    """Make the learner's state durable at `directory` (one that is there is replaced atomically). Raises OSError.

    `reached` is told the name of the commit point before the rename.
    """
    temporary = directory.with_name(f".{directory.name}.partial")
    make_directory_durably(directory.parent, files=files)
    files.remove_tree(temporary)
    files.make_dir(temporary)
    parts = {WEIGHTS: learner.policy.tensors(), OPTIMIZER: _optimizer_tensors(learner)}
    digests = {
        name: tensor_file.write(temporary / name, tensors, files=files, convert=tensor_file.as_is)
        for name, tensors in parts.items()
    }
    state = {
        "format": FORMAT,
        "job": job_id,
        "step": learner.step,
        "ledger_step": ledger_step,
        "settings": settings_digest(learner.config),
        "files": digests,
    }
    files.write_file(temporary / STATE, json.dumps(state, indent=1, sort_keys=True).encode())
    reached(BEFORE_RENAME)
    replace_directory_durably(temporary, directory, files=files)


def restore(learner: Learner, directory: Path, *, job_id: str) -> None:
    """Bring a freshly started learner to the checkpoint's state. Raises CheckpointInvalid, the learner then being of no use."""
    state = _read_state(directory, learner.config, job_id)
    try:
        weights = load_file(directory / WEIGHTS, device=learner.device)
        moments = load_file(directory / OPTIMIZER, device="cpu")
    except (OSError, SafetensorError) as error:
        raise CheckpointInvalid(f"checkpoint {directory} cannot be read: {error}") from error
    _load_weights(learner, weights, directory)
    _load_optimizer(learner, moments, directory)
    learner.step = state["step"]


def _read_state(directory: Path, config: JobConfig, job_id: str) -> dict[str, Any]:
    """state.json, once everything in it holds."""
    try:
        state = json.loads((directory / STATE).read_bytes())
        found = {name: hash_file(directory / name) for name in (WEIGHTS, OPTIMIZER)}
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"checkpoint {directory} is not whole: {error}; resume from an older one") from error
    if not isinstance(state, dict):
        raise CheckpointInvalid(f"checkpoint {directory}: {STATE} holds a {type(state).__name__}, expected an object")
    expected = {"format": FORMAT, "job": job_id, "settings": settings_digest(config), "files": found}
    for key, value in expected.items():
        if state.get(key) != value:
            raise CheckpointInvalid(f"checkpoint {directory}: {key} is {state.get(key)!r}, expected {value!r}")
    step, ledger_step = state.get("step"), state.get("ledger_step")
    if not isinstance(step, int) or ledger_step != step:
        raise CheckpointInvalid(f"checkpoint {directory}: ledger_step {ledger_step} differs from the learner's step {step}")
    return state


def _optimizer_tensors(learner: Learner) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {_RNG: torch.get_rng_state()}
    for name, parameter in learner.policy.model.named_parameters():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = value
    return tensors


def _load_weights(learner: Learner, weights: dict[str, Tensor], directory: Path) -> None:
    current = learner.policy.tensors()
    _check_names(set(weights), set(current), directory / WEIGHTS)
    with torch.no_grad():
        for name, tensor in current.items():
            if weights[name].shape != tensor.shape or weights[name].dtype != tensor.dtype:
                raise CheckpointInvalid(f"{directory / WEIGHTS}: {name} has another shape or dtype than the model's {tensor.shape}")
            tensor.copy_(weights[name])


def _load_optimizer(learner: Learner, moments: dict[str, Tensor], directory: Path) -> None:
    """All parameters have moments, or (before the first applied step) none has."""
    torch.set_rng_state(moments.pop(_RNG))
    named = dict(learner.policy.model.named_parameters())
    keys = ("step", "exp_avg", "exp_avg_sq")
    if moments:
        _check_names(set(moments), {f"{name}|{key}" for name in named for key in keys}, directory / OPTIMIZER)
        for name, parameter in named.items():
            learner.optimizer.state[parameter] = {
                key: moments[f"{name}|{key}"].to("cpu" if key == "step" else parameter.device) for key in keys
            }


def _check_names(found: set[str], expected: set[str], path: Path) -> None:
    if found != expected:
        odd = sorted(found ^ expected)[:5]
        raise CheckpointInvalid(f"{path} does not fit the model, tensors in one but not the other: {', '.join(odd)}")
