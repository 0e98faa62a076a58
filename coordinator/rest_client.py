"""A client of the REST API for our own commands: pinned certificate, deadlines, problem documents as errors."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import aiohttp

from coordinator.errors import CoordinatorError

DEADLINE_S = 60.0


class RequestFailed(CoordinatorError):
    """The coordinator refused, or could not be reached; the words name the next step."""

    def __init__(self, words: str, *, status: int | None = None, code: str | None = None) -> None:
        super().__init__(words)
        self.status = status
        self.code = code


class RestClient:
    """Use as an async context manager."""

    def __init__(self, url: str, token: str, *, certificate_sha256: str | None = None) -> None:
        self._base = url.rstrip("/") + "/api/v1"
        self._token = token
        self._pin = aiohttp.Fingerprint(bytes.fromhex(certificate_sha256)) if certificate_sha256 else True
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> RestClient:
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._token}"}, timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        assert self._session is not None
        await self._session.close()

    async def get(self, path: str, query: Mapping[str, Any] | None = None) -> Any:
        """GET an answer."""
        return await self._json("GET", path, query=query)

    async def post(self, path: str, body: Any | None = None) -> Any:
        """POST a JSON body; a fresh idempotency key makes one retry after a lost answer safe."""
        return await self._json("POST", path, data=json.dumps({} if body is None else body).encode())

    async def patch(self, path: str, body: Any) -> Any:
        """PATCH a JSON body."""
        return await self._json("PATCH", path, data=json.dumps(body).encode())

    async def delete(self, path: str) -> Any:
        """DELETE a thing."""
        return await self._json("DELETE", path)

    async def upload(self, path: Path, *, kind: str, name: str) -> Any:
        """POST a file's bytes."""
        assert self._session is not None
        headers = {"Idempotency-Key": secrets.token_hex(16), "Content-Type": "application/octet-stream"}
        timeout = aiohttp.ClientTimeout(total=None, sock_read=DEADLINE_S)
        try:
            with path.open("rb") as data:
                async with self._session.post(
                    f"{self._base}/files",
                    params={"kind": kind, "name": name},
                    data=data,
                    headers=headers,
                    ssl=self._pin,
                    timeout=timeout,
                ) as answer:
                    return await self._checked(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def events(self, job_id: str, after: int) -> AsyncIterator[dict[str, Any]]:
        """A job's events from `after` on, as {seq, kind, at, data}, until the stream ends."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_read=DEADLINE_S)
        headers = {"Last-Event-ID": str(after)}
        url = f"{self._base}/jobs/{job_id}/events"
        try:
            async with self._session.get(url, headers=headers, ssl=self._pin, timeout=timeout) as answer:
                if answer.status != 200:
                    await self._checked(answer)
                head: dict[str, str] = {}
                async for line in answer.content:
                    name, _, value = line.decode().rstrip("\r\n").partition(": ")
                    if name == "data":
                        data = json.loads(value)
                        yield {"seq": int(head["id"]), "kind": head["event"], "at": data.pop("at"), "data": data}
                    elif name in ("id", "event"):
                        head[name] = value
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def download(self, path: str, target: Path) -> int:
        """GET a file into `target`; the number of bytes."""
        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=None, sock_read=DEADLINE_S)
        try:
            async with self._session.get(self._base + path, ssl=self._pin, timeout=timeout) as answer:
                if answer.status != 200:
                    await self._checked(answer)
                size = 0
                with target.open("wb") as out:
                    async for block in answer.content.iter_chunked(1 << 20):
                        size += out.write(block)
                return size
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _json(self, method: str, path: str, *, query: Mapping[str, Any] | None = None, data: bytes | None = None) -> Any:
        assert self._session is not None
        headers = {"Content-Type": "application/json"} if data is not None else {}
        if method == "POST":
            headers["Idempotency-Key"] = secrets.token_hex(16)
        url = self._base + path
        try:
            async with self._session.request(method, url, params=query, data=data, headers=headers, ssl=self._pin) as answer:
                return await self._checked(answer)
        except (aiohttp.ClientError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def _checked(self, answer: aiohttp.ClientResponse) -> Any:
        raw = await answer.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = None
        if answer.status < 400:
            return body
        problem = body if isinstance(body, dict) else {}
        fix = f" Fix: {problem['fix']}." if problem.get("fix") else ""
        words = f"{problem.get('detail') or f'HTTP {answer.status}'}.{fix}"
        raise RequestFailed(words, status=answer.status, code=problem.get("code"))

    def _unreachable(self, error: BaseException) -> RequestFailed:
        if isinstance(error, aiohttp.ServerFingerprintMismatch):
            return RequestFailed(
                f"{self._base} shows a certificate with sha256 {error.got.hex()}, and not the pinned {error.expected.hex()}: "
                "take the line `for authors` from `echo2 serve` anew, and if it is as before, someone is in between"
            )
        if isinstance(error, aiohttp.ClientConnectorCertificateError):
            return RequestFailed(
                f"the certificate of {self._base} is not signed by an authority that this machine knows: if it is self-signed, "
                "give --url as `echo2 serve` prints it for authors (https://HOST:PORT#sha256=HEX)"
            )
        why = str(error) or type(error).__name__
        return RequestFailed(f"no answer from {self._base}: {why}. Is `echo2 serve` running, and is --url right?")
