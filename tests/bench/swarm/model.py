"""A model whose keyframe takes so many bytes on the wire: random weights, made beforehand. `model.py DIRECTORY PAYLOAD_BYTES SEED`."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from blake3 import blake3

from p2p.adapters.snapshot_dir import open_snapshot
from p2p.codec.layout import view

BYTES_A_WEIGHT = 1.332  # of normally distributed bf16 in exponent planes
LAYERS, HIDDEN, HEAD, HEADS, KEY_HEADS = 4, 512, 64, 8, 2
ATTENTION = 2 * HIDDEN * HEAD * (HEADS + KEY_HEADS)


def intermediate(payload_bytes: int) -> int:
    """Width of the hidden layers for a payload. Raises ValueError for one that the rest of the model exceeds."""
    weights = payload_bytes / BYTES_A_WEIGHT / LAYERS - ATTENTION
    width = round(weights / (3 * HIDDEN))
    if width < 16:
        least = BYTES_A_WEIGHT * LAYERS * (ATTENTION + 3 * HIDDEN * 16) / 1e6
        raise ValueError(f"--mb {payload_bytes / 1e6:g} is too small for real processes: give {least + 0.1:.1f} or more")
    return width


@functools.cache
def model_of(payload_bytes: int, seed: int, prefix: str) -> Path:
    """A Hugging Face directory, removed at the end of this process. Made in a child, which keeps this one free of torch."""
    intermediate(payload_bytes)
    root = Path(tempfile.mkdtemp(prefix=prefix))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    command = [sys.executable, "-m", "tests.bench.swarm.model", str(root / "model"), str(payload_bytes), str(seed)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return root / "model"


def bits_of(directory: Path) -> str:
    """BLAKE3 of every tensor's name and bits: the same for a published version as for the model that it was made from."""
    snapshot = open_snapshot(directory)
    digest = blake3()
    for tensor in snapshot.tensors:
        digest.update(tensor.name.encode())
        digest.update(view(snapshot.read(tensor.name)))
    return digest.hexdigest()


def write(directory: Path, payload_bytes: int, seed: int) -> None:
    """Make it."""
    import torch
    from transformers import Qwen3ForCausalLM

    from coordinator.learner import warm_start

    torch.manual_seed(seed)
    config = warm_start.configuration()
    config.hidden_size, config.head_dim = HIDDEN, HEAD
    config.num_attention_heads, config.num_key_value_heads = HEADS, KEY_HEADS
    config.num_hidden_layers, config.intermediate_size = LAYERS, intermediate(payload_bytes)
    config.layer_types = ["full_attention"] * LAYERS
    model = Qwen3ForCausalLM(config).bfloat16()
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    warm_start.write_companions(model, directory)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
