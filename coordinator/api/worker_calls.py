"""Guards every worker route: limits, authentication, session; then the route's own work; every outcome is a signed reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import structlog
from aiohttp import web
from aiohttp.web_protocol import RequestPayloadError

from coordinator.api.worker_http import answer, check_head, held, read_body, refusal
from coordinator.domain.model import Worker
from coordinator.service.deps import Deps
from coordinator.service.submitting import SubmitDesk
from coordinator.service.worker_auth import (
    Proof,
    check_nonce,
    check_session,
    check_signature,
    check_time,
    unknown_worker,
)
from coordinator.service.worker_batching import Batcher
from coordinator.service.worker_beats import BeatDesk
from coordinator.service.worker_bulletin import Bulletin
from coordinator.service.worker_desk import LeaseDesk
from coordinator.service.worker_limits import ByteBudget, NonceMemory, ProtocolLimits, TokenBuckets
from coordinator.service.worker_messages import parse
from coordinator.service.worker_refusals import ProtocolRefusal, too_many
from coordinator.service.worker_weights import KnownEdges, PieceRights
from coordinator.wire.messages import JoinRequest, Message
from coordinator.wire.signing import HEADERS, SignedFields, key_id, public_hex, read_headers
from p2p.adapters.control.desk import Desk as ControlAnswers
from p2p.errors import ControlRefused

log = structlog.get_logger()


class Desk:
    """What the routes share, for as long as the app runs. All of it is bounded, and none of it survives a restart."""

    def __init__(self, deps: Deps, limits: ProtocolLimits, control: ControlAnswers, *, trusts_proxy: bool = False) -> None:
        self.deps = deps
        self.control = control
        self.limits = limits
        self._trusts_proxy = trusts_proxy
        self.key_id = key_id(public_hex(deps.key))
        self.nonces = NonceMemory(limits.nonces)
        self.bodies = ByteBudget(limits.bodies_in_flight_bytes)
        most = limits.keys_tracked
        self.keys = TokenBuckets(rate_s=limits.per_key_rate_s, burst=limits.per_key_burst, most=most)
        self.addresses = TokenBuckets(rate_s=limits.per_address_rate_s, burst=limits.per_address_burst, most=most)
        self.failures = TokenBuckets(rate_s=limits.failures_rate_s, burst=limits.failures_burst, most=most)
        self.bulletin = Bulletin(deps)
        self.leases = LeaseDesk(deps)
        self.submissions = SubmitDesk(deps)
        self.beats = BeatDesk(deps, self.bulletin)
        self.workers: Batcher[str, Worker | None] = Batcher(self._load, most=256)
        self.edges = KnownEdges()
        self.pieces = PieceRights(self.edges)
        self.large_frames = asyncio.Semaphore(2)  # each may hold a whole frame, decompressed

    async def _load(self, ids: Sequence[str]) -> list[Worker | None]:
        """Worker rows by id, many in one read."""
        found = await self.deps.store.read(lambda reader: reader.select(Worker, id=sorted(set(ids))))
        by_id = {worker.id: worker for worker in found}
        return [by_id.get(one) for one in ids]

    def address_of(self, request: web.Request) -> str:
        """Whose share a request counts against: behind a proxy, the address that the proxy itself saw and wrote last."""
        if self._trusts_proxy:
            forwarded = request.headers.getall("X-Forwarded-For", [""])[-1].rpartition(",")[2].strip()
            if forwarded:
                return forwarded[:64]
        return request.remote or ""

    async def close(self, _app: web.Application) -> None:
        """Answer those who wait."""
        await self.leases.close()


@dataclass(frozen=True, slots=True)
class Call:
    """An authenticated request. `worker` is None only for join, whose message is parsed already."""

    desk: Desk
    request: web.Request
    fields: SignedFields
    body: bytes
    worker: Worker | None = None
    joining: JoinRequest | None = None

    @property
    def caller(self) -> Worker:
        """The authenticated worker."""
        if self.worker is None:
            raise RuntimeError("join has no worker yet")
        return self.worker


Route = Callable[[Call], Awaitable[Message | web.StreamResponse]]


def guarded(desk: Desk, route: Route, *, limit: int, content_type: str) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The handler of a route: `limit` bounds its body in bytes."""

    async def handle(request: web.Request) -> web.StreamResponse:
        deps = desk.deps
        nonce = ""
        try:
            fields, signature = _open(desk, request)
            nonce = fields.nonce
            check_head(request, limit=limit, content_type=content_type)
            is_join = request.path.endswith("/join")
            worker = None if is_join else await _claimed(desk, request, fields)
            with held(desk.bodies) as hold:
                body = await read_body(request, hold, limit=limit, limits=desk.limits)
                call = await _authenticate(desk, request, Proof(fields, signature, body), worker)
                outcome = await route(call)
        except Exception as error:
            problem = _problem_of(error, request)
            return refusal(problem, key=deps.key, nonce=nonce, now=deps.clock.now())
        if isinstance(outcome, Message):
            return answer(outcome, key=deps.key, nonce=nonce)
        return outcome

    return handle


def _problem_of(error: Exception, request: web.Request) -> ProtocolRefusal:
    """The refusal that an error becomes; what is nobody's refusal is our own fault, and logged."""
    if isinstance(error, ProtocolRefusal):
        return error
    if isinstance(error, ControlRefused):
        return ProtocolRefusal(422, "control_refused", str(error), field="body", fix="see PROTOCOL.md, control plane")
    if isinstance(error, RequestPayloadError | ConnectionResetError):
        return ProtocolRefusal(400, "broken_body", "the body ended early", field="body", fix="send it whole")
    log.error("worker_request_failed", path=request.path[:200], exc_info=error)
    words = "the coordinator failed on this request; nothing of it was acknowledged"
    return ProtocolRefusal(500, "internal_error", words, fix="repeat the request; tell the operator", retry_after_s=5.0)


def _open(desk: Desk, request: web.Request) -> tuple[SignedFields, str]:
    """The signed fields, their time checked, before the body is read."""
    now = desk.deps.clock.now()
    address = desk.address_of(request)
    wait_s = desk.addresses.take(address, now) or desk.failures.wait_s(address, now)
    if wait_s:
        raise too_many("requests from this address", retry_after_s=wait_s)
    read = read_headers(request.headers, method=request.method, path=request.raw_path, coordinator=desk.key_id)
    if read is None:
        desk.failures.take(address, now)
        words = f"a signature header is missing or malformed; all of {', '.join(HEADERS)} are needed"
        raise ProtocolRefusal(401, "unsigned", words, field=HEADERS[0], fix="sign the request as PROTOCOL.md says")
    check_time(read[0], now=now, started_at=desk.deps.started_at)
    return read


async def _claimed(desk: Desk, request: web.Request, fields: SignedFields) -> Worker:
    """The worker that the request claims to come from: a body from nobody is not worth reading."""
    worker = await desk.workers.ask(fields.worker)
    if worker is None:
        desk.failures.take(desk.address_of(request), desk.deps.clock.now())
        raise unknown_worker(fields)
    return worker


async def _authenticate(desk: Desk, request: web.Request, proof: Proof, worker: Worker | None) -> Call:
    """Signature, nonce, session, and the key's share of requests. `worker` is None for join: its key is in its body."""
    deps, fields = desk.deps, proof.fields
    try:
        joining = parse(JoinRequest, proof.body) if worker is None else None
        public_key = joining.public_key if joining is not None else worker.public_key if worker is not None else ""
        check_signature(public_key, proof)
    except ProtocolRefusal:
        desk.failures.take(desk.address_of(request), deps.clock.now())
        raise
    now = deps.clock.now()
    wait_s = desk.keys.take(fields.worker, now)
    if wait_s:
        raise too_many("requests with this key", retry_after_s=wait_s)
    check_nonce(desk.nonces, fields, now=now)
    if worker is not None:
        check_session(worker, fields.epoch)
        deps.presence.touch(worker.id, epoch=worker.session_epoch, at=now)
    return Call(desk, request, fields, proof.body, worker, joining)
