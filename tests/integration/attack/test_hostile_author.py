"""Reward code, data and models of a hostile author, in a whole system: nothing of the operator's is read, nothing stands still."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.rest_client import RequestFailed
from tests.e2e.cluster import BIN, Cluster, scripted_job

# Each attempt that succeeds is worth 1000. What is left is a reward with variance, so that the job trains.
THIEF = """
import ctypes, glob, os, resource, signal, socket, sys

HOME, PARENT = {home!r}, os.getppid()

def read(path):
    with open(path, "rb") as file:
        return len(file.read(1))

def forge():
    frame = b'{{"id":"0","graded":[["scored",5000.0,"forged",""]],"metrics":{{}}}}'
    for number in (1, 2):
        os.write(number, len(frame).to_bytes(4, "little") + frame)
    return "HOME" in os.environ or any(name.startswith("ECHO2") for name in os.environ)

ATTEMPTS = [
    lambda: read(HOME + "/admin.token"),
    lambda: read(HOME + "/identity.pem"),
    lambda: read(HOME + "/echo2.sqlite3"),
    lambda: read(HOME + "/serve.json"),
    lambda: len(os.listdir(HOME)),
    lambda: read(f"/proc/{{PARENT}}/environ"),
    lambda: read(f"/proc/{{PARENT}}/mem"),
    lambda: len(os.listdir(f"/proc/{{PARENT}}/fd")),
    lambda: len(glob.glob(HOME + "/*")),
    lambda: open(HOME + "/stolen", "w").write("x"),
    lambda: open("/tmp/echo2-stolen", "w").write("x"),
    lambda: os.symlink(HOME, "link") or read("link/admin.token"),
    lambda: os.kill(PARENT, signal.SIGKILL) is None,
    lambda: os.kill(-1, signal.SIGTERM) is None,
    lambda: os.fork() >= 0,
    lambda: os.execv("/bin/true", ["true"]),
    lambda: socket.create_connection(("127.0.0.1", {port}), timeout=1) is not None,
    lambda: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2) is None,
    lambda: ctypes.CDLL(None).ptrace(16, PARENT, 0, 0) == 0,
    lambda: os.setuid(0) is None and read(HOME + "/admin.token"),
    lambda: os.chroot(".") is None,
    forge,
]

def won():
    count = 0
    for number, attempt in enumerate(ATTEMPTS):
        try:
            count += bool(attempt())
        except BaseException:
            continue
    return count

def steal(prompts, completions, **columns):
    stolen = 1000.0 * won()
    return [stolen + sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def hang_or_allocate(prompts, completions, **columns):
    first = completions[0]
    if first and first[0].isdigit():
        kept = []
        while True:
            kept.append(bytes(64 << 20))
    if first and first[0].islower():
        while True:
            pass
    return [sum(c.isdigit() for c in text) / max(len(text), 1) for text in completions]

def absurd(prompts, completions, **columns):
    return [1e30 if index % 2 else -1e30 for index, _ in enumerate(completions)]
"""
ESCAPES = "\x1b[2J\x1b]0;owned\x07\u202e<script>alert(1)</script>[red]x[/red]"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        made.start_coordinator()
        made.start_worker("w1")
        yield made


def hostile_job(cluster: Cluster, model: Path, function: str, *, steps: int, **environment: Any) -> str:
    served = json.loads((cluster.home / "serve.json").read_text())
    code = cluster.folder / "thief.py"
    code.write_text(THIEF.format(home=str(cluster.home), port=int(served["url"].rpartition(":")[2])))
    job = scripted_job(model, budget={"steps": steps})
    job["environment"] = {**job["environment"], "type": f"python:{code}:{function}", **environment}
    return cluster.submit(job)


def test_reward_code_gets_nothing_of_the_coordinators(cluster: Cluster, tiny_model: Path) -> None:
    job = hostile_job(cluster, tiny_model, "steal", steps=3)
    ended = cluster.until_ended(job, within_s=60, restart=False)
    assert ended["state"] == "completed", ended["reason"]
    rollouts = cluster.run(lambda c: c.get(f"/jobs/{job}/rollouts"))["rollouts"]
    scored = [r["reward"] for r in rollouts if r["reward"] is not None]
    assert scored
    assert max(scored) <= 1.0, "an attempt succeeded"
    assert not (cluster.home / "stolen").exists()
    assert not Path("/tmp/echo2-stolen").exists()
    assert cluster.audit(job)["ok"]


@pytest.mark.long
def test_reward_code_that_hangs_and_allocates_is_outcomes_not_an_outage(cluster: Cluster, tiny_model: Path) -> None:
    """Completions whose grading never ends are timed out, those before it die of memory; the API answers all the while."""
    job = hostile_job(cluster, tiny_model, "hang_or_allocate", steps=2, grade_timeout_s=1.0)
    ended = cluster.until_ended(job, within_s=90, restart=False)
    assert ended["state"] in ("completed", "paused"), ended["reason"]
    states = cluster.job(job)["work"]["rollouts"]
    assert states.get("grader_timeout", 0) + states.get("grader_failed", 0) > 0, states
    assert cluster.audit(job)["ok"]


def test_rewards_beyond_all_measure_end_no_job(cluster: Cluster, tiny_model: Path) -> None:
    """+-1e30, the most that counts as a number: the weights stay numbers, and figures that are none are left out."""
    job = hostile_job(cluster, tiny_model, "absurd", steps=3)
    ended = cluster.until_ended(job, within_s=60, restart=False)
    assert ended["state"] == "completed", ended["reason"]
    assert cluster.audit(job)["ok"]


def echo2(cluster: Cluster, *words: str) -> str:
    command = [str(BIN / "echo2"), *words, "--data-dir", str(cluster.home)]
    environment = {**os.environ, "FORCE_COLOR": "", "TERM": "xterm", "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, timeout=30, check=True, env=environment).stdout.decode()


def test_escapes_in_prompts_do_not_reach_the_terminal(cluster: Cluster, tiny_model: Path) -> None:
    """Prompts are the author's, completions a stranger's: both are shown to the operator."""
    data = cluster.folder / "escapes.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{ESCAPES} {n}"}) + "\n" for n in range(8)))
    job = scripted_job(tiny_model, budget={"steps": 2})
    job["environment"] = {**job["environment"], "train": str(data)}
    job_id = cluster.submit(job)
    cluster.until_ended(job_id, within_s=60, restart=False)
    shown = echo2(cluster, "job", "rollouts", job_id)
    assert "owned" in shown
    for character in "\x1b\x07\u202e":
        assert character not in shown
    assert "[red]" in shown
    assert echo2(cluster, "job", "rollouts", job_id, "--json").isascii()
    raw = cluster.run(lambda c: c.get(f"/jobs/{job_id}/rollouts"))["rollouts"]
    assert any(ESCAPES in r["prompt"] for r in raw), "the API gives the text as it is"


BAD_DATA = (
    (b'{"prompt": "' + b"x" * (8 << 20) + b'"}\n', "is longer than"),
    (b'{"prompt": ' + b"[" * 200_000 + b"]" * 200_000 + b"}\n", "is not JSON"),
    (b'{"prompt": "a\x00b"}\n', "is not JSON"),
    (b"\x00" * 5000, "is not JSON"),
    (b'{"prompt": "\\ud800"}\n', "valid UTF-8"),
    (b"\xff\xfe\n", "is not JSON"),
    (b"\n\n\n", "no rows"),
)


def refusal(cluster: Cluster, job: dict[str, Any]) -> str:
    """The words at submit, or those of the job that failed by itself."""
    try:
        job_id = cluster.submit(job)
    except RequestFailed as error:
        return str(error)
    ended = cluster.until_ended(job_id, within_s=30, restart=False)
    assert ended["state"] == "failed"
    return str(ended["reason"])


def test_data_that_is_none_is_refused_in_words(cluster: Cluster, tiny_model: Path) -> None:
    """Long lines, deep nesting, NUL bytes, half characters: at submit, or when the job begins, with the line and the fix."""
    for number, (lines, words) in enumerate(BAD_DATA):
        data = cluster.folder / f"bad{number}.jsonl"
        data.write_bytes(lines)
        job = scripted_job(tiny_model)
        job["environment"] = {**job["environment"], "train": str(data)}
        said = refusal(cluster, job)
        assert words in said, number
        assert len(said) < 3000


def tar(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.GNU_FORMAT) as made:
        for info, content in members:
            made.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, content: bytes = b"x", *, size: int | None = None, kind: bytes = tarfile.REGTYPE, link: str = "") -> Any:
    info = tarfile.TarInfo(name)
    info.size, info.type, info.linkname = len(content) if size is None else size, kind, link
    return info, content


GOOD = (member("config.json", b"{}"), member("model.safetensors"))


@pytest.mark.parametrize(
    "body",
    [
        tar(*GOOD, member("../../admin.token")),
        tar(*GOOD, member("/etc/cron.d/x")),
        tar(*GOOD, member("config.json\x00.py")),
        tar(*GOOD, member("tokenizer.json", b"", kind=tarfile.SYMTYPE, link="../../identity.pem")),
        tar(*GOOD, member("tokenizer.json", b"", kind=tarfile.LNKTYPE, link="/etc/passwd")),
        tar(*GOOD, member("tokenizer.json", b"", kind=tarfile.CHRTYPE)),
        tar(*GOOD, member("pytorch_model.bin", b"\x80\x04cos\nsystem\n.")),
        tar(*GOOD, member("data.pkl", b"\x80\x04.")),
        tar(*GOOD, member("modeling_x.py", b"import os")),
        tar(*GOOD)[:1536],
        # a member that declares far more than follows, and one that declares more than any limit
        tar(*GOOD)[:1024] + member("tokenizer.json", size=1 << 40)[0].tobuf(tarfile.GNU_FORMAT) + bytes(1024),
        tar(*GOOD)[:2048]
        + member("tokenizer.json", b"", size=8 << 30, kind=tarfile.GNUTYPE_SPARSE)[0].tobuf(tarfile.GNU_FORMAT)
        + bytes(2048),
    ],
    ids=["up", "absolute", "nul", "symlink", "hardlink", "device", "pickle", "pkl", "code", "cut", "huge", "sparse"],
)
async def test_models_that_are_more_than_a_model_are_refused_and_leave_nothing(bench: Any, body: bytes) -> None:
    headers = {"Content-Type": "application/octet-stream"}
    problem = await bench.ask("POST", "/api/v1/files?kind=model&name=m.tar", data=body, headers=headers, status=422)
    assert problem["code"] == "model_tar_refused"
    uploads = bench.deps.settings.data_dir / "uploads"
    assert not uploads.exists() or not list(uploads.iterdir())


@pytest.mark.long
async def test_a_config_that_asks_for_remote_code_trains_nothing(cluster: Cluster, tiny_model: Path) -> None:
    """An allow-listed file with a hostile content: auto_map names code, the architecture is not on the list."""
    config = json.loads((tiny_model / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_evil.Evil"}, "architectures": ["Evil"], "model_type": "evil"}
    members = [(path.name, path.read_bytes()) for path in tiny_model.iterdir() if path.name != "config.json"]
    packed = cluster.folder / "evil.tar"
    packed.write_bytes(tar(member("config.json", json.dumps(config).encode()), *(member(name, data) for name, data in members)))
    import asyncio

    def submit() -> dict[str, Any]:
        reference = cluster.run(lambda c: c.upload(packed, kind="model", name="evil.tar"))["reference"]
        try:
            job = cluster.submit({**scripted_job(tiny_model), "model": reference})
        except RequestFailed as refused:
            return {"state": "failed", "reason": str(refused)}
        return cluster.until_ended(job, within_s=40, restart=False)

    ended = await asyncio.to_thread(submit)
    assert ended["state"] == "failed"
    assert "evil" in ended["reason"].lower()
