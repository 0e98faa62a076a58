"""Around every request: errors become problem documents, and every response carries the security headers."""

from __future__ import annotations

import structlog
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from coordinator.api.problems import from_foreign, from_http, internal_error, problem_of, response_of
from coordinator.service.operator_errors import RequestRefused
from coordinator.service.ports import Clock

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_log = structlog.get_logger(__name__)


def problems(clock: Clock) -> Middleware:
    """The middleware that lets no error leave as anything but a problem document."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPException as error:
            if error.status < 400 or error.content_type == "application/problem+json":
                raise
            return from_http(error, request, now=clock.now())
        except RequestRefused as refused:
            return response_of(problem_of(refused, now=clock.now()))
        except ConnectionResetError:
            raise  # the client went away: there is nobody to answer
        except Exception as error:
            refused_now = from_foreign(error)
            if refused_now is not None:
                return response_of(problem_of(refused_now, now=clock.now()))
            _log.exception("request_failed", method=request.method, path=request.path)
            return response_of(internal_error(now=clock.now()))

    return middleware


async def add_security_headers(_: web.Request, response: web.StreamResponse) -> None:
    """An `on_response_prepare` signal; a response that set one of the headers keeps its own."""
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)
