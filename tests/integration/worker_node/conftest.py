"""A small coordinator on loopback: real signatures, real frames, real pieces; its decisions are the test's."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from coordinator.wire import messages as wire
from coordinator.wire import signing
from coordinator.wire.canary import scripted_canary
from coordinator.wire.frames import decode_frame
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.tls import self_signed, server_context
from p2p.domain import lineage
from p2p.domain.batches import text_hash
from p2p.domain.control_board import Ask, Page, page_to_bytes
from p2p.domain.control_messages import PEERS, Neighbour, PeersReply, PeersRequest
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Manifest
from p2p.domain.signing import sign_batch, sign_hop, sign_manifest

VOCAB = 40


def model_directory(directory: Path, seed: int) -> Path:
    """A directory that can be published and that a scripted engine can load."""
    directory.mkdir(parents=True)
    draw = np.random.default_rng(seed)
    save_file({"w": draw.standard_normal((64, 64)).astype(np.float32)}, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCAB}))
    return directory


class Refused(Exception):
    """A handler's way to answer with a problem document."""

    def __init__(self, status: int, code: str, **extra: Any) -> None:
        super().__init__(code)
        self.problem = wire.Problem(title="refused", status=status, code=code, detail=f"refused: {code}", **extra)


class SmallCoordinator:
    """Answers /worker/v1. Public attributes are what a test sets and reads."""

    def __init__(self, root: Path) -> None:
        self.key = Ed25519PrivateKey.generate()
        self.public = signing.public_hex(self.key)
        self.store_dir = root / "origin"
        self.root = root
        self.clock: Callable[[], float] = time.time
        self.url = ""
        self.epoch = 0
        self.joins: list[wire.JoinRequest] = []
        self.beats: list[wire.Heartbeat] = []
        self.confirms: list[wire.Confirm] = []
        self.requests: Counter[str] = Counter()
        self.manifests: dict[int, Manifest] = {}
        self.directories: dict[int, Path] = {}
        self.batches: dict[int, list[str]] = {}
        self.hops: list[Hop] = []
        self.base: wire.BaseVersion | None = None  # what low-rank edges begin at
        self.forthcoming: tuple[wire.Forthcoming, ...] = ()
        self.newest: int | None = None
        self.work: list[wire.Lease] = []
        self.accepted: dict[tuple[str, int], tuple[wire.CompletionHead, dict[str, np.ndarray], dict[str, str]]] = {}
        self.left: list[str] = []
        self.cancel: tuple[wire.CancelOrder, ...] = ()
        self.expected_canary: Callable[[Manifest], tuple[float, ...]] = lambda m: scripted_canary(m.digest, len(m.canary_ids) - 1)
        self.peers: tuple[Neighbour, ...] | None = None  # None: it does not answer such questions
        self.before: Callable[[str, web.Request], None] = lambda route, request: None  # may raise Refused
        self.sign_replies = True
        self.statement_for: str | None = None
        self.certificate: str | None = None
        self.identity_key: str | None = None
        self.more_work = asyncio.Event()
        self._runner: web.AppRunner | None = None

    async def start(self, *, tls: bool = False) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_get("/worker/v1/identity", self.identity)
        for name in ("join", "heartbeat", "lease", "submit", "confirm", "account", "leave"):
            app.router.add_post(f"/worker/v1/{name}", self.guarded(name))
        app.router.add_post("/worker/v1/control/{call}", self.guarded("control"))
        app.router.add_get("/worker/v1/jobs/{job}/manifests/{version}", self.guarded("manifest"))
        app.router.add_get("/worker/v1/jobs/{job}/transfers/{transfer}", self.guarded("batches"))
        app.router.add_get("/worker/v1/pieces/{digest}", self.guarded("piece"))
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        context = None
        if tls:
            certificate, key, self.certificate = self_signed(self.root / "tls", ["127.0.0.1"])
            self.statement_for = self.certificate
            context = server_context(certificate, key)
        site = web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        port = self._runner.addresses[0][1]
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def publish(
        self, directory: Path, version: int, canary_ids: tuple[int, ...] = (1, 2, 3, 4), base: int | None = None
    ) -> Manifest:
        """Make a version public; as a delta against version `base` if that is given."""
        self.encode(directory, version, canary_ids, base)
        self.newest = version
        return self.manifests[version]

    def encode(
        self,
        directory: Path,
        version: int,
        canary_ids: tuple[int, ...] = (1, 2, 3, 4),
        base: int | None = None,
        encoding: str = lineage.DELTA,
    ) -> None:
        """All of a publication but its announcement; `batches` are what an encoder told meanwhile."""
        told: list[str] = []
        against = None if base is None else self.against(base, encoding)
        manifest = Encoder(self.store_dir).publish(
            directory, job_id="job", version=version, canary_ids=canary_ids, base=against, on_batch=told.append
        )
        self.manifests[version], self.directories[version], self.batches[version] = manifest, directory, told
        self.hops += hops_of(manifest)

    def against(self, version: int, encoding: str = lineage.DELTA) -> Base:
        """A published version to encode against."""
        return Base(version, self.manifests[version].digest, self.directories[version], encoding=encoding)

    def path(self, request: web.Request, manifest: Manifest) -> list[Hop]:
        """The cheapest path as the request wants it."""
        held, doubted = (frozenset(request.query.get(name, "").split(",")) for name in ("held", "doubted"))
        hops = {hop.way.id: hop for hop in self.hops}
        ways = lineage.path([hop.way for hop in self.hops], manifest.digest, held=held, doubted=doubted)
        return [hops[way.id] for way in ways]

    def lease_of(self, lease_id: str, slots: tuple[int, ...], **changes: Any) -> wire.Lease:
        values: dict[str, Any] = {
            "lease_id": lease_id,
            "job_id": "job",
            "group_id": f"g-{lease_id}",
            "fence": 7,
            "prompt_ids": (4, 5),
            "slots": slots,
            "seeds": tuple(1000 + slot for slot in slots),
            "sampling": wire.SamplingParameters(max_new_tokens=6, temperature=1.0, stop_token_ids=(3,)),
            "version": self.newest,
            "digest": self.manifests[self.newest or 0].digest,
            "last_step": 9,
            "deadline": self.clock() + 60.0,
            "on_update": "keep",
        }
        return wire.Lease(**{**values, **changes})

    async def identity(self, _request: web.Request) -> web.Response:
        statement = ""
        if self.statement_for is not None:
            statement = self.key.sign(signing.certificate_message(self.statement_for)).hex()
        return web.json_response(
            {
                "public_key": self.identity_key or self.public,
                "certificate_sha256": self.statement_for,
                "statement": statement,
                "protocol_min": 1,
                "protocol_max": 1,
                "server_time": self.clock(),
            }
        )

    def guarded(self, route: str) -> Callable[[web.Request], Any]:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = await request.read()
            self.requests[route] += 1
            nonce = request.headers.get("Echo2-Nonce", "")
            try:
                self.check(request, body)
                self.before(route, request)
                answer = await getattr(self, f"on_{route}")(request, body)
                status = 200
            except Refused as refused:
                answer, status = refused.problem, refused.problem.status
            if isinstance(answer, bytes) and route == "piece":
                return web.Response(body=answer, content_type="application/octet-stream")
            data = answer if isinstance(answer, bytes) else answer.model_dump_json().encode()
            response = web.Response(body=data, status=status, content_type="application/json")
            if self.sign_replies:
                response.headers[signing.REPLY_HEADER] = self.key.sign(signing.reply_message(nonce, data)).hex()
            return response

        return handle

    def check(self, request: web.Request, body: bytes) -> None:
        read = signing.read_headers(
            request.headers, method=request.method, path=request.raw_path, coordinator=signing.key_id(self.public)
        )
        assert read is not None, "the request carries all signed headers"
        fields, signature = read
        if abs(float(fields.time) - self.clock()) > signing.MAX_SKEW_S:
            raise Refused(401, "clock_skew", server_time=self.clock(), fix="use server_time")
        public = (
            wire.JoinRequest.model_validate_json(body).public_key if request.path.endswith("/join") else self.joins[-1].public_key
        )
        assert fields.worker == signing.worker_id(public)
        assert signing.verify(public, signature, fields.message(body)), "the signature covers this very request"

    async def on_join(self, _request: web.Request, body: bytes) -> wire.Welcome:
        self.joins.append(wire.JoinRequest.model_validate_json(body))
        self.epoch += 1
        return wire.Welcome(
            worker_id=signing.worker_id(self.joins[-1].public_key),
            session_epoch=self.epoch,
            heartbeat_s=0.1,
            server_time=self.clock(),
            peer_networks=("127.0.0.0/8",),
        )

    async def on_heartbeat(self, _request: web.Request, body: bytes) -> wire.HeartbeatReply:
        self.beats.append(wire.Heartbeat.model_validate_json(body))
        notices = ()
        if self.newest is not None:
            notices = (
                wire.VersionNotice(
                    job_id="job", version=self.newest, digest=self.manifests[self.newest].digest, committed_steps=self.newest
                ),
            )
        return wire.HeartbeatReply(
            server_time=self.clock(),
            state="active",
            reason="active",
            versions=notices,
            forthcoming=self.forthcoming,
            cancel=self.cancel,
            price_uusd_per_hour=0,
            heartbeat_s=0.1,
        )

    async def on_lease(self, _request: web.Request, body: bytes) -> wire.LeaseReply:
        request = wire.LeaseRequest.model_validate_json(body)
        assert any(c.version == request.version for c in self.confirms), "work is asked for with a confirmed version"
        if not self.work:
            self.more_work.clear()
            try:
                async with asyncio.timeout(min(request.wait_s, 5.0)):
                    await self.more_work.wait()
            except TimeoutError:
                return wire.LeaseReply(reason="nothing to do")
        leases, self.work = tuple(self.work), []
        return wire.LeaseReply(leases=leases)

    async def on_submit(self, request: web.Request, body: bytes) -> wire.SubmitReply:
        assert request.content_type == "application/vnd.echo2.frame"
        head_json, arrays = decode_frame(body)
        head = wire.SubmitHead.model_validate_json(head_json)
        start, slots = 0, []
        for done in head.completions:
            part = {name: array[start : start + done.length] for name, array in arrays.items()}
            start += done.length
            key = (head.lease_id, done.slot)
            assert key not in self.accepted, "a slot is settled once"
            self.accepted[key] = (done, part, dict(head.digests))
            slots.append(done.slot)
        assert all(len(array) == start for array in arrays.values())
        receipt = signing.receipt_message(signing.worker_id(self.joins[-1].public_key), head.lease_id, head.fence, slots)
        return wire.SubmitReply(accepted=tuple(sorted(slots)), receipt=self.key.sign(receipt).hex())

    async def on_confirm(self, _request: web.Request, body: bytes) -> wire.ConfirmReply:
        confirm = wire.Confirm.model_validate_json(body)
        expected = self.expected_canary(self.manifests[confirm.version])
        accepted = len(expected) == len(confirm.canary_logprobs) and np.allclose(expected, confirm.canary_logprobs, atol=1e-4)
        if accepted:
            self.confirms.append(confirm)
        return wire.ConfirmReply(accepted=bool(accepted), reason="" if accepted else "wrong_canary")

    async def on_account(self, _request: web.Request, _body: bytes) -> wire.Account:
        return wire.Account(
            accepted_rollouts=len(self.accepted), accepted_tokens=0, refused_rollouts=0, active_s=1.0, earned_uusd=5
        )

    async def on_leave(self, _request: web.Request, body: bytes) -> wire.Account:
        self.left.append(wire.Leave.model_validate_json(body).reason)
        return await self.on_account(_request, body)

    async def on_manifest(self, request: web.Request, _body: bytes) -> wire.ManifestReply:
        manifest = self.manifests[int(request.match_info["version"])]
        assert request.query["digest"] == manifest.digest
        text = manifest.to_json()
        hops = [hop.to_json() for hop in self.path(request, manifest)]
        return wire.ManifestReply(
            manifest=text,
            signature=sign_manifest(self.key, text),
            hops=tuple(wire.SignedHop(text=hop, signature=sign_hop(self.key, hop)) for hop in hops),
            base=self.base,
        )

    async def on_batches(self, request: web.Request, _body: bytes) -> wire.BatchesReply:
        (texts,) = [told for told in self.batches.values() if text_hash(told[0]) == request.match_info["transfer"]]
        told = texts[int(request.query["since"]) :]
        return wire.BatchesReply(batches=tuple(wire.SignedBatch(text=text, signature=sign_batch(self.key, text)) for text in told))

    async def on_control(self, request: web.Request, body: bytes) -> bytes:
        match request.match_info["call"]:
            case "request" if self.peers is not None:
                ask = Ask.from_bytes(body)
                assert (ask.protocol, PeersRequest.from_bytes(ask.payload).job_id) == (PEERS, "job")
                return PeersReply(self.peers).to_bytes()
            case "poll":
                return page_to_bytes(Page(0, ()))
            case _:
                raise Refused(422, "control_refused")

    async def on_piece(self, request: web.Request, _body: bytes) -> bytes:
        assert request.query["job"] == "job"
        try:
            return PieceStore(self.store_dir).read(request.match_info["digest"])
        except KeyError:
            raise Refused(404, "unknown_piece") from None


@pytest.fixture
async def coordinator(tmp_path: Path) -> AsyncIterator[SmallCoordinator]:
    small = SmallCoordinator(tmp_path / "coordinator")
    yield small
    await small.stop()


@pytest.fixture
def make_model(tmp_path: Path) -> Callable[[int], Path]:
    """A publishable directory for a seed."""
    return lambda seed: model_directory(tmp_path / "models" / str(seed), seed)


@pytest.fixture
def refused() -> type[Refused]:
    return Refused


@pytest.fixture
async def until() -> Callable[..., Any]:
    """Wait for a condition, or fail with the words."""

    async def wait(condition: Callable[[], Any], words: str, limit_s: float = 20.0) -> None:
        try:
            async with asyncio.timeout(limit_s):
                while not condition():
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise AssertionError(f"not within {limit_s} s: {words}") from None

    return wait


@pytest.fixture
def unused_port() -> int:
    """A free port on loopback (free at the time of asking)."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
