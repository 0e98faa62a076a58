"""Where compiled loops are kept: beside the source, in the user's cache directory where that is read-only, or nowhere."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CALL = """
import numpy as np
from p2p.codec import scan_loops
words = np.zeros(4, "<u2")
scan_loops.add(words, np.array([2], np.uint32), np.array([7], "<u2"))
assert words.tolist() == [0, 0, 7, 0]
"""


def test_a_read_only_install_keeps_them_in_the_users_cache(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "p2p", tmp_path / "p2p", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "p2p" / "codec" / "__pycache__").touch()  # a file in its place: not even root can write there
    env = {**os.environ, "HOME": str(tmp_path / "home"), "PYTHONDONTWRITEBYTECODE": "1"}
    for name in ("XDG_CACHE_HOME", "NUMBA_CACHE_DIR"):
        env.pop(name, None)
    subprocess.run([sys.executable, "-c", CALL], cwd=tmp_path, env=env, check=True)
    assert list((tmp_path / "home").rglob("scan_loops.add*.nbc"))


def test_without_any_place_to_keep_them_they_still_run() -> None:
    from p2p.codec.jit import compiled

    space: dict[str, object] = {}
    exec("def twice(x): return x + x", space)  # of no file: numba finds no place for it
    twice = space["twice"]
    assert callable(twice)
    assert compiled(twice)(21) == 42
