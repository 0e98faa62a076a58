"""HTTP to a vLLM server on a Unix socket, from a thread that does not wait for it.

Control calls block the caller, each with its own short deadline: after a failed call the server may keep a client waiting for
minutes. Generation requests run in the background, on an event loop in a thread of their own; `take` hands out what came back.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Collection, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

GENERATE = "/inference/v1/generate"
HEALTH = "/health"
PULSE_S = 2.0
_BASE = "http://vllm"
_MOST_WORDS = 500


class Gone(Exception):
    """The server gave no usable answer in time, or there is none."""


class Closed(Gone):
    """Nobody listens, or the connection broke: not a matter of time."""


class Refused(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"HTTP {status}: {words}")
        self.status = status
        self.words = words


@dataclass(frozen=True, slots=True)
class Answer:
    """What became of a generation request."""

    name: str
    body: dict[str, Any] | None  # None: `error` says why
    error: Gone | Refused | None
    at: float  # monotonic


class Client:
    """Used from one thread, closed once."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-client", daemon=True)
        self._thread.start()
        self._session: aiohttp.ClientSession = self._do(self._open(), 10.0)

    def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        query: Mapping[str, str] | None = None,
        timeout_s: float = 5.0,
    ) -> str:
        """The text of a successful answer. Raises Gone or Refused.

        A server whose engine died may never answer a call that was under way: its health is asked for meanwhile.
        """
        work = asyncio.run_coroutine_threadsafe(self._request(method, path, body, query, timeout_s), self._loop)
        end = time.monotonic() + timeout_s + 5.0
        while True:
            try:
                return str(work.result(PULSE_S))
            except TimeoutError as error:
                why = self._ailment() if time.monotonic() < end else f"no answer within {timeout_s:.0f} s"
                if why:
                    work.cancel()
                    raise Gone(f"{method} {path}: {why}") from error

    def send(self, name: str, body: Mapping[str, Any]) -> None:
        """Start a generation; its answer comes out of `take` under this name."""
        self._loop.call_soon_threadsafe(self._start, name, body)

    def cancel(self, names: Collection[str]) -> None:
        """Hang up: the server then stops generating for them. An answer may already be waiting in `take`."""
        self._loop.call_soon_threadsafe(self._hang_up, tuple(names))

    def take(self, wait_s: float) -> list[Answer]:
        """Answers that are there, after at most `wait_s` seconds for the first."""
        taken: list[Answer] = []
        try:
            taken.append(self._answers.get(timeout=wait_s))
            while True:
                taken.append(self._answers.get_nowait())
        except queue.Empty:
            return taken

    def close(self) -> None:
        """Hang up everywhere and end the thread."""
        with suppress(Gone):
            self._do(self._shut(), 10.0)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        if not self._loop.is_running():
            self._loop.close()

    def _ailment(self) -> str:
        """Why a server will not answer any more; empty when it is well, or silent: then the call's own deadline tells.

        vLLM's closes its socket when its engine died, and waits for the calls that are under way.
        """
        try:
            self._do(self._request("GET", HEALTH, None, None, PULSE_S), 5 * PULSE_S)
        except (Refused, Closed) as error:
            return str(error)
        except Gone:
            return ""
        return ""

    def _do(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(limit_s)
        except TimeoutError as error:
            future.cancel()
            raise Gone(f"no answer within {limit_s:.0f} s") from error

    async def _open(self) -> aiohttp.ClientSession:
        # A connection for each request: one that is kept may be closed by the server just when it is used again.
        connector = aiohttp.UnixConnector(path=str(self._socket), limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))

    async def _shut(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def _request(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str] | None, timeout_s: float | None
    ) -> str:
        limit = aiohttp.ClientTimeout(total=timeout_s)
        try:
            async with self._session.request(method, _BASE + path, json=body, params=query, timeout=limit) as reply:
                text = await reply.text()
        except TimeoutError as error:  # before aiohttp's own, some of which are both
            raise Gone(f"{method} {path}: {type(error).__name__} {error}") from error
        except (aiohttp.ClientError, OSError) as error:
            raise Closed(f"{method} {path}: {type(error).__name__} {error}") from error
        if reply.status != 200:
            raise Refused(reply.status, f"{method} {path}: {_reason(text)}")
        return text

    def _start(self, name: str, body: Mapping[str, Any]) -> None:
        task = self._loop.create_task(self._generate(name, body))
        self._tasks[name] = task
        task.add_done_callback(lambda ended: self._ended(name, ended))

    def _ended(self, name: str, task: asyncio.Task[None]) -> None:
        """A request that ends by a fault of this program has an answer too: whoever waits for it would wait for ever."""
        self._tasks.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._answers.put(Answer(name, None, Gone(f"not sent or not read: {error!r}"), time.monotonic()))

    def _hang_up(self, names: Collection[str]) -> None:
        for name in names:
            if (task := self._tasks.get(name)) is not None:
                task.cancel()

    async def _generate(self, name: str, body: Mapping[str, Any]) -> None:
        try:
            reply = json.loads(await self._request("POST", GENERATE, body, None, None))
        except (Gone, Refused) as error:
            self._answers.put(Answer(name, None, error, time.monotonic()))
        except ValueError as error:
            self._answers.put(Answer(name, None, Gone(f"no JSON: {error}"), time.monotonic()))
        else:
            self._answers.put(Answer(name, reply, None, time.monotonic()))


def _reason(text: str) -> str:
    """The message of a vLLM error body, or its beginning."""
    try:
        return str(json.loads(text)["error"]["message"])[:_MOST_WORDS]
    except (ValueError, KeyError, TypeError):
        return text[:_MOST_WORDS]
