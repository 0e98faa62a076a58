"""What `echo2 serve`, `migrate` and `doctor` do."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import structlog
import typer

from coordinator.adapters.child import child_environment
from coordinator.commands.output import console, show_json
from coordinator.commands.pool import ANY_HOST, reachable
from coordinator.config import Settings
from coordinator.errors import CannotServe
from coordinator.store.errors import StoreError
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store
from p2p.adapters.control import stack

if TYPE_CHECKING:
    from coordinator.app import Served

ROOT_PACKAGES = ("coordinator", "worker_node", "p2p", "pricing")


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM. Raises CannotServe."""
    for root in settings.roots:
        if not root.expanduser().is_dir():
            raise CannotServe(f"root {root} is no directory: make it, or correct --root (ECHO2_ROOTS)")
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,  # without the frames' locals: they may hold secrets
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    try:
        asyncio.run(_serve(settings))
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise CannotServe(f"data_dir {settings.home} is on a full disk: free some, or choose another with --data-dir") from error


async def _serve(settings: Settings) -> None:
    from coordinator.app import coordinator

    short = _disk_warning(settings)
    if short is not None:
        structlog.get_logger().warning("disk_short", reason=short)
        console.print(f"warning: {short}", soft_wrap=True)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with coordinator(settings) as served:
        for line in _greeting(settings, served):
            console.print(line, soft_wrap=True)
        await stop.wait()
        console.print("stopping")
    console.print("stopped")


def _disk_warning(settings: Settings) -> str | None:
    """What `doctor` and /readyz say of a disk that has less room than jobs may run with; None when it has enough."""
    check = _disk(settings)
    if check.ok:
        return None
    return f"{check.name}: {check.detail} (ECHO2_MINIMUM_FREE_BYTES); jobs pause and new ones are refused until there is more"


def _greeting(settings: Settings, served: Served) -> Iterator[str]:
    """Where it serves, and what to type next."""
    here = "" if settings.data_dir == Settings.model_fields["data_dir"].default else f" --data-dir {settings.home}"
    url = reachable(served.url)
    yield f"coordinator at {url}"
    yield f"  dashboard:   {url}/"
    yield f"  admin token: {served.admin_token_file}"
    yield f"  identity:    {served.public_key}"
    if served.certificate_sha256 is not None:
        yield f"  for authors: --url {url}#sha256={served.certificate_sha256}"
    if url != served.url:
        yield f"  {ANY_HOST} stands for the name or address under which others reach this host"
    yield f"  next:        echo2 invite create{here}, then echo2 job submit job.toml{here}"


def migrate(settings: Settings) -> None:
    """Upgrade the tables. Raises CannotServe."""
    try:
        settings.home.mkdir(parents=True, exist_ok=True)
        upgrade(settings.store_url)
    except OSError as error:
        raise CannotServe(f"data_dir {settings.home} cannot be used: {error.strerror}; choose another with --data-dir") from error
    except StoreError as error:
        raise CannotServe(str(error)) from error
    console.print("the store is up to date")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    ok: bool
    detail: str


def doctor(settings: Settings, *, as_json: bool) -> None:
    """Print every check; exit code 1 when one fails."""
    machine = [_python(), _names(), _torch(), _device(), _jail(), _peer_to_peer()]
    checks = [*machine, _disk(settings), _store(settings), check_port(settings)]
    if as_json:
        show_json([asdict(check) for check in checks])
    else:
        for check in checks:
            console.print(f"{'ok  ' if check.ok else 'FAIL'} {check.name}: {check.detail}", soft_wrap=True)
    if not all(check.ok for check in checks):
        raise typer.Exit(1)


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    return Check("python", sys.version_info >= (3, 11), f"{version} (3.11 or newer is needed)")


def _names() -> Check:
    """Our flat package names must all be ours: some other installed thing may have taken one."""
    parents = {}
    for name in ROOT_PACKAGES:
        spec = importlib.util.find_spec(name)
        parents[name] = Path(spec.origin).parent.parent if spec is not None and spec.origin else None
    home = parents["coordinator"]
    strangers = [f"{name} is {parent}" for name, parent in parents.items() if parent != home]
    return Check("packages", not strangers, "; ".join(strangers) or f"all from {home}")


def _torch() -> Check:
    found = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("transformers") is not None
    return Check(
        "learner", found, "torch and transformers are installed" if found else "install the extra: pip install 'echo2[torch]'"
    )


def _device() -> Check:
    """What the learner would train on. In a child: importing torch takes seconds and hundreds of megabytes."""
    ask = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '', torch.__version__, sep=chr(10))"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True, timeout=120, check=False, env=child_environment()
    )
    if done.returncode != 0:
        return Check("device", False, f"torch cannot be imported: {done.stderr.strip().rpartition(chr(10))[2]}")
    name, version = done.stdout.split("\n")[:2]
    return Check(
        "device",
        True,
        f"{name} (torch {version})" if name else f"no GPU that torch {version} can use: the learner trains on the CPU",
    )


def _peer_to_peer() -> Check:
    """Never a failure: without libp2p, control messages go over HTTPS."""
    is_there, line = stack.describe()
    return Check("peer to peer", True, line if is_there else f"{line}. To add it: {stack.INSTALL}")


def _jail() -> Check:
    command = [sys.executable, "-m", "coordinator.environments.jail_check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=child_environment())
    if done.returncode != 0:
        return Check("jail", False, f"the check ended with code {done.returncode}: {done.stderr.strip().rpartition(chr(10))[2]}")
    report = json.loads(done.stdout)
    missing = "; ".join(report["missing"]) or "nothing is missing"
    words = f"network {'cut off' if report['network'] else 'open'}, seccomp {'on' if report['seccomp'] else 'off'}; {missing}"
    ok = bool(report["confines_author_code"])
    return Check("jail", ok, words if ok else f"{words}; jobs with `python:` rewards will refuse to start")


def _disk(settings: Settings) -> Check:
    home = settings.home
    place = next(path for path in (home, *home.parents) if path.exists())
    free = shutil.disk_usage(place).free
    return Check(
        "disk",
        free >= settings.minimum_free_bytes,
        f"{free >> 20} MiB free at {place}, at least {settings.minimum_free_bytes >> 20} MiB are needed",
    )


def _store(settings: Settings) -> Check:
    """Opens what is there and changes nothing."""
    if settings.database_url is None:
        path = settings.home / "echo2.sqlite3"
        return Check("store", True, f"SQLite, {path}{'' if path.exists() else ' (made by the first `echo2 serve`)'}")
    try:
        asyncio.run(_reach(settings.store_url))
    except StoreError as error:
        return Check("store", False, str(error))
    return Check("store", True, "the server of ECHO2_DATABASE_URL answers and its tables are this release's")


async def _reach(url: str) -> None:
    await (await open_store(url)).close()


def check_port(settings: Settings) -> Check:
    """Whether `echo2 serve` could listen, or does already."""
    where = f"{settings.host}:{settings.port}"
    try:
        with socket.create_server(
            (settings.host, settings.port), family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        ):
            return Check("port", True, f"{where} is free")
    except OSError as error:
        if error.errno == errno.EADDRINUSE and _serves(settings):
            return Check("port", True, f"{where} is taken by the coordinator of {settings.home}, which runs")
        why = "in use" if error.errno == errno.EADDRINUSE else error.strerror
        return Check("port", False, f"{where} cannot be listened on: {why}; choose another with ECHO2_HOST and ECHO2_PORT")


def _serves(settings: Settings) -> bool:
    """Whether the coordinator of this data directory runs on this port."""
    try:
        told = json.loads((settings.home / "serve.json").read_text())
        os.kill(int(told["pid"]), 0)
    except (OSError, ValueError, KeyError):
        return False
    return str(told["url"]).endswith(f":{settings.port}")
