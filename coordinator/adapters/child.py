"""The environment of a child process: only what it needs, and one thread for numeric libraries."""

from __future__ import annotations

import os

PASSED_ON = ("PATH", "HOME", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES")


def child_environment() -> dict[str, str]:
    """No secrets of ours travel to a child. Two spinning OpenMP threads on busy cores cost nine times the CPU."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return {**passed, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
