"""Keeps a server and all that it started from outliving the worker: `python guard.py COMMAND...`, standard library only.

Its standard input is a pipe that the worker holds open. When that closes (the worker ended, however it did) the server gets a
moment to stop; then, as when the server ends by itself, everything in this process's group is killed. So nothing is left even
where the server ignores SIGTERM, or leaves children behind. A SIGTERM to the guard is handed on.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def group_lives(group: int, but: int) -> bool:
    """Whether a process of this group lives, other than `but` (proc(5): state and group are the first and third field after the name)."""
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal() and int(entry.name) != but:
            try:
                with open(f"/proc/{entry.name}/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 (starts quicker)
                    state, _, its_group = file.read().rpartition(")")[2].split()[:3]
            except OSError:
                continue
            if state != "Z" and int(its_group) == group:
                return True
    return False


def end_all() -> None:
    """Kill the whole process group, this process included, after a moment in which it may end by itself (shared memory is tidied)."""
    end = time.monotonic() + GRACE_S
    while time.monotonic() < end and group_lives(os.getpgid(0), but=os.getpid()):
        time.sleep(0.05)
    os.killpg(os.getpgid(0), signal.SIGKILL)


def watch_pipe(child: subprocess.Popen[bytes]) -> None:
    """Return never: end everything once the worker's end of the pipe is closed."""
    while os.read(0, 1024):
        pass
    child.terminate()
    end_all()


def main() -> None:
    """Run the command to its end."""
    child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509 (no thread yet)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=watch_pipe, args=(child,), daemon=True).start()
    code = child.wait()
    print(f"guard: the server ended with {code}", file=sys.stderr, flush=True)
    end_all()


if __name__ == "__main__":
    main()
