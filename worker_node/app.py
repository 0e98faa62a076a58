"""Puts a worker together from its settings and runs it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from math import inf
from pathlib import Path
from random import Random

from coordinator.wire.signing import public_hex
from p2p.errors import CounterUnreadable
from worker_node.adapters import identity, price_file
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.downlink import Downlink
from worker_node.adapters.engine import EngineHost, Output
from worker_node.adapters.engines import make_engine
from worker_node.adapters.peers import Myself, Peers
from worker_node.adapters.status_file import Lock
from worker_node.adapters.swarm import Swarm, piece_store
from worker_node.books import Books
from worker_node.config import WorkerSettings, remember_coordinator
from worker_node.domain.instructions import Stop
from worker_node.domain.session import Session, SessionSettings
from worker_node.errors import ConfigError
from worker_node.runtime import Parts, Runtime

CRASH_POINTS = (
    "worker.assembling",
    "worker.assembled",
    "worker.fetched",
    "worker.swapped",
    "worker.confirmed",
    "worker.generated",
    "worker.submitted.before",
    "worker.submitted.after",
)


class CrashAt:
    """For crash tests: kills this process when a named commit point is reached for the n-th time."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._left = count

    def __call__(self, name: str) -> None:
        if name == self._name:
            self._left -= 1
            if self._left == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class SteadyClock:
    """Unix seconds that only go forward, at the rate of the monotonic clock: a step of the machine's clock moves no deadline.

    What it is off (a suspended machine, say) the coordinator's times correct, as they correct a wrong clock.
    """

    def __init__(self) -> None:
        self._start = time.time() - time.monotonic()

    def __call__(self) -> float:
        return self._start + time.monotonic()


async def run_worker(
    settings: WorkerSettings,
    *,
    announce: Callable[[Path], None] = lambda _: None,
    tell: Callable[[str], None] = lambda _: None,
) -> Stop:
    """Join and serve until the end; `announce` is told where a new identity lies, `tell` what its owner should know, a line each.

    Raises WorkerError when the worker cannot start. Nothing in the state directory is touched before its lock is held.
    """
    identity.make_state_dir(settings.state_dir)
    lock = Lock(settings.state_dir)
    lock.take()
    try:
        _, is_new = identity.load_or_create(settings.state_dir)
        if is_new:
            announce(identity.identity_path(settings.state_dir))
        remember_coordinator(settings.state_dir, settings.url, settings.coordinator_key)
        price_file.forget(settings.state_dir)
        runtime = await build(settings, tell=tell)
        _drain_on_signals(runtime)
        return await runtime.run()
    finally:
        lock.release()


async def build(settings: WorkerSettings, *, tell: Callable[[str], None] = lambda _: None) -> Runtime:
    """A worker that is ready to run. Raises IdentityError."""
    key, _ = identity.load_or_create(settings.state_dir)
    client = CoordinatorClient(
        settings.url,
        key=key,
        coordinator_key=settings.coordinator_key,
        insecure_http=settings.insecure_http,
        clock=SteadyClock(),
    )
    weights = settings.state_dir / "weights"
    myself = Myself(client.worker, key, settings.coordinator_key, client.server_now)
    peers = _peers(myself, settings, weights)
    downlink = Downlink(settings.link.down_bytes_per_s, peers.limit_down)
    reach = _reach(settings)
    swarm = Swarm(weights, client, settings.coordinator_key, peers, downlink, reach=reach)
    session = Session(
        SessionSettings(
            slots=settings.engine.slots,
            drain_s=settings.drain_s,
            give_up_s=inf if settings.give_up_s is None else settings.give_up_s,
        ),
        rng=Random(os.urandom(16)),  # noqa: S311 (jitter, not secrets)
        stored=await asyncio.to_thread(swarm.open),
    )
    parts = Parts(session, key, client, swarm, peers, Books(settings, public_hex(key)), partial(_make_host, settings))
    return Runtime(settings, parts, reach=reach, tell=tell)


def _peers(myself: Myself, settings: WorkerSettings, weights: Path) -> Peers:
    """Raises ConfigError when the owner's monthly cap cannot be kept."""
    try:
        return Peers(myself, piece_store(weights), settings.peer, settings.link, counter=settings.state_dir / "uploaded.json")
    except CounterUnreadable as error:
        raise ConfigError(f"--up-gb-per-month: {error}") from error


def _make_host(
    settings: WorkerSettings, on_output: Callable[[list[Output]], None], on_failure: Callable[[str], None]
) -> EngineHost:
    return EngineHost(
        lambda: make_engine(settings.engine),
        on_output=on_output,
        on_failure=on_failure,
        least_step_s=settings.engine.least_step_s,
    )


def _reach(settings: WorkerSettings) -> Callable[[str], None]:
    return CrashAt(*settings.crash_at) if settings.crash_at is not None else lambda _: None


def _drain_on_signals(runtime: Runtime) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, runtime.request_drain, f"its owner stops it ({number.name})")
