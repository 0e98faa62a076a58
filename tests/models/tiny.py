"""A model directory with random weights and a character tokenizer: small enough to start in a moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SOURCE = """
import sys, torch
from pathlib import Path
from transformers import Qwen3ForCausalLM
from coordinator.learner import warm_start as w
torch.manual_seed(int(sys.argv[2]))
config = w.configuration()
width = int(sys.argv[3]) if len(sys.argv) > 3 else 32
config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.head_dim = width, 2 * width, 2, 8
config.layer_types = config.layer_types[:2] if getattr(config, "layer_types", None) else None
model = Qwen3ForCausalLM(config).bfloat16()
out = Path(sys.argv[1])
out.mkdir(parents=True)
model.save_pretrained(out)
w.write_companions(model, out)
"""


def make_tiny_model(directory: Path, *, seed: int = 0, width: int = 32) -> Path:
    """Write the directory in a child process, so that the caller stays free of torch. `width`: hidden size."""
    command = [sys.executable, "-c", SOURCE, str(directory), str(seed), str(width)]
    subprocess.run(command, check=True, env={"OMP_NUM_THREADS": "1"})
    return directory
