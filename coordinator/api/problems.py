"""Every error as an RFC 9457 problem document with a stable `code`; foreign errors are translated here, and only here."""

from __future__ import annotations

import errno
from http import HTTPStatus

from aiohttp import web
from pydantic import BaseModel, ValidationError

from coordinator.service.operator_errors import Kind, RequestRefused, unavailable
from coordinator.wire.keys import about_unknown
from coordinator.wire.messages import Problem

MEDIA_TYPE = "application/problem+json"
STATUS = {
    Kind.MALFORMED: 400,
    Kind.UNAUTHENTICATED: 401,
    Kind.FORBIDDEN: 403,
    Kind.UNKNOWN: 404,
    Kind.SLOW: 408,
    Kind.CONFLICT: 409,
    Kind.TOO_LARGE: 413,
    Kind.UNSUPPORTED: 415,
    Kind.INVALID: 422,
    Kind.UNAVAILABLE: 503,
}
MOST_ERRORS_LISTED = 20
_FIXES = {
    404: "see /openapi.json for the routes",
    405: "use a method that the Allow header names",
    413: "send a smaller body",
    417: "send `Expect: 100-continue`, or no Expect header",
}


def problem_of(refused: RequestRefused, *, now: float) -> Problem:
    """The document of a refusal."""
    status = STATUS[refused.kind]
    return Problem(
        title=HTTPStatus(status).phrase,
        status=status,
        code=refused.code,
        detail=refused.detail,
        field=refused.field,
        fix=refused.fix,
        server_time=now,
        retry_after_s=refused.retry_after_s,
    )


def response_of(problem: Problem) -> web.Response:
    """The response that carries a document, with the headers that its status asks for."""
    response = web.Response(status=problem.status, text=problem.model_dump_json(), content_type=MEDIA_TYPE, charset=None)
    if problem.retry_after_s is not None:
        response.headers["Retry-After"] = str(max(1, round(problem.retry_after_s)))
    if problem.status == HTTPStatus.REQUEST_TIMEOUT:
        response.force_close()  # the rest of a body that trickles is not waited for; others are drained, so that the answer arrives
    if problem.status == HTTPStatus.UNAUTHORIZED:
        response.headers["WWW-Authenticate"] = 'Bearer realm="echo2"'
    return response


def from_http(error: web.HTTPException, request: web.Request, *, now: float) -> web.Response:
    """What aiohttp itself refuses: unknown paths, wrong methods, bodies it will not read."""
    phrase = HTTPStatus(error.status).phrase
    allowed = f"; it takes {error.headers['Allow']}" if "Allow" in error.headers else ""
    problem = Problem(
        title=phrase,
        status=error.status,
        code=phrase.lower().replace(" ", "_").replace("-", "_"),
        detail=f"{request.method} {request.path[:200]!r}: {phrase.lower()}{allowed}",
        field="method" if error.status == HTTPStatus.METHOD_NOT_ALLOWED else "path",
        fix=_FIXES.get(error.status, "see /openapi.json for what this route takes"),
        server_time=now,
    )
    response = response_of(problem)
    for name in ("Allow", "Location"):
        if name in error.headers:
            response.headers[name] = error.headers[name]
    return response


def from_validation(error: ValidationError, *, kind: type[BaseModel], place: str) -> RequestRefused:
    """All errors of a body or query in words; `field` is the first one's path."""
    errors = error.errors(include_url=False, include_context=False)
    if errors[0]["type"] == "json_invalid":
        return RequestRefused(
            Kind.MALFORMED, "json_syntax", f"the {place} is not JSON: {errors[0]['msg']}", field=place, fix="send one JSON document"
        )
    lines = [f"{_path(item['loc'], place)}: {item['msg']} (got {_shown(item['input'])})" for item in errors]
    more = f"; and {len(lines) - MOST_ERRORS_LISTED} more" if len(lines) > MOST_ERRORS_LISTED else ""
    return RequestRefused(
        Kind.INVALID,
        f"invalid_{place}",
        "; ".join(lines[:MOST_ERRORS_LISTED]) + more,
        field=_path(errors[0]["loc"], place),
        fix=_fix(errors[0]["type"], errors[0]["loc"], kind, place),
    )


def _path(loc: tuple[int | str, ...], place: str) -> str:
    return ".".join(str(part)[:100] for part in loc) or place


def _shown(value: object) -> str:
    text = ascii(value)
    return text if len(text) <= 100 else text[:97] + "..."


def _fix(error: str, loc: tuple[int | str, ...], kind: type[BaseModel], place: str) -> str:
    if error == "extra_forbidden":
        return f"remove it, or correct its name ({about_unknown(kind, loc)}); /openapi.json has the {place}'s schema"
    if error == "missing":
        return f"add it; /openapi.json has the {place}'s schema"
    return f"correct the value; /openapi.json has the {place}'s schema"


def from_foreign(error: Exception) -> RequestRefused | None:
    """What the store or the disk could not do now, as a refusal with a delay; None for a fault of our own."""
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        fix = "tell the operator to free disk space, then repeat the request"
        return unavailable("disk_full", "the coordinator's disk is full; nothing was written", fix=fix, retry_after_s=60.0)
    if isinstance(error, TimeoutError):
        fix = "repeat the request after the delay"
        return unavailable("overloaded", "the coordinator did not get to this request in time", fix=fix, retry_after_s=2.0)
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionResetError | BrokenPipeError):
        fix = "repeat the request after the delay"
        return unavailable("store_unreachable", "the coordinator's store does not answer", fix=fix, retry_after_s=5.0)
    return None


def internal_error(*, now: float) -> Problem:
    """Our own fault; the log has the story."""
    return Problem(
        title="Internal Server Error",
        status=500,
        code="internal_error",
        detail="the coordinator failed on this request; its log has the details under this time",
        fix="tell the operator",
        server_time=now,
    )
