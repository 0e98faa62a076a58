"""Probes, the OpenAPI document, the dashboard, and Prometheus' page."""

from __future__ import annotations

import asyncio
import ipaddress
import json

from aiohttp import web

from coordinator.api.dashboard import page
from coordinator.api.rest_call import signed_in
from coordinator.api.rest_prometheus import CONTENT_TYPE, exposition
from coordinator.api.rest_table import Call, Route
from coordinator.domain.model import Job
from coordinator.wire.rest import Check, Health, Readiness

OPENAPI = web.AppKey("openapi", dict[str, object])
RETRY_S = 5
_FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


async def health(_: Call) -> Health:
    """GET /healthz."""
    return Health()


async def readiness(call: Call) -> web.Response:
    """GET /readyz: 503 with Retry-After while a check fails."""
    checks = (await _store_check(call), await _disk_check(call))
    ready = all(check.ok for check in checks)
    text = Readiness(ready=ready, checks=checks).model_dump_json()
    headers = {} if ready else {"Retry-After": str(RETRY_S)}
    return web.Response(status=200 if ready else 503, text=text, content_type="application/json", headers=headers)


async def _store_check(call: Call) -> Check:
    try:
        async with asyncio.timeout(call.limits.ready_s):
            jobs = await call.deps.store.read(lambda reader: reader.count(Job))
    except Exception as error:  # whatever it is: not ready, with its name
        return Check(name="store", ok=False, detail=f"reading failed: {type(error).__name__}")
    return Check(name="store", ok=True, detail=f"{jobs} jobs; its schema is this release's (checked when it was opened)")


async def _disk_check(call: Call) -> Check:
    least = call.deps.settings.minimum_free_bytes
    try:
        async with asyncio.timeout(call.limits.ready_s):
            free = await call.deps.blobs.free_bytes()
    except (TimeoutError, OSError) as error:
        return Check(name="disk", ok=False, detail=f"asking for free space failed: {type(error).__name__}")
    return Check(name="disk", ok=free >= least, detail=f"{free} bytes are free, {least} are needed")


async def openapi(call: Call) -> web.Response:
    """GET /openapi.json."""
    return web.Response(text=json.dumps(call.request.app[OPENAPI]), content_type="application/json")


async def dashboard(_: Call) -> web.Response:
    """GET /."""
    document = page()
    response = web.Response(text=document.html, content_type="text/html", charset="utf-8")
    response.headers["Content-Security-Policy"] = document.policy
    return response


async def prometheus(call: Call) -> web.Response:
    """GET /metrics: for anyone on this host, else for whoever has a token."""
    if not is_local(call.request):
        await signed_in(call.deps, call.request)
    deps = call.deps
    text = await deps.store.read(
        lambda reader: exposition(reader, now=call.now, asked=deps.control.asked, lag_s=deps.lag.longest_s)
    )
    return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})


def is_local(request: web.Request) -> bool:
    """Whether the request comes from this host itself; behind a proxy on this host it does not."""
    if any(name in request.headers for name in _FORWARDED) or request.remote is None:
        return False
    try:
        return ipaddress.ip_address(request.remote).is_loopback
    except ValueError:
        return False


ROUTES = (
    Route("GET", "/healthz", "public", "probes", "The process answers", health, Health),
    Route("GET", "/readyz", "public", "probes", "Store and disk can take work", readiness, Readiness),
    Route("GET", "/openapi.json", "public", "probes", "This document", openapi, None),
    Route("GET", "/metrics", "public", "probes", "Prometheus figures", prometheus, None, media="text/plain"),
    Route("GET", "/", "public", "probes", "The dashboard", dashboard, None, media="text/html"),
)
