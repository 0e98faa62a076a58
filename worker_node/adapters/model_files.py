"""What engines read of a version's directory before they trust it with their memory: config.json, and the tensors' names and shapes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from worker_node.errors import EngineError

MOST_CONFIG_BYTES = 4 << 20
_CHUNK = 8 << 20
Table = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name -> dtype and shape."""


def read_config(directory: Path) -> dict[str, Any]:
    """The config.json. Raises EngineError when it is absent, too large, or asks for code or quantised weights."""
    path = directory / "config.json"
    try:
        if path.stat().st_size > MOST_CONFIG_BYTES:
            raise EngineError(f"config.json is larger than {MOST_CONFIG_BYTES} bytes")
        config = json.loads(path.read_text("utf-8"))
        foreign = [key for key in ("auto_map", "quantization_config") if config.get(key)]
    except (OSError, ValueError, AttributeError) as error:
        raise EngineError(f"config.json cannot be read: {error!r}") from error
    if foreign:
        raise EngineError(f"config.json has {foreign[0]}: code and quantised weights are not loaded")
    return dict(config)


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files, in order. Raises EngineError when there is none."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise EngineError(f"{directory.name} holds no safetensors file")
    return files


def read_table(directory: Path) -> Table:
    """Every tensor of the directory, from the files' heads. Raises EngineError."""
    table: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    part = tensors.get_slice(name)
                    table[name] = (part.get_dtype(), tuple(part.get_shape()))
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{path.name} is not a safetensors file: {error}") from error
    return table


def check_same_tensors(held: Table, given: Table) -> None:
    """Raises EngineError when a version holds other tensors than the loaded one."""
    unknown, missing = sorted(given.keys() - held.keys()), sorted(held.keys() - given.keys())
    if unknown:
        raise EngineError(f"the new weights hold {unknown[:3]}, which the model has not: another architecture was published")
    if missing:
        raise EngineError(f"the new weights lack {missing[:3]}: the old ones are kept")
    for name, (_, shape) in given.items():
        if shape != held[name][1]:
            raise EngineError(f"{name} has shape {shape}, the model's has {held[name][1]}: the old weights are kept")


def warm(files: list[Path]) -> None:
    """Read the files once, so that whoever maps them next does not wait for the disk."""
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.read(_CHUNK):
                pass
