"""The REST API as a whole: the table of its routes, and how they are added to an application."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from aiohttp import HttpVersion11, web

from coordinator.api import rest_jobs, rest_ledger, rest_market, rest_plan, rest_pool, rest_probes
from coordinator.api.middleware import add_security_headers, problems
from coordinator.api.openapi import document
from coordinator.api.problems import from_http
from coordinator.api.rest_call import Uploads, server
from coordinator.api.rest_events import STREAMS, Streams
from coordinator.api.rest_probes import OPENAPI
from coordinator.api.rest_table import RestLimits, Route
from coordinator.service.deps import Deps
from coordinator.service.files import remove_leftovers

# For web.AppRunner: no body is decompressed before a limit was checked, and idle connections do not stay for an hour.
RUNNER_OPTIONS: Mapping[str, Any] = MappingProxyType({"auto_decompress": False, "keepalive_timeout": 75.0})
ROUTES: tuple[Route, ...] = (
    *rest_jobs.ROUTES,
    *rest_pool.ROUTES,
    *rest_market.ROUTES,
    *rest_ledger.ROUTES,
    *rest_plan.ROUTES,
    *rest_probes.ROUTES,
)


def add_rest_routes(app: web.Application, deps: Deps, *, limits: RestLimits | None = None) -> None:
    """Add every route of the table, the error middleware (outermost), the security headers, and the end of streams."""
    limits = limits or RestLimits()
    app.middlewares.insert(0, problems(deps.clock))
    app.on_response_prepare.append(add_security_headers)
    streams = Streams()
    app[STREAMS] = streams
    app.on_shutdown.append(streams.end)
    app.on_startup.append(lambda _: _clean(deps))
    app[OPENAPI] = document(ROUTES, version=version("echo2"))
    uploads = Uploads()

    async def expect(request: web.Request) -> web.StreamResponse | None:
        return await _expectation(request, deps)

    for route in ROUTES:
        app.router.add_route(route.method, route.path, server(route, deps, limits, uploads), expect_handler=expect)


async def _clean(deps: Deps) -> None:
    await asyncio.to_thread(remove_leftovers, deps.settings.data_dir)


async def _expectation(request: web.Request, deps: Deps) -> web.StreamResponse | None:
    """`Expect: 100-continue` is met; anything else is refused in words (aiohttp asks before any middleware runs)."""
    if request.version < HttpVersion11:
        return None
    if request.headers.get("Expect", "").lower() != "100-continue":
        return from_http(web.HTTPExpectationFailed(), request, now=deps.clock.now())
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0
    return None
