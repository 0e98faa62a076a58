"""The HTTP side of one worker request: limits before reading, the body as sent, signed JSON replies."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

from aiohttp import web
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.service.worker_limits import ByteBudget, ProtocolLimits
from coordinator.service.worker_refusals import ProtocolRefusal, busy
from coordinator.wire.messages import Message, Problem
from coordinator.wire.signing import REPLY_HEADER, reply_message

JSON_TYPE = "application/json"
PROBLEM_TYPE = "application/problem+json"
FRAME_TYPE = "application/vnd.echo2.frame"
_BODY_LEFT = (HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNSUPPORTED_MEDIA_TYPE)


def check_head(request: web.Request, *, limit: int, content_type: str) -> None:
    """Check what the request's headers promise. Raises ProtocolRefusal before a byte of the body is read."""
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        words = f"Content-Encoding is {encoding[:40]!r}; bodies are taken as they are"
        raise ProtocolRefusal(415, "content_encoding", words, field="Content-Encoding", fix="send the body without it")
    length = request.content_length
    if length is not None and length > limit:
        words = f"the body has {length} bytes, this route takes {limit}"
        raise ProtocolRefusal(413, "body_too_large", words, field="body", fix="split what you send")
    if request.method == "POST" and request.content_type != content_type:
        words = f"Content-Type is {request.content_type[:60]!r}"
        raise ProtocolRefusal(415, "content_type", words, field="Content-Type", fix=f"send {content_type}")


class Hold:
    """Bytes of one body that count against the budget: those that arrived, not those that a stranger announced."""

    def __init__(self, budget: ByteBudget) -> None:
        self._budget = budget
        self.amount = 0

    def add(self, amount: int) -> None:
        """Raises ProtocolRefusal when all bodies together would hold more than the budget."""
        if not self._budget.reserve(amount):
            raise busy("busy", "too many request bodies are in flight", retry_after_s=1.0)
        self.amount += amount


@contextmanager
def held(budget: ByteBudget) -> Iterator[Hold]:
    """Count a body against the budget while it is read and worked on."""
    hold = Hold(budget)
    try:
        yield hold
    finally:
        budget.release(hold.amount)


async def read_body(request: web.Request, hold: Hold, *, limit: int, limits: ProtocolLimits) -> bytes:
    """The body as sent, at most `limit` bytes. Raises ProtocolRefusal when it is larger, too slow, or one too many."""
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(limits.body_total_s):
            while True:
                async with asyncio.timeout(limits.body_timeout_s):
                    part = await request.content.readany()
                if not part:
                    return b"".join(parts)
                size += len(part)
                if size > limit:
                    words = f"the body exceeds the {limit} bytes that this route takes"
                    raise ProtocolRefusal(413, "body_too_large", words, field="body", fix="split what you send")
                hold.add(len(part))
                parts.append(part)
    except TimeoutError as error:
        words = f"the body came too slowly: {size} bytes so far"
        fix = f"send it within {limits.body_total_s:.0f} s without a pause of {limits.body_timeout_s:.0f} s"
        raise ProtocolRefusal(408, "body_too_slow", words, field="body", fix=fix) from error


def signed(response_body: bytes, *, status: int, content_type: str, key: Ed25519PrivateKey, nonce: str) -> web.Response:
    """A JSON reply, signed for this request; unsigned when the request carried no readable nonce."""
    response = web.Response(status=status, body=response_body, content_type=content_type)
    if nonce:
        response.headers[REPLY_HEADER] = key.sign(reply_message(nonce, response_body)).hex()
    return response


def answer(message: Message, *, key: Ed25519PrivateKey, nonce: str) -> web.Response:
    """The reply that carries a message."""
    body = message.model_dump_json().encode()
    return signed(body, status=200, content_type=JSON_TYPE, key=key, nonce=nonce)


def refusal(problem: ProtocolRefusal, *, key: Ed25519PrivateKey, nonce: str, now: float) -> web.Response:
    """The reply to a refused request: an RFC 9457 problem document with the server's time."""
    document = Problem(
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        code=problem.code,
        detail=problem.detail,
        field=problem.field,
        fix=problem.fix,
        server_time=now,
        retry_after_s=problem.retry_after_s,
    )
    body = document.model_dump_json().encode()
    response = signed(body, status=problem.status, content_type=PROBLEM_TYPE, key=key, nonce=nonce)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    if problem.status in _BODY_LEFT:
        response.force_close()  # what is left of the body is not read
    return response


def plain(document: dict[str, object]) -> web.Response:
    """An unsigned JSON reply."""
    return web.Response(body=json.dumps(document).encode(), content_type=JSON_TYPE)
