"""`make gpu` (`python -m tests.gpu`): what a machine with a GPU should be asked, in under 8 minutes. Without one: one line, exit 0.

The same tests that run on a CPU, on cuda: the engine contract with the torch engine on the card, the learner's process contract on the
card, and the vLLM suite where a python with vLLM is found (ECHO2_VLLM_PYTHON, `.venv-vllm`, or this one). Each part has a limit; what
does not end within it counts as failed. The exit status is the number of failed parts.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 470.0
TORCH = (
    "torch engine",
    ["tests/contract/engines/test_engine_contract.py", "tests/contract/engines/test_torch_engine.py", "-k", "not vllm"],
)
LEARNER = ("learner", ["tests/integration/learner/test_process.py"])
VLLM = (
    "vLLM engine",
    ["tests/contract/engines/test_engine_contract.py", "tests/contract/engines/test_vllm_engine.py", "--long", "-k", "vllm"],
)


def why_not() -> str:
    """Why nothing can be run here; empty when a GPU is there."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    import torch

    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no GPU"
    return ""


def vllm_python() -> str:
    """The python with vLLM; empty when there is none."""
    here = sys.executable if importlib.util.find_spec("vllm") is not None else ""
    kept = ROOT / ".venv-vllm" / "bin" / "python"
    return os.environ.get("ECHO2_VLLM_PYTHON") or (str(kept) if kept.is_file() else here)


def run(name: str, arguments: list[str], variables: dict[str, str], limit_s: float) -> bool:
    """Run one part; its outcome in a line."""
    started = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        passed = (
            subprocess.run(command, cwd=ROOT, env=os.environ | variables, timeout=max(limit_s, 1.0), check=False).returncode == 0
        )
        outcome = "passed" if passed else "FAILED"
    except subprocess.TimeoutExpired:
        passed, outcome = False, "FAILED (out of time)"
    print(f"gpu: {name}: {outcome} in {time.monotonic() - started:.0f} s", flush=True)
    return passed


def main() -> int:
    """How many parts failed."""
    reason = why_not()
    if reason:
        print(f"gpu: nothing to do: {reason}")
        return 0
    import torch

    print(f"gpu: {torch.cuda.get_device_name()}, torch {torch.__version__}", flush=True)
    variables = {"ECHO2_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    parts = [TORCH, LEARNER]
    if python := vllm_python():
        variables["ECHO2_VLLM_PYTHON"] = python
        parts.append(VLLM)
    else:
        print("gpu: vLLM engine: skipped, no python with vLLM (ECHO2_VLLM_PYTHON)", flush=True)
    end = time.monotonic() + LIMIT_S
    return sum(not run(name, arguments, variables, end - time.monotonic()) for name, arguments in parts)


if __name__ == "__main__":
    raise SystemExit(main())
