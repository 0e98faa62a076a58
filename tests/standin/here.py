"""Two ways to the stand-in: in this process on its virtual clock, and over HTTP on loopback."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from email.utils import formatdate
from random import Random
from typing import Any

import aiohttp
from aiohttp import web

from pricing.feeds.contract import Answer, Call
from tests.standin.desk import KEY, Reply, Request, StandIn
from tests.standin.faults import Faults
from tests.standin.runpod import RunPodStandIn
from tests.standin.vast import VastStandIn
from tests.standin.world import Fates, Machine, World

CALL_S = 30.0  # what a call that is never answered costs in virtual time
CARDS = ("RTX 4090", "RTX 3090", "RTX 5090", "L40S", "H100 SXM", "A100 SXM4")


def machines(rng: Random, count: int = 6) -> list[Machine]:
    """Different cards and prices, 0.15 to 2.5 USD an hour."""
    return [
        Machine(
            5000 + i,
            70 + i,
            CARDS[i % len(CARDS)],
            24_000 + 1000 * i,
            rng.randrange(150_000, 2_500_000),
            count=1 + rng.randrange(3),
        )
        for i in range(count)
    ]


def standin(kind: str, rng: Random, *, fates: Fates | None = None, **faults: Any) -> StandIn:
    """`kind`: vast or runpod."""
    stock = machines(rng)
    if kind == "vast":
        for machine in stock:
            machine.count = 1  # each offer there is one machine
    world = World(rng, stock, fates=fates or Fates())
    language = VastStandIn(world) if kind == "vast" else RunPodStandIn(world)
    return StandIn(world, Faults(Random(rng.random()), **faults), language)


def sender(there: StandIn) -> Any:
    """A `Send` into the stand-in; each call takes some virtual time."""

    async def send(call: Call) -> Answer:
        world = there.world
        headers = {"authorization": f"Bearer {KEY}"}
        reply = there.answer(Request(call.method, call.path, dict(call.query), headers, _content(call)))
        world.advance(world.rng.uniform(0.05, 1.0))
        if reply.is_lost:
            world.advance(CALL_S)
            raise TimeoutError
        if reply.is_cut:
            raise aiohttp.ClientPayloadError("Response payload is not completed")
        named = {name.lower(): value for name, value in reply.headers.items()}
        return Answer(reply.status, named, reply.body, float(int(world.now)))

    return send


def _content(call: Call) -> bytes:
    return b"" if call.body is None else json.dumps(call.body).encode()


@asynccontextmanager
async def serving(there: StandIn, *, lost_s: float) -> AsyncIterator[str]:
    """The stand-in on 127.0.0.1; a lost reply is held back for `lost_s`. Its Date is the virtual clock's."""

    async def handle(request: web.Request) -> web.StreamResponse:
        headers = {name.lower(): value for name, value in request.headers.items()}
        asked = Request(request.method, request.path, dict(request.query), headers, await request.read())
        reply = there.answer(asked)
        there.world.advance(there.world.rng.uniform(0.05, 1.0))
        if reply.is_lost:
            there.world.advance(CALL_S)
            await asyncio.sleep(lost_s)
        return await _written(request, reply, there.world.now)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def _written(request: web.Request, reply: Reply, now: float) -> web.StreamResponse:
    body = reply.body
    headers = {"Date": formatdate(now, usegmt=True), **reply.headers}
    status = reply.status or 504
    if not reply.is_cut:
        return web.Response(status=status, body=body or None, headers=headers)
    cut = web.StreamResponse(status=status, headers={**headers, "Content-Length": str(len(body) + 50)})
    await cut.prepare(request)
    await cut.write(body[: len(body) // 2])
    if request.transport is not None:
        request.transport.close()
    return cut
