"""Tokens a second through a whole worker against its bare engine, on the same prompts: `engine_overhead [--engines torch vllm]`.

The worker is the real one (client, signatures, swarm, session, engine) against a small coordinator in this process. Bare torch is
the engine alone in this process; bare vLLM is `LLM.generate` in vLLM's own Python. Both sides take turns, in pairs, in one run,
so that other load on the machine meets both. Needed: 0.95 of the bare engine's rate, by the median of the pairs. CPU seconds a
thousand tokens are told too: they do not depend on who else uses the machine. As in service the worker gets no more than it has free
slots; `occupancy` is the share of its slots in which something was being made.
"""

from __future__ import annotations

import asyncio
import json as json_text
import logging
import os
import resource
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import structlog
from aiohttp import web
from tokenizers import Tokenizer

from coordinator.wire import messages as wire
from tests.integration.worker_node.conftest import SmallCoordinator
from tests.models.smollm2 import directory
from tests.models.vllm_python import NO_VLLM, vllm_python
from worker_node.adapters.engine import EngineCore, Finished, Weights
from worker_node.adapters.engines import make_engine
from worker_node.app import build
from worker_node.config import EngineSettings, VllmSettings, WorkerSettings
from worker_node.domain.generation import GenerationRequest
from worker_node.errors import EngineError

NEEDED = 0.95
GSM8K = Path(__file__).resolve().parents[1] / "data" / "gsm8k" / "test.jsonl"
GROUP = 8
KV_GIB = 1.0
HEARTBEAT_S = 5.0
TICKS = os.sysconf("SC_CLK_TCK")
BARE_VLLM = Path(__file__).with_name("engine_overhead_vllm.py")


@dataclass(frozen=True)
class Work:
    """What both sides make: each prompt in a group of 8 samples, `tokens` new tokens each, without an early end."""

    prompts: list[tuple[int, ...]]
    tokens: int
    slots: int

    @property
    def completions(self) -> int:
        return len(self.prompts) * GROUP


@dataclass(frozen=True)
class Measured:
    """One side, once."""

    seconds: float
    cpu_s: float
    tokens: int
    occupancy: float = 1.0  # share of the slots' time in which a completion was being made

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def prompts(model: Path, count: int) -> list[tuple[int, ...]]:
    """GSM8K questions as token ids."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    lines = GSM8K.read_text().splitlines()[:count]
    return [tuple(tokenizer.encode(json_text.loads(line)["question"]).ids) for line in lines]


def family_cpu_s(root: int) -> float:
    """CPU seconds of a process and all its living descendants."""
    parents: dict[int, tuple[int, float]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = (int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS)

    def belongs(pid: int) -> bool:
        while pid in parents and pid != root:
            pid = parents[pid][0]
        return pid == root

    return sum(seconds for pid, (_, seconds) in parents.items() if belongs(pid))


class BareTorch:
    """The engine of this package, alone."""

    def __init__(self, model: Path, work: Work) -> None:
        self._core: EngineCore = make_engine(EngineSettings("torch", slots=work.slots, device="cpu"))
        self._core.load(Weights(model, 0, "0" * 64))
        self._work = work

    def run(self) -> Measured:
        sampling = wire.SamplingParameters(max_new_tokens=self._work.tokens, temperature=1.0, stop_token_ids=())
        keys = [("bare", slot) for slot in range(self._work.completions)]
        started, cpu = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
        self._core.admit([GenerationRequest(key, self._work.prompts[key[1] // GROUP], 1000 + key[1], sampling) for key in keys])
        made = 0
        while self._core.is_busy:
            made += sum(out.completion.length for out in self._core.step() if isinstance(out, Finished))
        now = resource.getrusage(resource.RUSAGE_SELF)
        used = now.ru_utime + now.ru_stime - cpu.ru_utime - cpu.ru_stime
        return Measured(time.monotonic() - started, used, made)

    def close(self) -> None:
        self._core.close()


class BareVllm:
    """`LLM.generate` in a process of vLLM's Python, which answers a line with a line."""

    def __init__(self, model: Path, work: Work, python: Path) -> None:
        request = {"model": str(model), "prompts": work.prompts, "group": GROUP, "tokens": work.tokens, "slots": work.slots}
        environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": f"{KV_GIB:.0f}", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["VLLM_NO_USAGE_STATS"] = "1"
        with tempfile.NamedTemporaryFile("w", suffix=".py", delete=False) as script:  # a file: vLLM's processes import it again
            script.write(BARE_VLLM.read_text())
        self._script = Path(script.name)
        self._process = subprocess.Popen(
            [python, str(self._script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._say(json_text.dumps(request))

    def _say(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        for answer in self._process.stdout:
            if answer.startswith("{"):
                return dict(json_text.loads(answer))
        raise EngineError("the bare vLLM ended")

    def run(self) -> Measured:
        before = family_cpu_s(self._process.pid)
        answer = self._say("go")
        return Measured(answer["seconds"], family_cpu_s(self._process.pid) - before, answer["tokens"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._script.unlink()


class Coordinator(SmallCoordinator):
    """Heartbeats as seldom as in service, and no more work than fits; in tests they come every tenth of a second, and all at once."""

    async def on_lease(self, request: web.Request, body: bytes) -> wire.LeaseReply:
        whole = await super().on_lease(request, body)
        free, given = wire.LeaseRequest.model_validate_json(body).free_slots, []
        for lease in whole.leases:
            part, rest = cut(lease, free)
            given += part
            self.work += rest
            free -= sum(len(one.slots) for one in part)
        return whole.model_copy(update={"leases": tuple(given)})

    async def on_join(self, request: web.Request, body: bytes) -> wire.Welcome:
        return (await super().on_join(request, body)).model_copy(update={"heartbeat_s": HEARTBEAT_S})

    async def on_heartbeat(self, request: web.Request, body: bytes) -> wire.HeartbeatReply:
        return (await super().on_heartbeat(request, body)).model_copy(update={"heartbeat_s": HEARTBEAT_S})


def cut(lease: wire.Lease, free: int) -> tuple[list[wire.Lease], list[wire.Lease]]:
    """The part of a lease that fits into `free` slots, and the rest as a lease of its own; either may be none."""
    if free >= len(lease.slots):
        return [lease], []
    rest = {"lease_id": f"{lease.lease_id}+", "slots": lease.slots[free:], "seeds": lease.seeds[free:]}
    part = {"slots": lease.slots[:free], "seeds": lease.seeds[:free]}
    return [lease.model_copy(update=part)] if free else [], [lease.model_copy(update=rest)]


class WholeWorker:
    """A worker that joined, holds version 0 and waits for leases."""

    def __init__(self, work: Work, engine: EngineSettings, folder: Path) -> None:
        self._work = work
        self._engine = engine
        self._folder = folder
        self._coordinator = Coordinator(folder / "coordinator")
        self._lease = 0

    async def start(self, model: Path) -> None:
        self._coordinator.expected_canary = lambda manifest: self._coordinator_canary
        self._coordinator_canary: tuple[float, ...] = ()
        await self._coordinator.start(tls=True)
        self._coordinator.publish(model, 0, canary_ids=(1,))  # nothing to judge: this is no test of weights
        settings = WorkerSettings(
            url=self._coordinator.url,
            coordinator_key=self._coordinator.public,
            invite_code=f"echo2-invite-1.{self._coordinator.public}.secretsecretsecret",
            name="bench",
            price_uusd_per_hour=0,
            state_dir=self._folder / "worker",
            engine=self._engine,
            libp2p=False,
        )
        self._runtime = await build(settings)
        self._task = asyncio.create_task(self._runtime.run())
        await self._until(lambda: bool(self._coordinator.confirms), 900.0)

    async def run(self) -> Measured:
        self._coordinator.accepted.clear()
        before, started = family_cpu_s(os.getpid()), time.monotonic()
        sampling = wire.SamplingParameters(max_new_tokens=self._work.tokens, temperature=1.0, stop_token_ids=())
        for number, prompt in enumerate(self._work.prompts):
            self._lease += 1
            lease = self._coordinator.lease_of(
                f"L{self._lease}",
                tuple(range(GROUP)),
                prompt_ids=prompt,
                seeds=tuple(1000 + number * GROUP + slot for slot in range(GROUP)),
                sampling=sampling,
                deadline=self._coordinator.clock() + 7200.0,
            )
            self._coordinator.work.append(lease)
        self._coordinator.more_work.set()
        await self._until(lambda: len(self._coordinator.accepted) == self._work.completions, 7200.0)
        seconds = time.monotonic() - started
        accepted = self._coordinator.accepted.values()
        tokens = sum(len(arrays["token_ids"]) for _, arrays, _ in accepted)
        busy_s = sum(head.generate_s for head, _, _ in accepted)
        return Measured(seconds, family_cpu_s(os.getpid()) - before, tokens, busy_s / (self._work.slots * seconds))

    async def _until(self, condition: Callable[[], bool], limit_s: float) -> None:
        async with asyncio.timeout(limit_s):
            while not condition():
                if self._task.done():
                    raise EngineError(f"the worker ended: {self._task.result().reason}")
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        self._runtime.request_drain("done")
        await self._task
        await self._coordinator.stop()


async def pairs(
    bare: BareTorch | BareVllm, worker: WholeWorker, count: int, *, apart: int | None
) -> list[tuple[Measured, Measured]]:
    """Warm both up, then measure them in turns, the first one changing. `apart`: a child of this process that is not the worker's."""
    await asyncio.to_thread(bare.run)
    await worker.run()
    found = []
    for number in range(count):
        one, two = None, None
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            if side == 0:
                one = await asyncio.to_thread(bare.run)
            else:
                idle = family_cpu_s(apart) if apart is not None else 0.0
                whole = await worker.run()
                idle = family_cpu_s(apart) - idle if apart is not None else 0.0
                two = replace(whole, cpu_s=whole.cpu_s - idle)
        assert one is not None
        assert two is not None
        found.append((one, two))
    return found


async def measure(kind: str, work: Work, count: int, folder: Path) -> dict[str, Any]:
    """One engine's figures."""
    model = directory()
    python = vllm_python() if kind == "vllm" else None
    vllm = (
        VllmSettings(python=python, kv_cache_gib=KV_GIB, max_model_len=1024, log=folder / "vllm.log") if python else VllmSettings()
    )
    settings = EngineSettings(
        "vllm" if kind == "vllm" else "torch", slots=work.slots, device="auto" if python else "cpu", vllm=vllm
    )
    bare: BareTorch | BareVllm = BareVllm(model, work, python) if python else BareTorch(model, work)
    worker = WholeWorker(work, settings, folder)
    await worker.start(model)
    try:
        found = await pairs(bare, worker, count, apart=bare._process.pid if isinstance(bare, BareVllm) else None)
    finally:
        await worker.close()
        bare.close()
    ratios = [two.rate / one.rate for one, two in found]
    cpu = [(two.cpu_s / two.tokens) / (one.cpu_s / one.tokens) for one, two in found]
    return {
        "completions": work.completions,
        "tokens": work.tokens,
        "slots": work.slots,
        "bare_tokens_per_s": [round(one.rate, 1) for one, _ in found],
        "worker_tokens_per_s": [round(two.rate, 1) for _, two in found],
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.median(ratios), 3),
        "bare_cpu_s_per_1000": round(statistics.median(1000 * one.cpu_s / one.tokens for one, _ in found), 2),
        "worker_cpu_s_per_1000": round(statistics.median(1000 * two.cpu_s / two.tokens for _, two in found), 2),
        "cpu_ratio": round(statistics.median(cpu), 3),
        "occupancy": round(statistics.median(two.occupancy for _, two in found), 3),
    }


def main(
    json: bool = False,
    engines: tuple[str, ...] = ("torch", "vllm"),
    runs: int = 3,
    questions: int = 0,
    tokens: int = 0,
    slots: int = 16,
) -> dict[str, Any]:
    """`questions` and `tokens` 0: 4 x 8 completions of 32 tokens for torch, 8 x 8 of 64 for vLLM."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    figures: dict[str, Any] = {}
    for kind in engines:
        if kind == "vllm" and vllm_python() is None:
            print(f"vllm: {NO_VLLM}", flush=True)
            continue
        count, length = (8, 64) if kind == "vllm" else (4, 32)
        work = Work(prompts(directory(), questions or count), tokens or length, slots)
        with tempfile.TemporaryDirectory(prefix="echo2-overhead-") as folder:
            figures[kind] = asyncio.run(measure(kind, work, runs, Path(folder)))
        if not json:
            print(kind, json_text.dumps(figures[kind]), flush=True)
            print(f"{kind}: {figures[kind]['ratio']:.3f} of the bare engine, {NEEDED} needed", flush=True)
    if json:
        print(json_text.dumps(figures))
    return figures
