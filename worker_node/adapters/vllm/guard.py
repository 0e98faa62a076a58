"""Keeps a server and all that it started from outliving the worker: `python guard.py FOLDER COMMAND...`, standard library only.

Its standard input is a pipe that the worker holds open. When that closes (the worker ended, however it did) the server gets a
moment to stop; then, as when the server ends by itself, everything else in this process's group is killed and its shared memory
removed. So nothing is left even where the server ignores SIGTERM, leaves children behind, or was killed. A SIGTERM to the guard
is handed on. Where the worker is gone the server's folder is removed too.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

PR_SET_PDEATHSIG = 1
GRACE_S = 3.0
LOOK_S = 0.5
NOTE = "shared-memory"  # in the folder: names of segments, one a line
_SHARED = Path("/dev/shm")  # noqa: S108 (where the kernel shows shared memory)
# Of Python, NCCL, torch and vLLM's CPU ranks: what else is mapped there belongs to drivers or others.
_SEGMENT = re.compile(r"(?:psm_|nccl-|torch_|sem\.mp-)[^/\s]+|[^/\s]*cpushm[^/\s]*")


def die_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends (prctl(2))."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def processes() -> Iterator[int]:
    """All that are to be seen."""
    return (int(entry.name) for entry in os.scandir("/proc") if entry.name.isdecimal())


def members(group: int, but: int = 0) -> list[int]:
    """Living processes of a group, other than `but` (proc(5): state and group are the first and third field after the name)."""
    found = []
    for pid in processes():
        with suppress(OSError):
            state, _, its_group = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()[:3]
            if pid != but and state not in "ZX" and int(its_group) == group:
                found.append(pid)
    return found


def segments(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm of what these processes have mapped, by inode: a semaphore is mapped under a name that it had before."""
    with suppress(OSError), os.scandir(_SHARED) as entries:
        names = {entry.inode(): entry.name for entry in entries if _SEGMENT.fullmatch(entry.name)}
        return {names[inode] for inode in _mapped(pids if names else ()) if inode in names}
    return set()


def _mapped(pids: Iterable[int]) -> set[int]:
    """Inodes in /dev/shm (proc(5): the fifth field of a line of `maps`)."""
    found: set[int] = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text("utf-8", "replace").splitlines()
            found |= {int(line.split()[4]) for line in lines if f" {_SHARED}/" in line}
    return found


def noted(folder: Path) -> set[str]:
    """Segments that were written down for a server."""
    try:
        names = (folder / NOTE).read_text("utf-8").split()
    except (OSError, ValueError):
        return set()
    return {name for name in names if _SEGMENT.fullmatch(name)}


def remove_segments(names: Collection[str]) -> None:
    """Those that no living process has mapped."""
    for name in set(names) - (segments(processes()) if names else set()):
        with suppress(OSError):
            (_SHARED / name).unlink()


def kill(pids: Iterable[int]) -> None:
    """SIGKILL to each that is still there."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait(child: subprocess.Popen[bytes], folder: Path) -> tuple[int, set[str]]:
    """Its exit status, and what it had in shared memory before the worker wrote that down: it may die at its start, with no trace."""
    seen: set[str] = set()
    while not (folder / NOTE).exists():
        with suppress(subprocess.TimeoutExpired):
            return child.wait(LOOK_S), seen
        seen |= segments(members(os.getpgid(0), os.getpid()))
    return child.wait(), seen


def end_all(folder: Path, names: set[str]) -> None:
    """End the rest of the process group, after a moment in which it may end by itself; remove its shared memory, and what is named."""
    group, me = os.getpgid(0), os.getpid()
    names = names | noted(folder) | segments(members(group, me))
    end = time.monotonic() + GRACE_S
    while (left := members(group, me)) and time.monotonic() < end:
        time.sleep(0.05)
    while left:
        names |= segments(left)
        kill(left)
        time.sleep(0.02)
        left = members(group, me)
    remove_segments(names)


def watch_pipe(child: subprocess.Popen[bytes], orphaned: threading.Event) -> None:
    """End the server once the worker's end of the pipe is closed."""
    while os.read(0, 1024):
        pass
    orphaned.set()
    child.terminate()
    time.sleep(GRACE_S)
    child.kill()


def main() -> None:
    """Run the command to its end."""
    if os.getpgid(0) != os.getpid():  # what is in the group is killed: it must be ours alone
        os.setpgid(0, 0)
    folder, orphaned = Path(sys.argv[1]), threading.Event()
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL, preexec_fn=die_with_parent)  # noqa: PLW1509 (no thread yet)
    signal.signal(signal.SIGTERM, lambda *_: child.terminate())
    threading.Thread(target=watch_pipe, args=(child, orphaned), daemon=True).start()
    code, names = wait(child, folder)
    with suppress(OSError):  # the log's disk may be full
        os.write(2, f"guard: the server ended with {code}\n".encode())
    end_all(folder, names)
    if orphaned.is_set():
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
