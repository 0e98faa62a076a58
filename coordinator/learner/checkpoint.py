"""Resumable learner state as one directory, renamed into place: there whole, or not there. safetensors and JSON only.

    weights.safetensors     fp32 masters of what learns (with [lora] the adapters), tied ones once
    optimizer.safetensors   AdamW's moments and counters per parameter ("NAME|exp_avg"), and the RNG state ("|rng")
    state.json              format, job, step, ledger position, digests of the two files and of the settings that shape a step

Resuming and replaying the batches sealed since gives the same bits as never having stopped. Tensors are written and read whole, one
at a time, so a checkpoint knows nothing of ranks: what two wrote, one may read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from blake3 import blake3
from safetensors import SafetensorError, safe_open
from torch import Tensor

from coordinator.learner import tensor_file, whole_directory
from coordinator.learner.errors import CheckpointInvalid
from coordinator.learner.parts import Part, Walk, like, local
from coordinator.learner.step import Learner
from coordinator.wire.job import JobConfig
from p2p.adapters.durable import REAL_FILES, FileLayer, hash_file

FORMAT = "echo2-checkpoint-1"
WEIGHTS, OPTIMIZER, STATE = "weights.safetensors", "optimizer.safetensors", "state.json"
BEFORE_RENAME = "learner.checkpoint.before_rename"
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
_RNG = "|rng"
_WAYS_OUT = {
    "format": "this program does not know it; resume with the one that wrote it",
    "job": "it is another job's",
    "settings": "[algorithm], lora, learner.dtype, seed or sampling.temperature are not those of the job that wrote it; "
    "submit a new job that starts from its published weights",
    "files": "they changed since they were written; resume from an older checkpoint",
}
_NO_STEP = ("micro_batch_tokens", "max_replacements", "no_signal_limit")


def settings_digest(config: JobConfig) -> str:
    """BLAKE3 of the settings that shape a step. Staleness, budget and the rest may change between start and resume."""
    shaping = {
        "algorithm": config.algorithm.model_dump(mode="json", exclude=set(_NO_STEP)),
        "temperature": config.sampling.temperature,
        "seed": config.seed,
    }
    if config.lora is not None:
        shaping["lora"] = config.lora.model_dump(mode="json")
    if config.learner.dtype != "float32":
        shaping["dtype"] = config.learner.dtype
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
    parts = _parts(learner)
    with _walk(parts) as walk:
        _write(learner, parts, walk, directory, job_id=job_id, ledger_step=ledger_step, reached=reached, files=files)


def follow(learner: Learner) -> None:
    """What the ranks that write nothing do meanwhile: gather the same tensors in the same order."""
    with _walk(_parts(learner)):
        pass


def _parts(learner: Learner) -> dict[str, Mapping[str, Part]]:
    """The tensors of each file."""
    return {WEIGHTS: _learnt(learner), OPTIMIZER: _optimizer_tensors(learner)}


def _walk(parts: Mapping[str, Mapping[str, Part]]) -> Walk:
    order = [name for tensors in parts.values() for name in tensor_file.order(tensors, tensor_file.as_is)]
    return Walk({name: part for tensors in parts.values() for name, part in tensors.items()}, order)


def _write(  # noqa: PLR0913 (one call, apart so that the walk ends whatever happens here)
    learner: Learner,
    parts: Mapping[str, Mapping[str, Part]],
    walk: Walk,
    directory: Path,
    *,
    job_id: str,
    ledger_step: int,
    reached: Callable[[str], None],
    files: FileLayer,
) -> None:
    with whole_directory.filled(directory, before_rename=lambda: reached(BEFORE_RENAME), files=files) as temporary:
        digests = {
            name: tensor_file.write(temporary / name, tensors, walk, files=files, convert=tensor_file.as_is)
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


def restore(learner: Learner, directory: Path, *, job_id: str) -> None:
    """Bring a freshly started learner to the checkpoint's state. Raises CheckpointInvalid, the learner then being of no use.

    Every rank reads the files, and keeps its share; rank 0 alone checks their digests.
    """
    state = _read_state(directory, learner.config, job_id, is_hashed=learner.team.is_lead)
    try:
        _load_weights(learner, directory / WEIGHTS)
        _load_optimizer(learner, directory / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise CheckpointInvalid(f"checkpoint {directory} cannot be read: {error}") from error
    learner.step = state["step"]


def _read_state(directory: Path, config: JobConfig, job_id: str, *, is_hashed: bool) -> dict[str, Any]:
    """state.json, once everything in it holds."""
    try:
        state = json.loads((directory / STATE).read_bytes())
        found = {name: hash_file(directory / name) for name in (WEIGHTS, OPTIMIZER)} if is_hashed else None
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"checkpoint {directory} is not whole: {error}; resume from an older one") from error
    if not isinstance(state, dict):
        raise CheckpointInvalid(f"checkpoint {directory}: {STATE} holds a {type(state).__name__}, expected an object")
    expected = {"format": FORMAT, "job": job_id, "settings": settings_digest(config), "files": found or state.get("files")}
    for key, value in expected.items():
        if state.get(key) != value:
            raise CheckpointInvalid(f"checkpoint {directory}: {key} is {state.get(key)!r}, expected {value!r}: {_WAYS_OUT[key]}")
    step, ledger_step = state.get("step"), state.get("ledger_step")
    if not isinstance(step, int) or ledger_step != step:
        raise CheckpointInvalid(f"checkpoint {directory}: ledger_step {ledger_step} differs from the learner's step {step}")
    return state


def _learnt(learner: Learner) -> Mapping[str, Part]:
    """The masters by name: of everything, or of the adapters."""
    return learner.policy.trained() if learner.config.lora is not None else learner.policy.tensors()


def _optimizer_tensors(learner: Learner) -> dict[str, Part]:
    tensors: dict[str, Part] = {_RNG: torch.get_rng_state()}
    for name, parameter in learner.policy.trained().items():
        for key, value in learner.optimizer.state.get(parameter, {}).items():
            tensors[f"{name}|{key}"] = value
    return tensors


def _load_weights(learner: Learner, path: Path) -> None:
    current = {name: part for name, part in _learnt(learner).items() if isinstance(part, Tensor)}
    with safe_open(path, framework="pt") as opened, torch.no_grad():
        _check_names(set(opened.keys()), set(current), path)
        for name, tensor in current.items():
            stored = opened.get_tensor(name)
            if stored.shape != tensor.shape or stored.dtype != tensor.dtype:
                raise CheckpointInvalid(f"{path}: {name} has another shape or dtype than the model's {tensor.shape}")
            local(tensor).copy_(local(like(stored, tensor)))


def _load_optimizer(learner: Learner, path: Path) -> None:
    """All parameters have moments, or (before the first applied step) none has."""
    named = learner.policy.trained()
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys()) - {_RNG}
        if names:
            _check_names(names, {f"{name}|{key}" for name in named for key in MOMENTS}, path)
        torch.set_rng_state(opened.get_tensor(_RNG))
        for name, parameter in named.items() if names else ():
            stored = {key: opened.get_tensor(f"{name}|{key}") for key in MOMENTS}
            learner.optimizer.state[parameter] = {
                key: value if key == "step" else like(value, parameter) for key, value in stored.items()
            }


def _check_names(found: set[str], expected: set[str], path: Path) -> None:
    if found != expected:
        odd = sorted(found ^ expected)[:5]
        raise CheckpointInvalid(f"{path} does not fit the model, tensors in one but not the other: {', '.join(odd)}")
