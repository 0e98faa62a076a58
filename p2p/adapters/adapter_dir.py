"""The adapters beside a version's weights, read from disk: what its low-rank edges are made of."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from p2p.adapters.snapshot_dir import map_file
from p2p.codec import peft_files
from p2p.codec.lowrank import Factors, Halves, LowRank
from p2p.errors import SnapshotError

MAX_CONFIG_BYTES = 1 << 20
HALVES = 2  # of an adapter
SIDES = 2  # of a factor


def open_adapter(version: Path) -> LowRank:
    """The adapters in the directory of a version, with the scale of their product. Raises SnapshotError, OSError."""
    folder = version / peft_files.FOLDER
    config, weights = folder / peft_files.CONFIG, folder / peft_files.WEIGHTS
    if not (config.is_file() and weights.is_file()):
        raise SnapshotError(f"{folder} holds not both {config.name} and {weights.name}: the version was made without adapters")
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise SnapshotError(f"{config} holds {config.stat().st_size} bytes; at most {MAX_CONFIG_BYTES} are read")
    try:
        return LowRank(_factors(weights), peft_files.scale(config.read_bytes()))
    except SnapshotError as error:
        raise SnapshotError(f"{folder}: {error}") from error


def _factors(path: Path) -> dict[str, Factors]:
    """By the names of the tensors that they are added to. The bits are mapped, not loaded."""
    header, data = map_file(path)
    halves: dict[str, dict[str, Halves]] = defaultdict(dict)
    for one in header.tensors:
        tensor = one.tensor
        layer, half = peft_files.place(tensor.name)
        if tensor.dtype != "BF16" or len(tensor.shape) != SIDES:
            raise SnapshotError(f"{tensor.name!r} is {tensor.dtype} {list(tensor.shape)}; a BF16 matrix is due")
        halves[layer][half] = data[one.start : one.start + tensor.nbytes].view("<u2").reshape(tensor.shape)
    odd = sorted(layer for layer, found in halves.items() if len(found) != HALVES)
    if odd or not halves:
        raise SnapshotError(f"it holds half of an adapter, or none: {', '.join(odd[:3]) or 'there is no tensor'}")
    return {f"{layer}.weight": Factors(**found) for layer, found in halves.items()}
