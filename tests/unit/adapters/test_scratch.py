"""Orphans in the temporary folder go; what is young, used or not ours stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from coordinator.adapters.scratch import LEAST_AGE_S, remove_scratch


def test_only_old_unused_directories_of_ours_go(tmp_path: Path) -> None:
    for name in (
        "echo2-jail-orphan",
        "echo2-link-orphan",
        "echo2-ranks-orphan",
        "echo2-jail-used",
        "echo2-jail-young",
        "echo2-other",
        "someone",
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")
        os.utime(tmp_path / name, (1000.0, 1000.0))
    os.utime(tmp_path / "echo2-jail-young", (5000.0, 5000.0))
    (tmp_path / "echo2-jail-link").symlink_to(tmp_path / "someone")
    code = "print('in', flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path / "echo2-jail-used", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as jail:
        assert jail.stdout is not None
        jail.stdout.readline()
        assert remove_scratch(tmp_path, now=5000.0 + LEAST_AGE_S - 1) == 3
        jail.communicate(b"\n")
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"echo2-jail-used", "echo2-jail-young", "echo2-other", "someone", "echo2-jail-link"}
