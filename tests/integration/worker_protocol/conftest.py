"""A real coordinator's worker side (TLS on loopback, SQLite) with one running job, and strangers that speak the protocol."""

from __future__ import annotations

import io
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.api.worker import add_worker_routes
from coordinator.domain.canary import scripted
from coordinator.domain.model import Invite, Job, JobState, Publication, PublicationState
from coordinator.service import sweeping
from coordinator.service.deps import Deps, LiveJob, ServiceSettings
from coordinator.service.invites import invite_code
from coordinator.service.ports import Prompt
from coordinator.service.tokens import secret_hash
from coordinator.service.worker_limits import ProtocolLimits
from coordinator.store.blobs import FileBlobs
from coordinator.store.sql import open_store
from coordinator.wire import messages as wire
from coordinator.wire.frames import encode_frame
from coordinator.wire.job import JobConfig
from coordinator.wire.signing import (
    REPLY_HEADER,
    SignedFields,
    key_id,
    public_hex,
    receipt_message,
    reply_message,
    sign_request,
    verify,
    worker_id,
)
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.tls import pinned_client, self_signed, server_context
from p2p.domain.manifest import Edge, Manifest, Piece, Tensor

JOB = "job-1"
SECRET = "s" * 43
VOCAB, STOP, CAP, GROUP = 64, 1, 8, 4


class MovedClock:
    """The real clock plus what a test adds."""

    def __init__(self) -> None:
        self.added = 0.0

    def now(self) -> float:
        return time.time() + self.added


def digest_of(version: int, salt: str = "a") -> str:
    return (f"{version:x}{salt}" * 64)[:64]


def job_row(**changes: Any) -> Job:
    config = JobConfig.model_validate(
        {
            "name": "toy",
            "model": "toy",
            "seed": 7,
            "environment": {"type": "digit_sort"},
            "algorithm": {"group_size": GROUP, "groups_per_step": 4},
            "staleness": {"max": 2},
            "sampling": {"max_new_tokens": CAP},
            "workers": {"engines": ["scripted", "torch"]},
            "budget": {"steps": 100},
        }
    )
    row = Job(JOB, "toy", "owner", config, JobState.RUNNING, "", 0.0, 0.0, "/nowhere", vocab_size=VOCAB, stop_token_ids=(STOP,))
    return replace(row, **changes)


PIECE = b"the weights of a toy"


def manifest_of(version: int, digest: str) -> Manifest:
    piece = Piece(blake3(PIECE).hexdigest(), len(PIECE))
    tensor = Tensor("w", "U8", (len(PIECE),), len(PIECE))
    return Manifest(JOB, version, digest, (tensor,), {}, (), (1, 2, 3), (Edge("raw", None, None, (piece,)),))


def publication_row(version: int, digest: str | None = None, **changes: Any) -> Publication:
    digest = digest or digest_of(version)
    text = manifest_of(version, digest).to_json()
    row = Publication(JOB, version, digest, PublicationState.PUBLISHED, text, "ab" * 64, "/nowhere", (-1.0,) * 23, 0.0)
    return replace(row, **changes)


@dataclass
class Reply:
    status: int
    body: bytes
    headers: Any
    nonce: str

    def read(self, kind: type[Any]) -> Any:
        assert self.status == 200, self.body
        return kind.model_validate_json(self.body)

    @property
    def problem(self) -> wire.Problem:
        assert self.status >= 400, self.body
        return wire.Problem.model_validate_json(self.body)


@dataclass
class Coordinator:
    """A served coordinator; `restart` closes everything and starts it again on the same data."""

    directory: Path
    url_of_store: str
    key: Ed25519PrivateKey
    clock: MovedClock
    settings: ServiceSettings
    limits: ProtocolLimits
    deps: Deps = field(init=False)
    base: str = field(init=False)
    certificate: str = field(init=False)
    session: aiohttp.ClientSession = field(init=False)
    _runner: web.AppRunner = field(init=False)
    reached: list[str] = field(default_factory=list)
    on_reach: Callable[[str], None] = lambda _name: None

    async def start(self) -> None:
        store = await open_store(self.url_of_store)
        self.deps = Deps(
            store=store,
            blobs=FileBlobs(self.directory / "blobs"),
            clock=self.clock,
            settings=self.settings,
            key=self.key,
            started_at=self.clock.now(),
            reach=self._reach,
        )
        certificate, private, self.certificate = self_signed(self.directory / "tls", ["127.0.0.1"])
        app = web.Application()
        add_worker_routes(app, self.deps, certificate_sha256=self.certificate, limits=self.limits)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, auto_decompress=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=server_context(certificate, private))
        await site.start()
        self.base = f"https://127.0.0.1:{self._runner.addresses[0][1]}"
        self.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=pinned_client(self.certificate), limit=0))

    def _reach(self, name: str) -> None:
        self.reached.append(name)
        self.on_reach(name)

    async def stop(self) -> None:
        await self.session.close()
        await self._runner.cleanup()
        await self.deps.store.close()

    async def restart(self) -> None:
        await self.stop()
        await self.start()
        await sweeping.recover(self.deps)
        self.go_live()

    def go_live(self) -> None:
        live = LiveJob(plane=None)  # type: ignore[arg-type]  # nothing here grades
        live.prompts.fill({n: Prompt(n, (2, 3, n % VOCAB), f"prompt {n}") for n in range(200)}, 0)
        self.deps.live[JOB] = live

    async def put(self, *rows: object) -> None:
        for row in rows:
            await self.deps.store.write(lambda tx, row=row: tx.put(row))
        self.deps.wake.notify(JOB)

    async def get(self, kind: type[Any], *key: object) -> Any:
        return await self.deps.store.read(lambda reader: reader.get(kind, *key))

    async def rows(self, kind: type[Any], **filters: Any) -> list[Any]:
        return await self.deps.store.read(lambda reader: reader.select(kind, **filters))

    async def sweep(self) -> float | None:
        return await sweeping.sweep(self.deps)

    def store_piece(self) -> str:
        piece = Piece(blake3(PIECE).hexdigest(), len(PIECE))
        PieceStore(self.directory / "pieces").put(piece, PIECE)
        return piece.digest

    def invite_code(self, secret: str = SECRET) -> str:
        return invite_code(public_hex(self.key), secret)


class Stranger:
    """A worker written from the specification."""

    def __init__(self, coordinator: Coordinator, name: str = "w1", key: Ed25519PrivateKey | None = None) -> None:
        self.coordinator = coordinator
        self.name = name
        self.key = key or Ed25519PrivateKey.generate()
        self.id = worker_id(public_hex(self.key))
        self.epoch = 0

    def sign(self, verb: str, target: str, body: bytes, **changes: Any) -> tuple[dict[str, str], str]:
        values: dict[str, Any] = {
            "method": verb,
            "path": target,
            "coordinator": key_id(public_hex(self.coordinator.key)),
            "worker": self.id,
            "epoch": self.epoch,
            "time": f"{self.coordinator.clock.now():.3f}",
            "nonce": secrets.token_hex(16),
        }
        values |= changes
        fields = SignedFields(**values)
        return sign_request(self.key, fields, body), fields.nonce

    async def call(
        self,
        route: str,
        body: bytes,
        *,
        content_type: str = "application/json",
        headers: dict[str, str] | None = None,
        **changes: Any,
    ) -> Reply:
        path = f"/worker/v1/{route}"
        signed, nonce = self.sign("POST", path, body, **changes)
        sent = {"Content-Type": content_type, **signed, **(headers or {})}
        async with self.coordinator.session.post(self.coordinator.base + path, data=io.BytesIO(body), headers=sent) as response:
            return await self._checked(response, nonce, sent)

    async def fetch(self, route: str) -> Reply:
        path = f"/worker/v1/{route}"
        signed, nonce = self.sign("GET", path, b"")
        async with self.coordinator.session.get(self.coordinator.base + path, headers=signed) as response:
            return Reply(response.status, await response.read(), response.headers, nonce)

    async def _checked(self, response: aiohttp.ClientResponse, nonce: str, sent: dict[str, str]) -> Reply:
        body = await response.read()
        if sent.get("Echo2-Nonce") == nonce and REPLY_HEADER in response.headers:
            key = public_hex(self.coordinator.key)
            assert verify(key, response.headers[REPLY_HEADER], reply_message(nonce, body)), "the reply's signature is wrong"
        else:
            assert response.status >= 400, "a reply without a signature"
        return Reply(response.status, body, response.headers, nonce)

    async def send(self, route: str, message: wire.Message, **changes: Any) -> Reply:
        return await self.call(route, message.model_dump_json().encode(), **changes)

    def join_request(self, **changes: Any) -> wire.JoinRequest:
        values: dict[str, Any] = {
            "invite_code": self.coordinator.invite_code(),
            "public_key": public_hex(self.key),
            "name": self.name,
            "engine": {"kind": "scripted", "version": "1", "dtype": "float32"},
            "price_uusd_per_hour": 350_000,
            "max_slots": 8,
            "tokens_per_s": 100.0,
        }
        return wire.JoinRequest.model_validate(values | changes)

    async def join(self, **changes: Any) -> wire.Welcome:
        reply = await self.send("join", self.join_request(**changes), epoch=0)
        welcome: wire.Welcome = reply.read(wire.Welcome)
        self.epoch = welcome.session_epoch
        return welcome

    def held(self, *versions: int) -> tuple[wire.Held, ...]:
        return tuple(wire.Held(job_id=JOB, version=v, digest=digest_of(v)) for v in versions)

    async def beat(self, *versions: int, **changes: Any) -> wire.HeartbeatReply:
        beat = wire.Heartbeat(session_epoch=self.epoch, held=self.held(*versions), **changes)
        reply: wire.HeartbeatReply = (await self.send("heartbeat", beat)).read(wire.HeartbeatReply)
        return reply

    async def confirm(self, version: int, digest: str | None = None, **changes: Any) -> wire.ConfirmReply:
        digest = digest or digest_of(version)
        values: dict[str, Any] = {"canary_logprobs": scripted(digest, 23)} | changes
        message = wire.Confirm(session_epoch=self.epoch, job_id=JOB, version=version, digest=digest, **values)
        reply: wire.ConfirmReply = (await self.send("confirm", message)).read(wire.ConfirmReply)
        return reply

    async def ready(self, version: int = 0) -> Stranger:
        await self.join()
        assert (await self.confirm(version)).accepted
        return self

    async def ask(self, version: int = 0, *, free: int = GROUP, wait_s: float = 0.0, digest: str | None = None) -> wire.LeaseReply:
        message = wire.LeaseRequest(
            session_epoch=self.epoch,
            job_id=JOB,
            version=version,
            digest=digest or digest_of(version),
            free_slots=free,
            wait_s=wait_s,
        )
        reply: wire.LeaseReply = (await self.send("lease", message)).read(wire.LeaseReply)
        return reply

    async def lease(self, version: int = 0, *, free: int = GROUP) -> wire.Lease:
        reply = await self.ask(version, free=free)
        assert reply.leases, reply.reason
        return reply.leases[0]

    def frame(self, lease: wire.Lease, slots: Sequence[int] | None = None, *, version: int | None = None, **changes: Any) -> bytes:
        """A faultless submission of `slots`; `changes` replace arrays or fields of the head."""
        slots = lease.slots if slots is None else slots
        version = lease.version if version is None else version
        ids = np.concatenate([np.array([5, 6, 2 + slot % 50, STOP], np.int32) for slot in slots])
        arrays = {
            "token_ids": ids,
            "logprobs": np.full(len(ids), -0.5, np.float32),
            "versions": np.full(len(ids), version, np.int32),
        }
        head: dict[str, Any] = {
            "session_epoch": self.epoch,
            "lease_id": lease.lease_id,
            "fence": lease.fence,
            "digests": {str(version): digest_of(version)},
            "completions": [{"slot": s, "length": 4, "stop_reason": "stop", "generate_s": 1.0} for s in slots],
        }
        arrays |= {name: value for name, value in changes.items() if name in arrays}
        head |= {name: value for name, value in changes.items() if name not in arrays}
        return encode_frame(wire.SubmitHead.model_validate(head).model_dump_json().encode(), arrays)

    async def submit_raw(self, frame: bytes) -> Reply:
        return await self.call("submit", frame, content_type="application/vnd.echo2.frame")

    async def submit(self, lease: wire.Lease, slots: Sequence[int] | None = None, **changes: Any) -> wire.SubmitReply:
        reply: wire.SubmitReply = (await self.submit_raw(self.frame(lease, slots, **changes))).read(wire.SubmitReply)
        settled = {*reply.accepted, *reply.duplicates}
        if settled:
            message = receipt_message(self.id, lease.lease_id, lease.fence, sorted(settled))
            assert verify(public_hex(self.coordinator.key), reply.receipt, message)
        return reply


@pytest.fixture
def settings(tmp_path: Path) -> ServiceSettings:
    return ServiceSettings(
        data_dir=tmp_path,
        allow_scripted=True,
        minimum_free_bytes=1,
        strikes_to_quarantine=3,
        peer_networks=("127.0.0.0/8",),
        lease_max_s=400.0,
    )


@pytest.fixture
def limits() -> ProtocolLimits:
    return ProtocolLimits(
        per_key_rate_s=1e4, per_key_burst=1e4, failures_rate_s=1e4, failures_burst=1e4, body_timeout_s=0.3, body_total_s=1.0
    )


@pytest.fixture
async def coordinator(
    sqlite_url: str, tmp_path: Path, settings: ServiceSettings, limits: ProtocolLimits
) -> AsyncIterator[Coordinator]:
    """One running job with version 0 published, one invite for many workers."""
    made = Coordinator(tmp_path, sqlite_url, Ed25519PrivateKey.generate(), MovedClock(), settings, limits)
    await made.start()
    now = made.clock.now()
    await made.put(job_row(), publication_row(0), Invite("i-1", secret_hash(SECRET), "anna", 100, now, now + 1e6))
    made.go_live()
    yield made
    await made.stop()
    shutil.rmtree(tmp_path / "blobs", ignore_errors=True)


@pytest.fixture
def stranger(coordinator: Coordinator) -> Callable[..., Stranger]:
    """Makes workers."""
    return lambda name="w1", key=None: Stranger(coordinator, name, key)


@pytest.fixture
def rows() -> Any:
    """Row factories."""

    class Rows:
        publication = staticmethod(publication_row)
        job = staticmethod(job_row)
        digest = staticmethod(digest_of)

    return Rows
