"""What of the vLLM engine needs no vLLM: its client, its guard, how it finds a vLLM, what it makes of a log."""

from __future__ import annotations

import asyncio
import mmap
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import pytest
import torch
from aiohttp import web
from typer.testing import CliRunner

from worker_node.adapters.engines import make_engine
from worker_node.adapters.model_files import check_same_tensors, read_config, read_table, weight_files
from worker_node.adapters.vllm import guard as vllm_guard
from worker_node.adapters.vllm import server as vllm_server
from worker_node.adapters.vllm.client import Client, Gone, Refused
from worker_node.cli import app
from worker_node.config import EngineSettings, VllmSettings, engine_settings, vllm_settings
from worker_node.errors import ConfigError, EngineError

GUARD = Path(vllm_server.__file__).with_name("guard.py")


class Answering:
    """A server on a Unix socket, in a thread of its own. `hold`: how long it keeps a generation waiting."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.hung_up = threading.Event()
        self.kept: list[bool] = []
        self.loop = asyncio.new_event_loop()
        self.ready = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.ready.wait(10.0)

    def run(self) -> None:
        app = web.Application()
        app.router.add_post("/inference/v1/generate", self.generate)
        app.router.add_get("/health", self.health)
        app.router.add_post("/pause", self.pause)
        self.runner = web.AppRunner(app, handler_cancellation=True)
        self.loop.run_until_complete(self.runner.setup())
        self.loop.run_until_complete(web.UnixSite(self.runner, str(self.socket)).start())
        self.ready.set()
        self.loop.run_forever()

    async def generate(self, request: web.Request) -> web.Response:
        self.kept.append(request.keep_alive)
        body = await request.json()
        match body["token_ids"]:
            case [0]:
                return web.json_response({"error": {"message": "no such token"}}, status=400)
            case [1]:
                return web.Response(text="<html>")
            case [2]:
                try:
                    await asyncio.sleep(60.0)
                except asyncio.CancelledError:
                    self.hung_up.set()
                    raise
        return web.json_response({"echo": body["token_ids"]})

    async def health(self, request: web.Request) -> web.Response:
        self.kept.append(request.keep_alive)
        return web.Response(text="well")

    async def pause(self, request: web.Request) -> web.Response:
        if request.query.get("mode") == "slow":
            await asyncio.sleep(60.0)
        return web.Response(text="no such mode, and a long explanation" * 100, status=422)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(10.0)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(10.0)
        self.loop.close()


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    made = Answering(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def client(answering: Answering) -> Iterator[Client]:
    made = Client(answering.socket)
    yield made
    made.close()


def test_calls_have_their_own_deadlines_and_errors_their_words(client: Client) -> None:
    assert client.call("GET", "/health") == "well"
    with pytest.raises(Refused, match="HTTP 422: POST /pause: no such mode") as caught:
        client.call("POST", "/pause", query={"mode": "other"})
    assert len(str(caught.value)) < 600
    with pytest.raises(Gone, match="Timeout"):
        client.call("POST", "/pause", query={"mode": "slow"}, timeout_s=0.05)


def test_generations_come_back_under_their_names(client: Client) -> None:
    for name, token in (("a", 5), ("b", 0), ("c", 1)):
        client.send(name, {"token_ids": [token]})
    answers = {}
    while len(answers) < 3:
        answers |= {answer.name: answer for answer in client.take(5.0)}
    assert answers["a"].body == {"echo": [5]}
    assert isinstance(answers["b"].error, Refused)
    assert (answers["b"].error.status, answers["b"].body) == (400, None)
    assert "no such token" in answers["b"].error.words
    assert isinstance(answers["c"].error, Gone)  # an answer that is none: the request is made once more
    assert client.take(0.0) == []


def test_a_request_that_cannot_even_be_sent_has_an_answer(client: Client) -> None:
    """Whoever waits for it would wait for ever."""
    client.send("odd", {"token_ids": {1, 2}})
    (answer,) = client.take(5.0)
    assert answer.name == "odd"
    assert isinstance(answer.error, Gone)
    assert "TypeError" in str(answer.error)


def test_each_request_has_a_connection_of_its_own(client: Client, answering: Answering) -> None:
    """A kept one may be closed by the server just when it is used again, and an update would then end in a new server."""
    client.call("GET", "/health")
    client.send("a", {"token_ids": [5]})
    client.take(5.0)
    assert answering.kept == [False, False]


def test_a_cancelled_generation_is_hung_up(client: Client, answering: Answering) -> None:
    """The server learns of it: vLLM then stops generating."""
    client.send("long", {"token_ids": [2]})
    client.send("short", {"token_ids": [6]})
    assert [answer.name for answer in client.take(5.0)] == ["short"]
    client.cancel(["long", "unknown"])
    assert answering.hung_up.wait(5.0)
    assert client.take(0.0) == []


def test_no_server_is_gone(tmp_path: Path) -> None:
    client = Client(tmp_path / "nobody")
    with pytest.raises(Gone):
        client.call("GET", "/health")
    client.send("a", {"token_ids": [5]})
    (answer,) = client.take(5.0)
    assert isinstance(answer.error, Gone)
    client.close()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def guarded(source: str, folder: Path, stderr: IO[bytes] | None = None) -> tuple[subprocess.Popen[str], list[int]]:
    """A guard over a Python program that prints process ids in its first line."""
    command = [sys.executable, "-I", str(GUARD), str(folder), sys.executable, "-c", source]
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True
    )
    assert guard.stdout is not None
    return guard, [int(word) for word in guard.stdout.readline().split()]


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
time.sleep(600)
"""


def until_dead(pids: list[int]) -> None:
    end = time.monotonic() + 20.0
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_guard_ends_everything_when_its_owner_is_gone(tmp_path: Path) -> None:
    """The owner's end of the pipe closes, as when it is killed: neither a stubborn server nor its child is left, nor its folder."""
    folder = tmp_path / "server"
    folder.mkdir()
    guard, pids = guarded(STUBBORN, folder)
    assert all(alive(pid) for pid in pids)
    assert guard.stdin is not None
    assert guard.stdout is not None
    guard.stdin.close()
    guard.wait(20.0)
    until_dead(pids)
    assert not folder.exists()
    guard.stdout.close()


LEAVING = """
import mmap, os, subprocess, sys
with open("/dev/shm/NAME", "wb+") as file:
    file.truncate(4096)
    memory = mmap.mmap(file.fileno(), 4096)
child = subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_the_guard_ends_with_its_server(tmp_path: Path) -> None:
    """With what that left behind, also where its last word cannot be written; the folder is its owner's."""
    name = f"psm_test{os.getpid()}"
    (tmp_path / vllm_guard.NOTE).write_text(f"{name}\n../etc\n")
    with Path("/dev/full").open("wb") as full:
        guard, pids = guarded(LEAVING.replace("NAME", name), tmp_path, full)
    guard.wait(20.0)
    until_dead(pids)
    assert not Path("/dev/shm", name).exists()
    assert tmp_path.exists()
    for pipe in (guard.stdin, guard.stdout):
        assert pipe is not None
        pipe.close()


def test_semaphores_are_found_by_what_they_are(tmp_path: Path) -> None:
    """They are made under another name than they get."""
    first, last = Path(f"/dev/shm/sem.first{os.getpid()}"), Path(f"/dev/shm/sem.mp-last{os.getpid()}")
    with first.open("wb+") as file:
        file.truncate(32)
        memory = mmap.mmap(file.fileno(), 32)
    last.hardlink_to(first)
    first.unlink()
    assert vllm_guard.segments([os.getpid()]) == {last.name}
    memory.close()
    vllm_guard.remove_segments({last.name})
    assert not last.exists()


def test_only_segments_that_nobody_maps_are_removed(tmp_path: Path) -> None:
    """What is written down is a name of a segment, never a path."""
    mine, other = Path(f"/dev/shm/psm_mine{os.getpid()}"), Path(f"/dev/shm/elses{os.getpid()}")
    with mine.open("wb+") as file:
        file.truncate(4096)
        memory = mmap.mmap(file.fileno(), 4096)
    other.touch()
    (tmp_path / vllm_guard.NOTE).write_text(f"{mine.name}\n{other.name}\n../../tmp/psm_x\n")
    names = vllm_guard.noted(tmp_path)
    assert names == {mine.name} == vllm_guard.segments([os.getpid()])
    vllm_guard.remove_segments(names)
    assert mine.exists()
    memory.close()
    vllm_guard.remove_segments(names)
    assert not mine.exists()
    assert vllm_guard.noted(tmp_path / "absent") == set()
    other.unlink()


def test_a_python_without_vllm_is_told_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"has no vLLM.*make-vllm-cpu.sh.*--vllm-python"):
        make_engine(EngineSettings("vllm"))
    with pytest.raises(EngineError, match="cannot be run"):
        vllm_server.installed(tmp_path)


def test_secrets_do_not_reach_the_server() -> None:
    owner = {"ECHO2_INVITE": "secret", "PATH": "/bin", "PYTHONPATH": "/elsewhere", "VLLM_API_KEY": "would refuse us"}
    seen = vllm_server.environment({"OMP_NUM_THREADS": "1"}, owner)
    assert "ECHO2_INVITE" not in seen
    assert "VLLM_API_KEY" not in seen
    assert seen["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert seen["PATH"] == "/bin"
    assert seen["PYTHONPATH"] == str(vllm_server.EXTENSION)
    assert seen["VLLM_SERVER_DEV_MODE"] == "1"


@pytest.mark.parametrize(
    ("visible", "name"), [("", "card 0"), ("1", "card 1"), ("1,0", "card 1"), ("GPU-7a", "card GPU-7a"), ("MIG-3", "card 0")]
)
def test_the_first_card_is_the_first_that_may_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str, name: str
) -> None:
    """Not the machine's first, whose memory may be another."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text('#!/bin/sh\n[ "$1" = -i ] && echo "card $2, 81920" || { echo "card 0, 24576"; echo "card 1, 81920"; }\n')
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    card = vllm_server.first_card(visible)
    assert card == vllm_server.Card(name, (81920 if visible and visible != "MIG-3" else 24576) << 20)


def test_no_driver_is_no_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert vllm_server.first_card("") is None
    assert vllm_settings(None, environment={"CUDA_VISIBLE_DEVICES": "2"}).visible == "2"


def test_the_extension_imports_nothing_of_ours() -> None:
    """It runs in vLLM's Python, where this package need not be."""
    text = (vllm_server.EXTENSION / "echo2_vllm_extension.py").read_text()
    imported = [line.split()[1].partition(".")[0] for line in text.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) <= {"__future__", "collections", "dataclasses", "typing", "torch", "safetensors", "vllm"}


LOG = """(EngineCore pid=7) INFO 11-30 20:45:49 [core.py:81] Initializing
(Worker pid=9) ERROR 11-30 20:46:06 [multiproc_executor.py:1063] Traceback (most recent call last):
(Worker pid=9) ERROR 11-30 20:46:06 [multiproc_executor.py:1063]   File "x.py", line 3, in f
(Worker pid=9) ERROR 11-30 20:46:06 [multiproc_executor.py:1063] RuntimeError: head_dim=8 is not supported

guard: the server ended with 1
"""


def test_a_log_is_told_by_its_errors() -> None:
    assert vllm_server.telling(LOG.splitlines()) == "RuntimeError: head_dim=8 is not supported"
    assert vllm_server.telling(["(A pid=1) INFO 1 [x] started"]) == "(A pid=1) INFO 1 [x] started"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: engine_settings("vllm", device="cuda:1"), "CUDA_VISIBLE_DEVICES"),
        (lambda: engine_settings("vllm", throttle=100.0), "--throttle 100"),
        (lambda: vllm_settings(None, gpu_memory=1.5), "--gpu-memory 1.5"),
        (lambda: vllm_settings(None, kv_cache_gib=0.01), "--kv-cache-gib 0.01"),
        (lambda: vllm_settings(None, max_model_len=255), "--max-model-len 255 .* at least 256"),
        (lambda: vllm_settings(Path("/nowhere/python")), "/nowhere/python is no file"),
    ],
)
def test_options_that_make_no_sense(make: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--vllm-python", "/nowhere/python", "/nowhere/python is no file"),
        ("--gpu-memory", "0.05", "--gpu-memory 0.05"),
        ("--kv-cache-gib", "0.01", "--kv-cache-gib 0.01"),
        ("--max-model-len", "100", "--max-model-len 100"),
    ],
)
@pytest.mark.parametrize("command", [["join", "https://127.0.0.1:1"], ["bench", "/nowhere"]])
def test_each_command_that_runs_an_engine_takes_the_options_of_vllm(
    command: list[str], option: str, value: str, words: str
) -> None:
    """They are spelt once, and what is wrong with them is one line."""
    result = CliRunner().invoke(app, [*command, "--engine", "vllm", "--tensor-parallel", "2", "--eager", option, value])
    assert result.exit_code == 1
    assert words in result.output
    assert result.output.count("\n") == 1


def test_the_default_python_is_this_one() -> None:
    assert vllm_settings(None).python == Path(sys.executable).absolute()
    assert VllmSettings().tensor_parallel == 1


def test_directories_are_read_with_care(tmp_path: Path) -> None:
    for text, words in (
        ("[]", "cannot be read"),
        ('{"auto_map": {"A": "b"}}', "auto_map"),
        ('{"quantization_config": {"a": 1}}', "quant"),
    ):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(EngineError, match=words):
            read_config(tmp_path)
    os.truncate(tmp_path / "config.json", (4 << 20) + 1)
    with pytest.raises(EngineError, match="larger"):
        read_config(tmp_path)
    with pytest.raises(EngineError, match="no safetensors"):
        weight_files(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(EngineError, match=r"model.safetensors is not"):
        read_table(tmp_path)


def test_tables_must_agree() -> None:
    held = {"a": ("BF16", (2, 3)), "b": ("BF16", (4,))}
    check_same_tensors(held, dict(held))
    for given, words in (
        ({**held, "c": ("BF16", (1,))}, "another architecture"),
        ({"a": ("BF16", (2, 3))}, r"lack \['b'\]"),
        ({**held, "b": ("BF16", (5,))}, r"b has shape \(5,\)"),
    ):
        with pytest.raises(EngineError, match=words):
            check_same_tensors(held, given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_make_gpu_says_in_a_line_that_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.gpu.__main__ import main

    assert main() == 0
    assert re.fullmatch(r"gpu: nothing to do: torch \S+ finds no GPU\n", capsys.readouterr().out)
