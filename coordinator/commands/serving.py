"""What `echo2 serve`, `migrate` and `doctor` do."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
import typer

from coordinator.adapters.child import child_environment
from coordinator.commands.output import console, show_json
from coordinator.config import Settings
from coordinator.errors import CannotServe
from coordinator.store.migrate import upgrade

ROOT_PACKAGES = ("coordinator", "worker_node", "p2p", "pricing")


def serve(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM."""
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,  # without the frames' locals: they may hold secrets
            structlog.processors.JSONRenderer(),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    asyncio.run(_serve(settings))


async def _serve(settings: Settings) -> None:
    from coordinator.app import coordinator

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with coordinator(settings) as served:
        console.print(f"coordinator at {served.url}", soft_wrap=True)
        console.print(f"  admin token: {served.admin_token_file}", soft_wrap=True)
        console.print(f"  identity:    {served.public_key}", soft_wrap=True)
        console.print("  next:        echo2 invite create, then echo2 job submit job.toml")
        await stop.wait()


def migrate(settings: Settings) -> None:
    """Upgrade the tables."""
    settings.home.mkdir(parents=True, exist_ok=True)
    upgrade(settings.store_url)
    console.print("the store is up to date")


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor."""

    name: str
    ok: bool
    detail: str


def doctor(settings: Settings, *, as_json: bool) -> None:
    """Print every check; exit code 1 when one fails."""
    checks = [_python(), _names(), _torch(), _jail(), _disk(settings)]
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


def check_torch() -> None:
    """Raises CannotServe when this installation cannot run a learner."""
    check = _torch()
    if not check.ok:
        raise CannotServe(check.detail)
