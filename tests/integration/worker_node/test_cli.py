"""The command line as a stranger uses it: processes, exit codes, one clear line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Until = Callable[..., Any]
COMMAND = [sys.executable, "-c", "from worker_node.cli import main; main()"]


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("ECHO2_")}
    return {**kept, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **extra}


def call(*arguments: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], env=environment(**extra), capture_output=True, text=True, timeout=60, check=False)


def invite(coordinator: Any) -> str:
    return f"echo2-invite-1.{coordinator.public}.c2VjcmV0LXNlY3JldC1zZWNyZXQ"


async def start(coordinator: Any, state: Path, *more: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *COMMAND,
        "join",
        coordinator.url,
        "--price",
        "0.35",
        "--engine",
        "scripted",
        "--state-dir",
        str(state),
        *more,
        env=environment(ECHO2_INVITE=invite(coordinator)),
        stderr=asyncio.subprocess.PIPE,
    )


async def ended(process: asyncio.subprocess.Process) -> str:
    _, errors = await asyncio.wait_for(process.communicate(), 30.0)
    return errors.decode()


def test_help_and_doctor_import_nothing_heavy(tmp_path: Path) -> None:
    """They must work where torch is not installed."""
    block = (
        "import sys, importlib.abc\n"
        "class Block(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'sqlalchemy'):\n"
        "            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "import importlib.util\n"
        "find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, package=None: None if name in ('torch', 'transformers') else find(name, package)\n"
        "from worker_node.cli import main\n"
        "main()\n"
    )
    for arguments, code in (
        (["--help"], 0),
        (["doctor", "--engine", "scripted", "--json", "--state-dir", str(tmp_path)], 0),
        (["doctor"], 1),
    ):
        done = subprocess.run(
            [sys.executable, "-c", block, *arguments], env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr
    assert "pip install 'echo2[torch]'" in done.stdout


async def test_doctor_checks_a_coordinator(coordinator: Any, tmp_path: Path) -> None:
    """Reachability, identity, protocol and clock; a wrong key fails with exit code 1."""
    await coordinator.start()
    arguments = ("doctor", coordinator.url, "--engine", "scripted", "--state-dir", str(tmp_path), "--json")
    done = await asyncio.to_thread(call, *arguments, ECHO2_INVITE=invite(coordinator))
    findings = {finding["what"]: finding for finding in json.loads(done.stdout)}
    assert done.returncode == 0
    assert {findings[what]["level"] for what in ("coordinator", "protocol", "clock")} == {"OK"}
    wrong = await asyncio.to_thread(call, *arguments, ECHO2_INVITE=invite(coordinator).replace(coordinator.public, "ab" * 32))
    assert wrong.returncode == 1
    assert "the invite is for" in wrong.stdout
    without = await asyncio.to_thread(call, *arguments)
    assert "no invite" in without.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["join", "http://127.0.0.1:9"], "pass the operator's invite"),
        (["join", "http://127.0.0.1:9", "--invite", "nonsense"], "the invite must look like"),
        (["status"], "no worker ever ran"),
        (["drain"], "no worker runs"),
        (["identity", "show"], "no identity"),
        (["bench", "/nonexistent", "--engine", "scripted"], "config.json"),
    ],
)
def test_a_failure_is_one_clear_line_and_exit_code_1(arguments: list[str], words: str, tmp_path: Path) -> None:
    """No traceback, and the line says what to do."""
    state = [] if arguments[0] == "bench" else ["--state-dir", str(tmp_path)]
    done = call(*arguments, *state)
    assert done.returncode == 1
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if line.startswith("echo2-worker:")]) == 1


async def test_join_status_and_drain(coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until) -> None:
    """A process from start to a drained end; status tells each stage; the key stays; no secret is logged."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1))]
    state = tmp_path / "state"
    process = await start(coordinator, state, "--slots", "4")
    await until(lambda: len(coordinator.accepted) == 2, "two completions")
    shown = await asyncio.to_thread(call, "status", "--state-dir", str(state), "--json")
    assert shown.returncode == 0
    assert json.loads(shown.stdout)["running"] is True
    second = await start(coordinator, state)
    assert "another worker already runs" in await ended(second)
    assert second.returncode == 1
    drained = await asyncio.to_thread(call, "drain", "--state-dir", str(state))
    assert drained.returncode == 0
    errors = await ended(process)
    assert process.returncode == 0
    assert "back it up" in errors
    assert "c2VjcmV0" not in errors
    assert coordinator.left
    after = await asyncio.to_thread(call, "status", "--state-dir", str(state))
    assert after.returncode == 1
    assert after.stdout.startswith("not working, because its owner stops it (SIGTERM)")


async def test_a_running_worker_asks_another_price(coordinator: Any, tmp_path: Path, until: Until) -> None:
    """`echo2-worker price` reaches the next beat; a worker that starts anew asks what it was started with."""
    await coordinator.start()
    process = await start(coordinator, tmp_path)
    await until(lambda: coordinator.beats, "a beat")
    assert coordinator.beats[-1].price_uusd_per_hour is None
    done = await asyncio.to_thread(call, "price", "0.5", "--state-dir", str(tmp_path))
    assert (done.returncode, done.stdout.strip()) == (0, "the worker asks 0.5 USD an hour from its next heartbeat on")
    await until(lambda: coordinator.beats[-1].price_uusd_per_hour == 500_000, "a beat with the price")
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    late = await asyncio.to_thread(call, "price", "0.7", "--state-dir", str(tmp_path))
    assert late.returncode == 1
    assert "no worker runs" in late.stderr
    beats = len(coordinator.beats)
    again = await start(coordinator, tmp_path)
    await until(lambda: len(coordinator.beats) > beats, "another beat")
    assert coordinator.beats[-1].price_uusd_per_hour is None
    again.send_signal(signal.SIGKILL)
    await again.communicate()


async def test_a_killed_worker_is_seen_as_dead(coordinator: Any, tmp_path: Path, until: Until) -> None:
    """The lock goes with the process, whatever the status file says."""
    await coordinator.start()
    process = await start(coordinator, tmp_path)
    await until(lambda: coordinator.beats and (tmp_path / "status.json").exists(), "a beat")
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    done = await asyncio.to_thread(call, "status", "--state-dir", str(tmp_path))
    assert done.returncode == 1
    assert "is dead" in done.stdout


@pytest.mark.parametrize(
    "point",
    [
        "worker.fetched",
        "worker.swapped",
        "worker.confirmed",
        "worker.generated",
        "worker.submitted.before",
        "worker.submitted.after",
    ],
)
async def test_a_worker_killed_at_a_commit_point_comes_back(
    coordinator: Any, make_model: Callable[[int], Path], tmp_path: Path, until: Until, point: str
) -> None:
    """kill -9 anywhere: the next start resumes with the same key and what was verified on disk, and work goes on."""
    await coordinator.start()
    coordinator.publish(make_model(0), 0)
    coordinator.work = [coordinator.lease_of("L1", (0, 1))]
    first = await start(coordinator, tmp_path, "--crash-at", f"{point}:1")
    await ended(first)
    assert first.returncode == -signal.SIGKILL
    coordinator.work = [coordinator.lease_of("L2", (0, 1))]
    second = await start(coordinator, tmp_path)
    await until(lambda: ("L2", 0) in coordinator.accepted and ("L2", 1) in coordinator.accepted, "work after the crash")
    second.send_signal(signal.SIGTERM)
    await ended(second)
    assert second.returncode == 0
    assert len({join.public_key for join in coordinator.joins}) == 1


def test_identity_can_be_exported_and_imported(tmp_path: Path) -> None:
    """The passphrase comes from the environment in scripts."""
    from worker_node.adapters.identity import load_or_create

    load_or_create(tmp_path / "one")
    words = {"ECHO2_IDENTITY_PASSPHRASE": "a long passphrase"}
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    file = str(tmp_path / "key.pem")
    assert call("identity", "export", file, "--state-dir", one, **words).returncode == 0
    assert call("identity", "import", file, "--state-dir", two, **words).returncode == 0
    shown = [json.loads(call("identity", "show", "--json", "--state-dir", state).stdout)["worker_id"] for state in (one, two)]
    assert shown[0] == shown[1]


def test_install_service_keeps_the_invite_out_of_the_unit(tmp_path: Path) -> None:
    """The invite lies in a 0600 file that join reads; other options are passed on."""
    code = f"echo2-invite-1.{'ab' * 32}.c2VjcmV0LXNlY3JldC1zZWNyZXQ"
    units, state = tmp_path / "units", tmp_path / "state"
    done = call(
        "install-service",
        "https://c.example",
        "--invite",
        code,
        "--state-dir",
        str(state),
        "--unit-dir",
        str(units),
        "--price",
        "0.35",
    )
    assert done.returncode == 0, done.stderr
    text = (units / "echo2-worker.service").read_text()
    assert "c2VjcmV0" not in text
    assert '"--price" "0.35"' in text
    assert f'"--invite-file" "{state}/invite"' in text
    assert (state / "invite").stat().st_mode & 0o777 == 0o600
