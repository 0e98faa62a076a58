"""Faults of other systems that the owner of a machine would meet; the numbers are those of docs/faults.md."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from worker_node.cli import main; main()"]
INVITE = f"echo2-invite-1.{'ab' * 32}.c2VjcmV0LXNlY3JldC1zZWNyZXQ"


def test_fault_25_a_coordinator_that_is_not_there_is_one_line_and_no_trace(tmp_path: Path) -> None:
    """The command that checks before joining says what cannot be reached, and how it went on."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ECHO2_")}
    url = f"https://127.0.0.1:{port}"
    done = subprocess.run(
        [*COMMAND, "doctor", url, "--invite", INVITE, "--engine", "scripted", "--state-dir", str(tmp_path)],
        env={**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1
    assert "Traceback" not in said
    assert f"127.0.0.1:{port}" in said
