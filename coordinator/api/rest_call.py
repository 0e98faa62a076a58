"""Serves one route: authorise, decode, run the service command, encode. Handlers see only decoded values."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog
from aiohttp import web
from blake3 import blake3
from pydantic import BaseModel

from coordinator.api.problems import MEDIA_TYPE, problem_of, response_of
from coordinator.api.rest_body import blocks, check_headers, decode_json, decode_query, read_json_bytes
from coordinator.api.rest_table import Call, RestLimits, Route, Write
from coordinator.service import files, idempotency
from coordinator.service.deps import Deps
from coordinator.service.files import Received
from coordinator.service.idempotency import Slip, Stored
from coordinator.service.operator_done import Done
from coordinator.service.operator_errors import Kind, RequestRefused, forbidden, invalid, unavailable, unknown
from coordinator.service.ports import Tx
from coordinator.service.tokens import Caller, authenticate, no_token
from coordinator.wire.rest import FilesQuery

ID_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$"
VERSION_PATTERN = r"^[0-9]{1,9}$"
_ID = re.compile(ID_PATTERN)
_VERSION = re.compile(VERSION_PATTERN)
_KEY = re.compile(r"[\x21-\x7e]{1,200}")
_log = structlog.get_logger(__name__)


@dataclass(slots=True)
class Uploads:
    """How many uploads run now; the one bound that requests share."""

    running: int = 0


def server(
    route: Route, deps: Deps, limits: RestLimits, uploads: Uploads
) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
    """The aiohttp handler of a route."""

    async def serve(request: web.Request) -> web.StreamResponse:
        caller = None if route.role == "public" else await authorised(route, deps, request)
        path = checked_path(request)
        query = decode_query(request, route.query)
        if route.body_kind == "stream":
            assert caller is not None
            assert isinstance(query, FilesQuery)
            return await _serve_upload(Call(deps, limits, request, path, caller, query, None), route, uploads)
        data = b"" if route.body_kind == "none" else await read_json_bytes(request, limits)
        body = _decoded(route, data, limits)
        call = Call(deps, limits, request, path, caller, query, body)
        return await _answered(route, call, body_hash=blake3(data).hexdigest())

    return serve


async def authorised(route: Route, deps: Deps, request: web.Request) -> Caller:
    """The caller, if the token's role includes the route's. Raises RequestRefused."""
    caller = await signed_in(deps, request)
    if not caller.has_rank(route.role):
        raise forbidden(
            "role_too_low",
            f"token {caller.token.name!r} is {caller.token.role}; {route.method} {route.path} needs {route.role}",
            field="Authorization",
            fix=f"use a token with the role {route.role}",
        )
    return caller


async def signed_in(deps: Deps, request: web.Request) -> Caller:
    """The caller behind the request's bearer token. Raises RequestRefused."""
    scheme, _, bearer = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not bearer.strip():
        raise no_token()
    return await deps.store.read(lambda reader: authenticate(reader, bearer.strip()))


def checked_path(request: web.Request) -> dict[str, str]:
    """The path's parts; one that cannot be an id names nothing that exists."""
    parts = dict(request.match_info)
    for name, value in parts.items():
        pattern = _VERSION if name == "version" else _ID
        if pattern.fullmatch(value) is None:
            raise unknown(name.removesuffix("_id"), value[:200])
    return parts


def _decoded(route: Route, data: bytes, limits: RestLimits) -> BaseModel | None:
    if route.body is None:
        return None
    if route.body_kind == "optional_json" and not data.strip():
        return route.body()
    return decode_json(data, route.body, depth=limits.json_depth)


async def _serve_upload(call: Call, route: Route, uploads: Uploads) -> web.StreamResponse:
    """Receive the file first: its digest is the body's hash."""
    query = call.query_as(FilesQuery)
    check_headers(call.request, media="application/octet-stream")
    files.check_upload(query)
    _check_code_right(call.caller, query)
    length = call.request.content_length or 0
    if length > call.deps.settings.upload_limit_bytes:
        raise files.too_large(call.deps.settings.upload_limit_bytes)
    await files.check_space(call.deps, length)
    if uploads.running >= call.limits.uploads_at_once:
        words = f"{uploads.running} uploads are running, as many as may at once"
        raise unavailable("too_many_uploads", words, fix="repeat the upload after the delay", retry_after_s=5.0)
    uploads.running += 1
    try:
        received = await files.receive(call.deps, blocks(call.request, call.limits))
        try:
            with_body = Call(call.deps, call.limits, call.request, call.path, call.caller, query, received)
            return await _answered(route, with_body, body_hash=received.digest)
        finally:
            files.discard(received.path)
    finally:
        uploads.running -= 1


def _check_code_right(caller: Caller, query: FilesQuery) -> None:
    if query.kind == "code" and not caller.may_bring_code:
        raise forbidden(
            "code_right_needed",
            f"kind is 'code', and token {caller.token.name!r} may not bring Python",
            field="kind",
            fix="ask an admin for a token with the right `code`",
        )


def received_file(call: Call) -> Received:
    """The upload of a stream route."""
    assert isinstance(call.body, Received)
    return call.body


async def _answered(route: Route, call: Call, *, body_hash: str) -> web.StreamResponse:
    slip = _slip(route, call, body_hash) if route.is_idempotent_post else None
    if slip is None:
        return await _performed(route, call, None)
    stored = await idempotency.begin(call.deps, slip, wait_s=call.limits.same_key_wait_s)
    if stored is not None:
        return _replayed(stored)
    try:
        response = await _performed(route, call, slip)
    except RequestRefused as refused:
        return await _kept_refusal(call, slip, refused)
    except BaseException:
        await idempotency.abandon(call.deps, slip)
        raise
    idempotency.announce(call.deps, slip)
    return response


def _slip(route: Route, call: Call, body_hash: str) -> Slip | None:
    """What identifies this attempt; None without an Idempotency-Key. Raises RequestRefused for a key that is none."""
    key = call.request.headers.get("Idempotency-Key")
    if key is None:
        return None
    if _KEY.fullmatch(key) is None:
        raise invalid(
            "idempotency_key_malformed",
            "Idempotency-Key must be 1 to 200 visible ASCII characters",
            field="Idempotency-Key",
            fix="use a UUID",
        )
    caller = call.caller
    return Slip(caller.token.id, key, f"{route.method} {call.request.path_qs}"[:2000], body_hash, caller.secret)


async def _performed(route: Route, call: Call, slip: Slip | None) -> web.StreamResponse:
    outcome = await route.handler(call)
    if isinstance(outcome, web.StreamResponse):
        return outcome
    if isinstance(outcome, BaseModel):
        return _json(outcome.model_dump_json(), route.status)
    done, text = await call.deps.store.write(lambda tx: _run(tx, outcome, route, call, slip))
    for topic in done.topics:
        call.deps.wake.notify(topic)
    return _json(text, route.status)


async def _run(tx: Tx, write: Write, route: Route, call: Call, slip: Slip | None) -> tuple[Done, str]:
    """The command and its idempotency record: both or neither."""
    done = await write.action(tx)
    text = done.answer.model_dump_json()
    if slip is not None:
        await idempotency.finish(tx, call.deps, slip, Stored(route.status, text))
    return done, text


async def _kept_refusal(call: Call, slip: Slip, refused: RequestRefused) -> web.Response:
    """A refusal is an answer too, and is kept, unless only time or a new attempt can change it."""
    problem = problem_of(refused, now=call.now)
    if refused.kind in (Kind.UNAVAILABLE, Kind.SLOW):
        await idempotency.abandon(call.deps, slip)
    else:
        stored = Stored(problem.status, problem.model_dump_json())
        await call.deps.store.write(lambda tx: idempotency.finish(tx, call.deps, slip, stored))
        idempotency.announce(call.deps, slip)
    return response_of(problem)


def _replayed(stored: Stored) -> web.Response:
    media = MEDIA_TYPE if stored.status >= 400 else "application/json"
    response = web.Response(status=stored.status, text=stored.text, content_type=media)
    response.headers["Idempotency-Replayed"] = "true"
    return response


def _json(text: str, status: int) -> web.Response:
    return web.Response(status=status, text=text, content_type="application/json")
