"""Calls providers: the only place that holds their keys, and puts them nowhere but in a header.

`RemoteProvider` speaks a `Feed`'s language over any `Send`; `HttpSender` is the one for real providers. Every call has a deadline and a
limit in bytes; redirects are not followed, because the key would travel along. What goes wrong is a `Failed`, never an exception.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from coordinator.errors import CannotServe
from coordinator.service.renting_ports import Look
from pricing.feeds.contract import (
    MOST_BODY_BYTES,
    Answer,
    Call,
    Failed,
    Feed,
    Handle,
    Need,
    Offers,
    RentalOffer,
    Spec,
    Trouble,
)
from pricing.feeds.reading import words_of

CALL_S = 30.0
LOOK_S = 90.0
MOST_PAGES = 200
MOST_KEY_BYTES = 4096
LEAST_KEY = 16  # a shorter one could not be told from other words, and taken out of what is logged
Send = Callable[[Call], Awaitable[Answer]]


class RemoteProvider:
    """A provider behind a `Send`, which may raise TimeoutError, OSError or aiohttp.ClientError."""

    def __init__(self, feed: Feed, send: Send, *, call_s: float = CALL_S, look_s: float = LOOK_S) -> None:
        """`call_s`, `look_s`: the longest for one call, and for all pages of a list."""
        self._feed = feed
        self._send = send
        self._call_s = call_s
        self._look_s = max(look_s, call_s)

    @property
    def name(self) -> str:
        return self._feed.name

    @property
    def farewell(self) -> str:
        return self._feed.farewell

    async def search(self, need: Need, *, now: float) -> Offers | Failed:
        answer = await self._ask(self._feed.search(need))
        return answer if isinstance(answer, Failed) else self._feed.offers(answer, need, now=now)

    async def look(self, label_prefix: str) -> Look | Failed:
        """All pages. A machine whose record cannot be read, or a list that does not end, makes it partial."""
        try:
            async with asyncio.timeout(self._look_s):
                return await self._pages(label_prefix)
        except TimeoutError:
            return Failed(Trouble.UNKNOWN, f"the list did not end within {self._look_s:g} s")

    async def _pages(self, label_prefix: str) -> Look | Failed:
        handles: list[Handle] = []
        page: str | None = None
        asked: set[str | None] = set()
        look = Look((), None)
        while page not in asked and len(asked) < MOST_PAGES:
            asked.add(page)
            answer = await self._ask(self._feed.list(label_prefix, page))
            if isinstance(answer, Failed):
                return answer
            found = self._feed.listed(answer, label_prefix)
            if isinstance(found, Failed):
                return found
            handles += found.handles
            look = Look(tuple(handles), answer.at, look.partial or "; ".join(found.skipped[:3]))
            if found.next_page is None:
                return look
            page = found.next_page
        return replace(look, partial=f"the list did not end after {len(asked)} pages")

    async def get(self, instance_id: str) -> Handle | Failed:
        answer = await self._ask(self._feed.get(instance_id))
        return answer if isinstance(answer, Failed) else self._feed.got(answer)

    async def create(self, offer: RentalOffer, spec: Spec, label: str) -> Handle | Failed:
        try:
            call = self._feed.create(offer, spec, label)
        except ValueError as error:
            return Failed(Trouble.REFUSED, str(error))
        answer = await self._ask(call)
        return answer if isinstance(answer, Failed) else self._feed.created(answer, label)

    async def destroy(self, instance_id: str) -> Failed | None:
        answer = await self._ask(self._feed.destroy(instance_id))
        return answer if isinstance(answer, Failed) else self._feed.destroyed(answer)

    async def _ask(self, call: Call) -> Answer | Failed:
        try:
            async with asyncio.timeout(self._call_s):
                return await self._send(call)
        except TimeoutError:
            return Failed(Trouble.UNKNOWN, f"no answer to {call.method} {call.path} within {self._call_s:g} s")
        except (OSError, aiohttp.ClientError) as error:
            return Failed(Trouble.UNKNOWN, f"{call.method} {call.path}: {type(error).__name__}: {words_of(str(error))}")


class HttpSender:
    """Sends calls to one address with one key."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, key: str) -> None:
        self._session = session
        self._base_url = _checked(base_url)
        self._key = key

    async def __call__(self, call: Call) -> Answer:
        headers = {"Authorization": f"Bearer {self._key}", "Accept": "application/json", "Accept-Encoding": "identity"}
        content = None
        if call.body is not None:
            content, headers["Content-Type"] = json.dumps(call.body), "application/json"
        async with self._session.request(
            call.method,
            f"{self._base_url}{call.path}",
            params=list(call.query),
            data=content,
            headers=headers,
            allow_redirects=False,
            auto_decompress=False,  # what is not asked for is not unpacked: the limit counts what is held
        ) as reply:
            body = b""
            while len(body) <= MOST_BODY_BYTES and (more := await reply.content.read(MOST_BODY_BYTES + 1 - len(body))):
                body += more
            named = {name.lower(): value for name, value in reply.headers.items()}
            return Answer(reply.status, named, body.replace(self._key.encode(), b"[key]"), _date(named.get("date", "")))


def _checked(base_url: str) -> str:
    """Plain HTTP would show the key to everybody on the way: only for a loopback address. Raises CannotServe."""
    parts = urlsplit(base_url)
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return base_url.rstrip("/")
    raise CannotServe(f"provider url is {base_url!r}: give an https address")


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _date(header: str) -> float | None:
    """An HTTP date as Unix seconds."""
    try:
        return parsedate_to_datetime(header).timestamp()
    except (TypeError, ValueError, OverflowError):
        return None


def read_key(path: Path) -> str:
    """A provider's key from its file, which nobody else may read. Raises CannotServe without repeating it."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise CannotServe(f"key_file {path} can be read by others: chmod 600 {path}")
            key = file.read(MOST_KEY_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise CannotServe(f"key_file {path} cannot be read: {error.strerror}") from error
    if len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise CannotServe(f"key_file {path} holds no key: it must be one ASCII word of at least {LEAST_KEY} characters on one line")
    return key
