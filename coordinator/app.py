"""Composition root of the coordinator: opens the store, wires adapters to the service, serves, and ends in order."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import structlog
from aiohttp import web
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.x509 import load_pem_x509_certificate

from coordinator.adapters.clock import SystemClock
from coordinator.adapters.control_net import control_net, keep_control
from coordinator.adapters.crash import crash_at
from coordinator.adapters.identity import identity_key
from coordinator.adapters.learner_process import LearnerProcesses
from coordinator.adapters.planes import JailedPlanes
from coordinator.adapters.provider_file import provider_of, read_providers, renting_settings
from coordinator.adapters.publisher import ProcessPublisher
from coordinator.adapters.scratch import remove_scratch
from coordinator.adapters.seeder_process import SeederProcess, SeederSettings
from coordinator.api.listening import BACKLOG, connection_limits, listen
from coordinator.api.rest import RUNNER_OPTIONS, add_rest_routes
from coordinator.api.worker import add_worker_routes
from coordinator.config import Settings
from coordinator.errors import CannotServe
from coordinator.jobs_loop import JobsLoop
from coordinator.service.accounting import keep_accounts
from coordinator.service.control_desk import control_desk
from coordinator.service.deps import Deps, ServiceSettings
from coordinator.service.driving import Tools
from coordinator.service.forthcoming import hear
from coordinator.service.loop_lag import keep_looking
from coordinator.service.market import keep_market
from coordinator.service.renting import Renter
from coordinator.service.renting_ports import RentingSettings
from coordinator.service.renting_wishes import keep_wishing
from coordinator.service.seeding import keep_seeding
from coordinator.service.speaking import Voice, keep_members, keep_speaking
from coordinator.service.sweeping import keep_sweeping, recover
from coordinator.service.tidying import keep_tidy
from coordinator.service.tokens import first_admin
from coordinator.store.blobs import FileBlobs
from coordinator.store.errors import StoreError
from coordinator.store.migrate import upgrade
from coordinator.store.sql import open_store
from coordinator.wire.signing import public_hex
from p2p.adapters.control.desk import Desk
from p2p.adapters.control.net import ControlNet
from p2p.adapters.durable import write_durably
from p2p.adapters.tls import self_signed, server_context

log = structlog.get_logger()
END_S = 20.0
LEAST_PORT, MOST_PORT = 1024, 65535  # workers dial no port below, and there is none above


@dataclass(frozen=True, slots=True)
class Served:
    """What a running coordinator tells: also written to `data_dir/serve.json` for the commands on this host."""

    url: str
    pid: int
    public_key: str
    certificate_sha256: str | None
    admin_token_file: str


def service_settings(settings: Settings) -> ServiceSettings:
    """The service's part of the settings."""
    return ServiceSettings(
        data_dir=settings.home,
        roots=tuple(root.expanduser().resolve() for root in settings.roots),
        heartbeat_s=settings.heartbeat_s,
        lost_after_s=3.5 * settings.heartbeat_s,
        restart_grace_s=settings.restart_grace_s,
        peer_networks=settings.peer_networks,
        minimum_free_bytes=settings.minimum_free_bytes,
        max_running_jobs=settings.max_running_jobs,
        allow_scripted=settings.allow_scripted,
    )


@asynccontextmanager
async def coordinator(settings: Settings) -> AsyncIterator[Served]:
    """A serving coordinator; leaving the context ends it in order. Raises CannotServe."""
    home = settings.home
    _check_address(settings)
    _make_home(home)
    async with contextlib.AsyncExitStack() as stack:
        deps = await _deps(settings, stack)
        token_file = home / "admin.token"
        await first_admin(deps.store, token_file, now=deps.clock.now())
        await recover(deps)
        certificate, tls = await asyncio.to_thread(_tls, settings)
        seeder = SeederProcess(_seeder_settings(settings, deps))
        net = _control_net(settings, deps)
        answers = control_desk(deps, seeder, net)
        url = await _serve(settings, deps, _Front(certificate, tls, answers), stack)
        await _start_loops(settings, deps, _Swarm(seeder, net, Voice(deps, answers.board, net)), stack)
        served = Served(url, os.getpid(), public_hex(deps.key), certificate, str(token_file))
        await asyncio.to_thread(write_durably, home / "serve.json", json.dumps(vars_of(served)).encode())
        yield served


def vars_of(served: Served) -> dict[str, object]:
    """The JSON form."""
    return {name: getattr(served, name) for name in Served.__dataclass_fields__}


def _check_address(settings: Settings) -> None:
    loopback = settings.host in ("127.0.0.1", "::1", "localhost")
    if settings.tls == "off" and not loopback and not settings.behind_proxy:
        raise CannotServe(
            f"host is {settings.host!r} and tls is off: rollouts and tokens would travel in the clear. "
            "Use --tls self-signed, --tls files, or --behind-proxy when a proxy in front ends TLS"
        )
    if settings.tls == "files" and (settings.tls_certificate is None or settings.tls_key is None):
        raise CannotServe("tls is 'files': name the PEM files with --tls-certificate and --tls-key")


def _make_home(home: Path) -> None:
    try:
        home.mkdir(parents=True, exist_ok=True)
        home.chmod(0o700)
    except OSError as error:
        raise CannotServe(f"data_dir {home} cannot be used: {error}; choose another with --data-dir") from error


async def _deps(settings: Settings, stack: contextlib.AsyncExitStack) -> Deps:
    try:
        await asyncio.to_thread(upgrade, settings.store_url)
        store = await open_store(settings.store_url)
    except StoreError as error:
        raise CannotServe(str(error)) from error
    stack.push_async_callback(store.close)
    clock = SystemClock()
    return Deps(
        store=store,
        blobs=FileBlobs(settings.home / "blobs"),
        clock=clock,
        settings=service_settings(settings),
        key=await asyncio.to_thread(identity_key, settings.home / "identity.pem"),
        started_at=clock.now(),
        reach=crash_at(settings.crash_at),
    )


def _tls(settings: Settings) -> tuple[str | None, ssl.SSLContext | None]:
    if settings.tls == "off":
        return None, None
    if settings.tls == "self-signed":
        certificate, key, digest = self_signed(settings.home / "tls", [settings.host, "localhost", "127.0.0.1"])
        return digest, server_context(certificate, key)
    assert settings.tls_certificate is not None
    assert settings.tls_key is not None
    try:
        context = server_context(settings.tls_certificate, settings.tls_key)
        return _fingerprint(settings.tls_certificate), context
    except (OSError, ssl.SSLError, ValueError) as error:
        raise CannotServe(f"the TLS files {settings.tls_certificate} and {settings.tls_key} cannot be used: {error}") from error


def _fingerprint(path: Path) -> str:
    return load_pem_x509_certificate(path.read_bytes()).fingerprint(SHA256()).hex()


@dataclass(frozen=True, slots=True)
class _Front:
    """What the listener shows: its certificate, and who answers on the control plane."""

    certificate: str | None
    tls: ssl.SSLContext | None
    answers: Desk


@dataclass(frozen=True, slots=True)
class _Swarm:
    """The coordinator's part in the swarm: its seeder, its node of the control network, and what it says there."""

    seeder: SeederProcess
    net: ControlNet | None
    voice: Voice


def _control_net(settings: Settings, deps: Deps) -> ControlNet | None:
    if not settings.libp2p or settings.told_host is None:
        return None
    beside = 0 if settings.port == 0 else max(settings.port + 2, LEAST_PORT)
    host = _literal(settings.host)
    port = beside if settings.control_port is None else settings.control_port
    return control_net(deps.key, (host, port), networks=settings.peer_networks)


def _literal(host: str) -> str:
    """The address that a name stands for: peers are told literals only. One that is not found is no address to listen on either."""
    with contextlib.suppress(OSError):
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    return host


def _seeder_settings(settings: Settings, deps: Deps) -> SeederSettings:
    beside = 0 if settings.port in (0, MOST_PORT) else settings.port + 1
    beside += LEAST_PORT if 0 < beside < LEAST_PORT else 0
    return SeederSettings(
        store=settings.home / "pieces",
        key_file=settings.home / "seeder.key",
        coordinator_public_key=public_hex(deps.key),
        host=_literal(settings.host),
        told_host=None if settings.told_host is None else _literal(settings.told_host),
        port=beside if settings.seeder_port is None else settings.seeder_port,
        up=settings.seeder_up_mbit * 125_000 or None,
    )


async def _serve(settings: Settings, deps: Deps, front: _Front, stack: contextlib.AsyncExitStack) -> str:
    tls = front.tls
    app = web.Application(client_max_size=0)
    add_rest_routes(app, deps)
    add_worker_routes(app, deps, certificate_sha256=front.certificate, trusts_proxy=settings.behind_proxy, answers=front.answers)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=5.0, **RUNNER_OPTIONS)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    try:
        for listener in listen(settings.host, settings.port, connection_limits(behind_proxy=settings.behind_proxy)):
            await web.SockSite(runner, listener, ssl_context=tls, backlog=BACKLOG).start()
    except OSError as error:
        raise CannotServe(
            f"{settings.host}:{settings.port} cannot be listened on: {error.strerror}; choose another --port"
        ) from error
    port = runner.addresses[0][1]
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if tls else 'http'}://{host}:{port}"


async def _start_loops(settings: Settings, deps: Deps, swarm: _Swarm, stack: contextlib.AsyncExitStack) -> None:
    seeder, net = swarm.seeder, swarm.net

    def on_batch(text: str, signature: str) -> None:
        """The seeder first: its word reaches the swarm in a round trip."""
        seeder.batch(text, signature)
        hear(deps, text, signature)

    publisher = ProcessPublisher(settings.home / "pieces", deps.key, deps.clock, on_batch=on_batch)
    stack.push_async_callback(publisher.close)
    options: tuple[str, ...] = ("--crash-at", settings.learner_crash_at) if settings.learner_crash_at else ()
    if settings.learner_least_step_s:
        options += ("--least-step-s", str(settings.learner_least_step_s))
    tools = Tools(
        learners=LearnerProcesses(settings.home, options),
        publisher=publisher,
        planes=JailedPlanes(deps.settings, processes=settings.grader_processes),
    )
    loops: list[tuple[str, Callable[[], Awaitable[None]]]] = [
        ("jobs", JobsLoop(deps, tools).run),
        ("sweep", lambda: keep_sweeping(deps)),
        ("market", lambda: keep_market(deps)),
        ("accounts", lambda: keep_accounts(deps)),
        ("seeder", seeder.run),
        ("seeding", lambda: keep_seeding(deps, seeder)),
        ("speaking", lambda: keep_speaking(deps, swarm.voice)),
        ("tidy", lambda: keep_tidy(deps, publisher, remove_scratch)),
        ("lag", lambda: keep_looking(deps.lag)),
    ]
    loops += await _renters(settings, deps, stack)
    if net is not None:
        told_host = _literal(settings.told_host or settings.host)
        stack.push_async_callback(net.close)
        loops += [("control", lambda: keep_control(net, deps.control, told_host)), ("members", lambda: keep_members(deps, net))]
    for name, loop in loops:
        task = asyncio.create_task(_essential(name, loop), name=name)
        stack.push_async_callback(_end, task)


async def _renters(
    settings: Settings, deps: Deps, stack: contextlib.AsyncExitStack
) -> list[tuple[str, Callable[[], Awaitable[None]]]]:
    """One loop a provider of the operator's file. Raises CannotServe."""
    if settings.providers is None:
        return []
    file = await asyncio.to_thread(read_providers, settings.providers.expanduser())
    session = await stack.enter_async_context(aiohttp.ClientSession())
    named: dict[str, RentingSettings] = {name: renting_settings(section) for name, section in file.provider.items()}
    renters = [
        (f"renting {name}", Renter(deps, provider_of(name, section, session), named[name], deps.rentals).run)
        for name, section in file.provider.items()
    ]
    return [*renters, ("wishes", lambda: keep_wishing(deps, named))]


async def _essential(name: str, loop: Callable[[], Awaitable[None]]) -> None:
    """A loop whose failure ends the process: going on without it would look healthy and do nothing."""
    try:
        await loop()
    except Exception:
        log.critical("loop_failed", loop=name, exc_info=True)
        os.kill(os.getpid(), signal.SIGTERM)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, TimeoutError):
        async with asyncio.timeout(END_S):
            await task
