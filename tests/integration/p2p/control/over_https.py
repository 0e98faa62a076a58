"""A coordinator's desk behind real HTTP on loopback, which can be cut off."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

from p2p.adapters.control.desk import Desk
from p2p.adapters.control.https import Post
from p2p.domain.control_board import Board
from p2p.errors import ControlRefused

AUTHOR = "Author"  # the real route takes the key from the request's signature


class Coordinator:
    """The server's side, and `post` for each worker."""

    def __init__(self, desk: Desk, url: str, session: aiohttp.ClientSession) -> None:
        self.desk = desk
        self.calls: list[str] = []
        self.is_cut = False
        self._url = url
        self._session = session

    def post_as(self, key: str) -> Post:
        async def post(path: str, body: bytes) -> bytes:
            self.calls.append(path)
            if self.is_cut:
                raise ConnectionRefusedError("the network is down")
            async with self._session.post(f"{self._url}/{path}", data=body, headers={AUTHOR: key}) as reply:
                content = await reply.read()
            if reply.status == 403:
                raise ControlRefused(content.decode())
            reply.raise_for_status()
            return content

        return post


@asynccontextmanager
async def coordinator() -> AsyncIterator[Coordinator]:
    """A running one; what starts with "no" is not admitted to its board."""
    desk = Desk(Board(), lambda topic, author, payload: not payload.startswith(b"no"))

    async def route(request: web.Request) -> web.Response:
        try:
            body = await desk.post(request.headers[AUTHOR], request.path.lstrip("/"), await request.read())
        except ControlRefused as error:
            return web.Response(status=403, text=str(error))
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/{path:.*}", route)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    async with aiohttp.ClientSession() as session:
        yield Coordinator(desk, f"http://{host}:{port}", session)
    await runner.cleanup()
