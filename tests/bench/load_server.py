"""The coordinator of `load.py`, in a process of its own: everything real but the learner, which only takes its time.

Real: store, blobs, TLS, signatures, leases, structural checks, grading in jailed processes, sealing with batch files,
commits, publications. It speaks lines of JSON: on stdout where it serves, then figures; on stdin `mark` and `stop`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import tempfile
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.adapters.clock import SystemClock
from coordinator.api.worker import add_worker_routes
from coordinator.domain.model import Invite, Job, JobState, Publication, PublicationState, Rollout
from coordinator.domain.seeds import canary_ids
from coordinator.environments.plane import DataPlaneSpec, JailedDataPlane
from coordinator.service import accounting, grading, prompting, sealing, sweeping
from coordinator.service.deps import Deps, LiveJob, ServiceSettings
from coordinator.service.invites import invite_code
from coordinator.service.ports import Tx
from coordinator.service.tokens import secret_hash
from coordinator.store.blobs import FileBlobs
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store
from coordinator.wire.job import JobConfig
from coordinator.wire.signing import public_hex
from p2p.adapters.tls import self_signed, server_context
from p2p.domain.manifest import Edge, Manifest, Piece, Tensor
from p2p.domain.signing import sign_manifest
from tests.factories_environments import write_model

JOB = "job-load"
SECRET = "l" * 43
GROUP, GROUPS_PER_STEP, BOUND, CAP = 16, 64, 32, 128
TRAIN_S = 1.5  # a step of the learner that is not there
PUBLISH_EVERY = 8  # steps
LAG_EVERY_S = 0.05


@dataclass
class Lag:
    """How late the event loop runs its timers, milliseconds."""

    late_ms: list[float] = field(default_factory=list)

    async def watch(self) -> None:
        while True:
            before = time.perf_counter()
            await asyncio.sleep(LAG_EVERY_S)
            self.late_ms.append((time.perf_counter() - before - LAG_EVERY_S) * 1e3)

    def take(self) -> dict[str, float]:
        late, self.late_ms = sorted(self.late_ms), []
        return {"p50": _share(late, 0.5), "p99": _share(late, 0.99), "max": late[-1] if late else 0.0}


def _share(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def job_row(now: float, vocab_size: int, stops: tuple[int, ...]) -> Job:
    config = JobConfig.model_validate(
        {
            "name": "load",
            "model": "load",
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": GROUP, "groups_per_step": GROUPS_PER_STEP, "max_replacements": 0, "no_signal_limit": 10**6},
            "staleness": {"max": BOUND},
            "sampling": {"max_new_tokens": CAP},
            "workers": {"engines": ["scripted"]},
            "budget": {"steps": 10**6},
        }
    )
    return Job(JOB, "load", "bench", config, JobState.RUNNING, "", now, now, "/", vocab_size=vocab_size, stop_token_ids=stops)


def publication(deps: Deps, version: int) -> Publication:
    digest = f"{version:064x}"
    tensor = Tensor("w", "U8", (1,), 1)
    ids = canary_ids(0, 100)
    text = Manifest(JOB, version, digest, (tensor,), {}, (), ids, (Edge("raw", None, None, (Piece("0" * 64, 1),)),)).to_json()
    state = PublicationState.PUBLISHED
    signature = sign_manifest(deps.key, text)
    return Publication(JOB, version, digest, state, text, signature, "/", (-1.0,) * (len(ids) - 1), deps.clock.now())


async def take_steps(deps: Deps) -> None:
    """The learner, as the coordinator sees it: a batch goes in, TRAIN_S later the step is committed."""
    with deps.wake.watch(JOB) as watch:
        known: sealing.Known = {}
        while True:
            job = await deps.store.read(lambda reader: reader.get(Job, JOB))
            assert job is not None
            batch = (await sealing.seal_next(deps, job, known, waited_s=0.0)).batch
            if batch is None:
                await watch.wait(1.0)
                continue
            await asyncio.sleep(TRAIN_S)
            await sealing.commit_step(deps, JOB, batch.step, train_s=TRAIN_S, metrics={})
            if (batch.step + 1) % PUBLISH_EVERY == 0:
                await deps.store.write(partial(_publish, deps=deps, version=batch.step + 1))
                deps.wake.notify(JOB)


async def _publish(tx: Tx, *, deps: Deps, version: int) -> None:
    await tx.put(publication(deps, version))


async def serve(url: str, directory: Path) -> None:
    async with AsyncExitStack() as stack:
        await asyncio.to_thread(upgrade, url)
        store = await open_store(url)
        stack.push_async_callback(store.close)
        clock = SystemClock()
        settings = ServiceSettings(data_dir=directory, allow_scripted=True, minimum_free_bytes=1 << 20)
        deps = Deps(store, FileBlobs(directory / "blobs"), clock, settings, Ed25519PrivateKey.generate(), clock.now())
        model = write_model(directory / "model", chat_template=None)
        config = job_row(0, 1, ()).config
        plane = JailedDataPlane(DataPlaneSpec(config.environment, 0, model), processes=1)
        info = await plane.start()
        stack.push_async_callback(plane.close)
        job = job_row(clock.now(), info.vocab_size, info.stop_token_ids)
        invite = Invite("i-load", secret_hash(SECRET), "bench", 10**6, clock.now(), clock.now() + 1e6)
        await store.write(lambda tx: tx.put(job))
        await store.write(lambda tx: tx.put(invite))
        await store.write(lambda tx: tx.put(publication(deps, 0)))
        live = LiveJob(plane)
        deps.live[JOB] = live
        await prompting.fill_prompts(deps, job, live, info.train_prompts)
        base, certificate = await _listen(deps, directory, stack)
        lag = Lag()
        loops = (
            prompting.keep_prompts(deps, job, live, info.train_prompts),
            grading.keep_grading(deps, job, plane),
            sweeping.keep_sweeping(deps),
            accounting.keep_accounts(deps),
            take_steps(deps),
            lag.watch(),
        )
        tasks = [asyncio.create_task(loop) for loop in loops]
        for task in tasks:
            task.add_done_callback(_ended)
        ready = {
            "base": base,
            "certificate": certificate,
            "key": public_hex(deps.key),
            "invite": invite_code(public_hex(deps.key), SECRET),
            "vocab_size": info.vocab_size,
            "stops": info.stop_token_ids,
        }
        print(json.dumps(ready), flush=True)
        await _obey(deps, lag)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        print(f"a loop of the load server failed: {task.exception()!r}", file=sys.stderr, flush=True)


async def _listen(deps: Deps, directory: Path, stack: AsyncExitStack) -> tuple[str, str]:
    certificate, private, digest = self_signed(directory / "tls", ["127.0.0.1"])
    app = web.Application(client_max_size=0)
    add_worker_routes(app, deps, certificate_sha256=digest)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_context(certificate, private), backlog=2048).start()
    return f"https://127.0.0.1:{runner.addresses[0][1]}", digest


async def _obey(deps: Deps, lag: Lag) -> None:
    """`mark` starts a window, `stop` ends it with its figures."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    started = used = graders = 0.0
    while (line := (await reader.readline()).strip()) != b"":
        now, cpu, children = deps.clock.now(), _cpu(), _children_cpu()
        figures = lag.take()
        if line == b"mark":
            started, used, graders = now, cpu, children
            continue
        rows: dict[str, Any] = await deps.store.read(partial(_counts, started=started, ended=now))
        wall = now - started
        rows |= {
            "seconds": wall,
            "server_cpu": (cpu - used) / wall,
            "grader_cpu": (children - graders) / wall,
            "server_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "loop_lag_ms": figures,
        }
        print(json.dumps(rows), flush=True)
        if line == b"stop":
            return


async def _counts(reader: Any, *, started: float, ended: float) -> dict[str, Any]:
    job = await reader.get(Job, JOB)
    return {
        "accepted": await reader.count(Rollout, job_id=JOB, accepted_at__ge=started, accepted_at__lt=ended),
        "graded": await reader.count(Rollout, job_id=JOB, graded_at__ge=started, graded_at__lt=ended),
        "steps": job.committed_steps,
    }


def _cpu() -> float:
    use = resource.getrusage(resource.RUSAGE_SELF)
    return use.ru_utime + use.ru_stime


def _children_cpu() -> float:
    total = 0.0
    for child in psutil.Process().children(recursive=True):
        try:
            times = child.cpu_times()
        except psutil.Error:
            continue
        if "postgres" not in child.name():
            total += times.user + times.system
    return total


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    arguments = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo2-load-")))
        url = arguments.url.replace("DIRECTORY", str(directory))
        asyncio.run(serve(url, directory))


if __name__ == "__main__":
    main()
