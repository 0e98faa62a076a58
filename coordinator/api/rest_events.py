"""Server-sent events of a job: rows in order, then what follows, for as long as the client listens.

Level-triggered: after each wake-up the rows are read again, so that nothing is lost between two pages or across a restart.
A stream is bounded: a page of rows in memory, a limit on streams, and a client that takes nothing for a while is let go.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from aiohttp import web

from coordinator.api.rest_table import Call
from coordinator.domain.model import Event
from coordinator.service import operator_views
from coordinator.service.deps import Watch
from coordinator.service.events import after, next_events
from coordinator.service.operator_errors import invalid, unavailable

HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "X-Accel-Buffering": "no"}
HEARTBEAT = b": heartbeat\n\n"


class Streams:
    """The open event streams of a server: counted, and ended when it shuts down."""

    def __init__(self) -> None:
        self.open: set[asyncio.Task[object]] = set()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count the running request as a stream; `end` cancels it."""
        task = asyncio.current_task()
        assert task is not None
        self.open.add(task)
        try:
            yield
        finally:
            self.open.discard(task)

    async def end(self, _: web.Application) -> None:
        """An `on_shutdown` hook: streams would otherwise hold the server until its shutdown timeout."""
        for task in tuple(self.open):
            task.cancel()


STREAMS = web.AppKey("streams", Streams)


async def stream(call: Call) -> web.StreamResponse:
    """GET /jobs/{job_id}/events. 204 tells a reconnecting EventSource that nothing will follow."""
    seq = _last_seen(call.request)
    job_id = call.path["job_id"]
    await call.deps.store.read(lambda reader: operator_views.owned(reader, call.caller, job_id))
    streams = call.request.app[STREAMS]
    if len(streams.open) >= call.limits.streams_at_once:
        words = f"{len(streams.open)} event streams are open, as many as may be"
        raise unavailable("too_many_streams", words, fix="connect again after the delay", retry_after_s=10.0)
    with call.deps.wake.watch(job_id) as watch:
        events, last = await call.deps.store.read(lambda reader: after(reader, job_id, seq))
        if last and not events:
            return web.Response(status=204)
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(call.request)
        with streams.opened():
            await _send_all(call, response, watch, job_id=job_id, seq=seq)
    return response


async def _send_all(call: Call, response: web.StreamResponse, watch: Watch, *, job_id: str, seq: int) -> None:
    """Send until the job has ended and its last event went out, or the client is gone or takes nothing."""
    store, wait_s = call.deps.store, call.limits.heartbeat_s
    while True:
        events, last = await next_events(store, watch, job_id=job_id, seq=seq, wait_s=wait_s)
        try:
            async with asyncio.timeout(call.limits.send_s):
                await response.write(encoded(events) if events else HEARTBEAT)
        except (TimeoutError, ConnectionResetError):
            return
        if last:
            return
        seq = events[-1].seq if events else seq


def encoded(events: Sequence[Event]) -> bytes:
    """The wire form: id, kind, and the data as one line of JSON (which holds no line feed)."""
    lines = [f"id: {e.seq}\nevent: {e.kind}\ndata: {json.dumps({'at': e.at, **e.data})}\n\n" for e in events]
    return "".join(lines).encode()


def _last_seen(request: web.Request) -> int:
    text = request.headers.get("Last-Event-ID", "").strip() or "0"
    if not text.isascii() or not text.isdigit() or len(text) > 18:
        raise invalid(
            "last_event_id_malformed",
            f"Last-Event-ID is {text[:100]!r}; it is a number that an event carried as its id",
            field="Last-Event-ID",
            fix="send the id of the last event you saw, or leave the header out",
        )
    return int(text)
