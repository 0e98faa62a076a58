"""The worker's side of /worker/v1: signed requests out, checked replies in, every call with a deadline.

Who answers is established first (`trust.py`); besides, each JSON reply carries the coordinator's signature over this request's nonce and
the body. A reply without it is worth a retry and nothing more: no proxy can grant, order or end anything.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import aiohttp
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import ValidationError
from yarl import URL

from coordinator.wire import messages as wire
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
from worker_node.adapters.replies import FAILURES, Refusal, in_words, read_refusal
from worker_node.adapters.trust import TLS_FAULTS, Trust, establish
from worker_node.domain.events import Outcome
from worker_node.errors import CallError

FRAME_TYPE = "application/vnd.echo2.frame"

MOST_JSON_BYTES = 80 << 20  # a manifest may hold 64 Mi characters
_PREFIX = "/worker/v1"
CLOCK_CODES = ("clock_skew", "before_restart")  # our time was refused; the reply tells the right one
_CONNECT_S = 10.0
_STEADY_ROUND_TRIP_S = 2.0

Reply = TypeVar("Reply", bound=wire.Message)
Pace = Callable[[int], Awaitable[None]]
"""Waits as long as so many bytes may take."""


async def _at_once(_count: int) -> None:
    """No limit."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds for each call, connection included; `lease` is on top of the time the coordinator may wait."""

    join: float = 20.0
    heartbeat: float = 15.0
    lease: float = 15.0
    submit: float = 60.0
    confirm: float = 30.0
    account: float = 15.0
    leave: float = 5.0
    manifest: float = 60.0
    piece: float = 120.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply as it came."""

    status: int
    headers: dict[str, str]
    body: bytes


class CoordinatorClient:
    """One worker's connection to one coordinator. Methods raise CallError; `connect` also TrustError."""

    def __init__(
        self,
        url: str,
        *,
        key: Ed25519PrivateKey,
        coordinator_key: str,
        insecure_http: bool = False,
        clock: Callable[[], float] = time.time,
        deadlines: Deadlines | None = None,
    ) -> None:
        """`coordinator_key` is the public key (hex) that the invite pins."""
        self._base = URL(url.rstrip("/"))
        self._key = key
        self._coordinator_key = coordinator_key
        self._insecure_http = insecure_http
        self._clock = clock
        self._deadlines = deadlines or Deadlines()
        self._worker = worker_id(public_hex(key))
        self._session: aiohttp.ClientSession | None = None
        self._trust: Trust | None = None
        self._offset_s = 0.0

    @property
    def worker(self) -> str:
        """This worker's id, derived from its key."""
        return self._worker

    @property
    def offset_s(self) -> float:
        """The coordinator's clock minus this machine's."""
        return self._offset_s

    @property
    def trust(self) -> Trust | None:
        """How the coordinator proved itself; None before `connect`."""
        return self._trust

    def server_now(self) -> float:
        """The coordinator's time, as far as known."""
        return self._clock() + self._offset_s

    async def connect(self) -> Trust:
        """Find out whom we talk to. Raises TrustError, or CallError when nobody answers."""
        session = self._http()
        started = self._clock()
        trust = await establish(session, self._base, self._coordinator_key, insecure_http=self._insecure_http)
        self._learn_time(trust.server_time, started)
        self._trust = trust
        return trust

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()

    async def join(self, request: wire.JoinRequest) -> wire.Welcome:
        return await self._post("join", request, wire.Welcome, epoch=0, limit_s=self._deadlines.join)

    async def heartbeat(self, beat: wire.Heartbeat) -> wire.HeartbeatReply:
        started = self._clock()
        reply = await self._post(
            "heartbeat", beat, wire.HeartbeatReply, epoch=beat.session_epoch, limit_s=self._deadlines.heartbeat
        )
        self._learn_time(reply.server_time, started)
        return reply

    async def lease(self, request: wire.LeaseRequest) -> wire.LeaseReply:
        limit_s = request.wait_s + self._deadlines.lease
        return await self._post("lease", request, wire.LeaseReply, epoch=request.session_epoch, limit_s=limit_s)

    async def confirm(self, confirm: wire.Confirm) -> wire.ConfirmReply:
        return await self._post("confirm", confirm, wire.ConfirmReply, epoch=confirm.session_epoch, limit_s=self._deadlines.confirm)

    async def leave(self, leave: wire.Leave) -> None:
        await self._call("POST", f"{_PREFIX}/leave", _json(leave), epoch=leave.session_epoch, limit_s=self._deadlines.leave)

    async def account(self, epoch: int) -> wire.Account:
        answer = await self._call("POST", f"{_PREFIX}/account", b"{}", epoch=epoch, limit_s=self._deadlines.account)
        return _parse(wire.Account, answer.body)

    async def submit(self, frame: bytes, *, epoch: int) -> wire.SubmitReply:
        """`frame` is made by coordinator.wire.frames of a SubmitHead and its arrays."""
        answer = await self._call(
            "POST", f"{_PREFIX}/submit", frame, epoch=epoch, limit_s=self._deadlines.submit, content_type=FRAME_TYPE
        )
        return _parse(wire.SubmitReply, answer.body)

    async def manifest(
        self, job_id: str, version: int, digest: str, *, epoch: int, held: Sequence[str] = (), doubted: Sequence[str] = ()
    ) -> wire.ManifestReply:
        """The manifest, and a path to it from the `held` digests that avoids what is `doubted`."""
        path = f"{_PREFIX}/jobs/{quote(job_id, safe='')}/manifests/{version}?digest={digest}"
        path += f"&held={','.join(held)}" if held else ""
        path += f"&doubted={','.join(doubted)}" if doubted else ""
        answer = await self._call("GET", path, b"", epoch=epoch, limit_s=self._deadlines.manifest)
        return _parse(wire.ManifestReply, answer.body)

    async def batches(self, job_id: str, transfer: str, *, since: int, epoch: int) -> wire.BatchesReply:
        """Batches of a forthcoming version's pieces, from number `since` on."""
        path = f"{_PREFIX}/jobs/{quote(job_id, safe='')}/transfers/{transfer}?since={since}"
        answer = await self._call("GET", path, b"", epoch=epoch, limit_s=self._deadlines.manifest)
        return _parse(wire.BatchesReply, answer.body)

    async def control(self, path: str, body: bytes, *, epoch: int) -> bytes:
        """The control plane by way of HTTPS: `path` is one of `p2p.adapters.control.https.PATHS`."""
        answer = await self._call("POST", f"{_PREFIX}/{path}", body, epoch=epoch, limit_s=self._deadlines.manifest)
        return answer.body

    async def piece(
        self, job_id: str, digest: str, size: int, *, epoch: int, pace: Pace | None = None, slack_s: float = 0.0
    ) -> bytes:
        """A piece's bytes; the caller checks them against the digest, which is what makes them true.

        `pace` is waited for after each part, with its length; `slack_s` is added to the deadline for it.
        """
        path = f"{_PREFIX}/pieces/{digest}?job={quote(job_id, safe='')}"
        limit_s = self._deadlines.piece + slack_s
        answer = await self._call(
            "GET", path, b"", epoch=epoch, limit_s=limit_s, most_bytes=size, signed=False, pace=pace or _at_once
        )
        return answer.body

    async def _post(self, route: str, message: wire.Message, reply: type[Reply], *, epoch: int, limit_s: float) -> Reply:
        answer = await self._call("POST", f"{_PREFIX}/{route}", _json(message), epoch=epoch, limit_s=limit_s)
        return _parse(reply, answer.body)

    async def _call(  # noqa: PLR0913 (each is part of one request)
        self,
        method: str,
        path: str,
        body: bytes,
        *,
        epoch: int,
        limit_s: float,
        content_type: str = "application/json",
        most_bytes: int = MOST_JSON_BYTES,
        signed: bool = True,
        pace: Pace = _at_once,
    ) -> Answer:
        """One call; repeated once when only our clock was wrong, or when an idle connection turned out to be closed."""
        request = _Request(method, path, body, epoch, limit_s, content_type, most_bytes, signed, pace)
        try:
            return await self._attempt(request)
        except _ClockSkew as skew:
            self._offset_s = skew.server_time - self._clock()
        except CallError as error:
            if error.code != "disconnected":
                raise
        try:
            return await self._attempt(request)
        except _ClockSkew as skew:
            raise CallError(
                Outcome.TRY_AGAIN,
                "clock_skew",
                f"the coordinator refuses this clock even with its own time {skew.server_time:.0f}: synchronise this machine's clock",
            ) from None

    async def _attempt(self, request: _Request) -> Answer:
        if self._trust is None:
            await self.connect()
        nonce = secrets.token_hex(16)
        started = self._clock()
        answer = await self._exchange(request, self._headers(request, nonce))
        is_ours = verify(self._coordinator_key, answer.headers.get(REPLY_HEADER.lower(), ""), reply_message(nonce, answer.body))
        if answer.status < 400:
            if request.signed and not is_ours:
                raise _unsigned(request, answer.status)
            return answer
        refusal = read_refusal(answer.status, answer.headers, answer.body)
        if not is_ours:
            raise _unsigned(request, answer.status, refusal)
        if refusal.server_time is not None:
            self._learn_time(refusal.server_time, started)
        if refusal.code in CLOCK_CODES and refusal.server_time is not None:
            raise _ClockSkew(refusal.server_time)
        raise CallError(refusal.outcome, refusal.code, refusal.words(), retry_after_s=refusal.retry_after_s)

    async def _exchange(self, request: _Request, headers: dict[str, str]) -> Answer:
        assert self._trust is not None
        url = URL(f"{self._base}{request.path}", encoded=True)
        try:
            async with asyncio.timeout(request.limit_s):
                async with self._http().request(
                    request.method,
                    url,
                    data=request.body or None,
                    headers=headers,
                    ssl=self._trust.ssl,
                    allow_redirects=False,
                ) as response:
                    body = await _read(response, request)
                    return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, body)
        except TLS_FAULTS as error:
            self._trust = None  # a renewed certificate: prove it again at the next call
            raise CallError(Outcome.TRY_AGAIN, "tls", f"the coordinator's certificate changed: {error}") from error
        except TimeoutError as error:
            raise CallError(Outcome.TRY_AGAIN, "timeout", f"no answer from {self._base} within {request.limit_s:.0f} s") from error
        except aiohttp.ServerDisconnectedError as error:
            raise CallError(Outcome.TRY_AGAIN, "disconnected", f"{self._base} closed the connection") from error
        except FAILURES as error:
            raise CallError(Outcome.TRY_AGAIN, "unreachable", f"{self._base} cannot be reached: {in_words(error)}") from error

    def _headers(self, request: _Request, nonce: str) -> dict[str, str]:
        fields = SignedFields(
            method=request.method,
            path=URL(f"{self._base}{request.path}", encoded=True).raw_path_qs,
            coordinator=key_id(self._coordinator_key),
            worker=self._worker,
            epoch=request.epoch,
            time=f"{self.server_now():.3f}",
            nonce=nonce,
        )
        headers = sign_request(self._key, fields, request.body)
        if request.body:
            headers["Content-Type"] = request.content_type
        return headers

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=16),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                trust_env=False,
            )
        return self._session

    def _learn_time(self, server_time: float, started: float) -> None:
        """Take the server's time for that of the middle of the round trip, unless the trip was too long to tell."""
        now = self._clock()
        if now - started <= _STEADY_ROUND_TRIP_S:
            self._offset_s = server_time - (started + now) / 2


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    body: bytes
    epoch: int
    limit_s: float
    content_type: str
    most_bytes: int
    signed: bool
    pace: Pace


class _ClockSkew(Exception):
    """The coordinator refused our time and told its own."""

    def __init__(self, server_time: float) -> None:
        super().__init__("clock_skew")
        self.server_time = server_time


def _unsigned(request: _Request, status: int, refusal: Refusal | None = None) -> CallError:
    """Something between us and the coordinator answered."""
    words = f" ({refusal.words()})" if refusal is not None else ""
    message = f"{request.path.partition('?')[0]} was answered with status {status} without the coordinator's signature{words}"
    return CallError(Outcome.TRY_AGAIN, "unsigned_reply", message, retry_after_s=refusal.retry_after_s if refusal else 0.0)


async def _read(response: aiohttp.ClientResponse, request: _Request) -> bytes:
    parts: list[bytes] = []
    size = 0
    limit = max(request.most_bytes, 65_536) if response.status >= 400 else request.most_bytes
    async for part in response.content.iter_chunked(1 << 18):
        size += len(part)
        if size > limit:
            raise CallError(Outcome.TRY_AGAIN, "reply_too_large", f"the reply exceeds {limit} bytes")
        parts.append(part)
        await request.pace(len(part))
    return b"".join(parts)


def _json(message: wire.Message) -> bytes:
    return message.model_dump_json().encode()


def _parse(kind: type[Reply], body: bytes) -> Reply:
    try:
        return kind.model_validate_json(body)
    except (ValidationError, json.JSONDecodeError) as error:
        message = f"the reply is not a {kind.__name__}: {str(error)[:300]}; update the worker to the coordinator's version"
        raise CallError(Outcome.TRY_AGAIN, "bad_reply", message) from error
