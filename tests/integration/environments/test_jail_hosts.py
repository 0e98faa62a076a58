"""The jail on other hosts: as an ordinary user, and where the kernel offers nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from coordinator.environments.jail import JailReport
from coordinator.environments.link import pack, unpack

# Refuse unshare and further filters from here on, as a strict container does; then be the child.
BARREN_HOST = """
import errno, platform, runpy, sys
from coordinator.environments import kernel, seccomp, syscalls
known = syscalls.machine(platform.machine())
doors = kernel.Kernel()
doors.no_new_privs()
refuse = 0x50000 | errno.EPERM
place = 0 if platform.machine() == "x86_64" else 1
unshare = syscalls.MACHINE["unshare"][place]
prctl = (157, 167)[place]
landlock = 444
program = [(0x20, 0, 0, 0), (0x15, 0, 1, unshare), (0x06, 0, 0, refuse), (0x15, 0, 1, landlock), (0x06, 0, 0, refuse),
           (0x15, 0, 3, prctl), (0x20, 0, 0, 16), (0x15, 0, 1, 22), (0x06, 0, 0, refuse), (0x06, 0, 0, 0x7FFF0000)]
seccomp.install(program, doors.prctl)
runpy.run_module("coordinator.environments.child", run_name="__main__")
"""

AS_A_USER = """
import json, os, sys
from pathlib import Path
import asyncio, socket, ctypes
from coordinator.environments.jail import JailLimits, JailPlan, apply
scratch = Path(sys.argv[1])
os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(65534, 65534, 65534)
report = apply(JailPlan(JailLimits(), scratch, (), os.getppid()))
Path("note").write_text("fine")
facts = {"note": Path("note").read_text(), "uid": os.getuid(), "pid": os.getpid()}
for name, action in {"fork": os.fork, "read": lambda: open("/etc/passwd"), "socket": socket.socket, "setuid": lambda: os.setuid(0)}.items():
    try: action(); facts[name] = "allowed"
    except OSError as error: facts[name] = "refused"
print(json.dumps({"report": report.to_json(), "facts": facts}))
"""


def start_child(script: str, request: dict[str, Any]) -> dict[str, Any]:
    """The first answer of a child that runs `script`."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = [sys.executable, "-c", script, "--link", str(theirs.fileno()), "--parent", str(os.getpid())]
        with subprocess.Popen(arguments, pass_fds=[theirs.fileno()]) as process:
            theirs.close()
            ours.settimeout(30)
            ours.sendall(pack(request))
            with ours.makefile("rb") as stream:
                answer = unpack(stream.read(int.from_bytes(stream.read(4), "little")))
            ours.close()
            process.wait(30)
    return answer


def request_for(tmp_path: Path, made: ModuleType, kind: str) -> dict[str, Any]:
    made.reward_plane(tmp_path, "open('ran', 'w')\ndef reward(completions): return [1.0]\n")
    spec = {"type": kind, "seed": 0, "tokenizer_dir": str(tmp_path / "model")}
    if kind != "digit_sort":
        spec |= {"train": str(tmp_path / "train.jsonl"), "code": str(tmp_path / "rewards.py")}
    (tmp_path / "scratch").mkdir()
    return {
        "do": "start",
        "id": "1",
        "cpu_s": 30,
        "spec": spec,
        "limits": {},
        "scratch": str(tmp_path / "scratch"),
        "variables": {},
    }


def test_author_code_is_refused_where_it_cannot_be_jailed(tmp_path: Path, made: ModuleType) -> None:
    """Neither network namespace nor seccomp: the reason is given, and no line of the code has run."""
    answer = start_child(BARREN_HOST, request_for(tmp_path, made, "python:rewards.py:reward"))
    assert "can neither cut its network off nor filter its system calls" in answer["broken"]
    assert "network namespace: unshare" in answer["broken"]
    assert not answer["jail"]["network"]
    assert not answer["jail"]["seccomp"]
    assert not (tmp_path / "scratch" / "ran").exists()


def test_built_in_environments_run_there_and_say_what_is_missing(tmp_path: Path, made: ModuleType) -> None:
    """With rlimits at least."""
    answer = start_child(BARREN_HOST, request_for(tmp_path, made, "digit_sort"))
    assert answer["info"]["eval_prompts"] == 1024
    missing = " ".join(answer["jail"]["missing"])
    for layer in ("network namespace", "seccomp", "Landlock", "bounded scratch"):
        assert layer in missing
    assert "AS" in answer["jail"]["rlimits"]


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root; without root the other tests are this one")
def test_an_ordinary_user_is_jailed_through_a_user_namespace(tmp_path: Path) -> None:
    """Same layers, where the kernel lets users make namespaces; the user stays who they are."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    for directory in (scratch, *scratch.parents):
        if directory == Path(tempfile.gettempdir()):
            break
        directory.chmod(0o777)
    done = subprocess.run([sys.executable, "-c", AS_A_USER, str(scratch)], capture_output=True, text=True, check=True)
    values = json.loads(done.stdout)
    report, facts = values["report"], values["facts"]
    refused = dict.fromkeys(["fork", "read", "socket", "setuid"], "refused")
    assert facts | {"pid": 0} == {"note": "fine", "uid": 65534, "pid": 0} | refused, report
    assert report["network"] or any("network namespace" in words for words in report["missing"])
    assert report["seccomp"]
    assert report["user"] == 65534


@pytest.mark.parametrize(
    ("report", "confines"),
    [
        (JailReport(), False),
        (JailReport(network=True), True),
        (JailReport(seccomp=True, sockets_denied=True), True),
        (JailReport(seccomp=True, sockets_denied=False), False),
        (JailReport(landlock=7, rlimits=("AS",), user=1), False),
    ],
)
def test_author_code_needs_no_network(report: JailReport, confines: bool) -> None:
    """By namespace or by filter, and the filter must have held when tried."""
    assert report.confines_author_code is confines
