"""Where a command finds its coordinator: --url and a token, or what `echo2 serve` left in its data directory."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.config import Settings
from coordinator.errors import CoordinatorError
from coordinator.rest_client import RestClient

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Connection:
    """How to reach a coordinator."""

    url: str
    token: str
    certificate_sha256: str | None

    def client(self) -> RestClient:
        """A client for it."""
        return RestClient(self.url, self.token, certificate_sha256=self.certificate_sha256)

    def run(self, action: Callable[[RestClient], Awaitable[T]]) -> T:
        """Run one command against it."""

        async def body() -> T:
            async with self.client() as client:
                return await action(client)

        return asyncio.run(body())


def find(url: str | None, token: str | None, data_dir: Path | None) -> Connection:
    """Given options first; then the serve.json and admin.token of the data directory on this host."""
    home = (Settings(data_dir=data_dir) if data_dir else Settings()).home
    served = _served(home / "serve.json")
    local = url is None or (served is not None and served["url"] == url)
    address = url or (served["url"] if served else None)
    if address is None:
        raise CoordinatorError(
            f"no coordinator is known: start one with `echo2 serve`, or give --url (looked for {home / 'serve.json'})"
        )
    secret = token or (_read(home / "admin.token") if local else None)
    if secret is None:
        raise CoordinatorError("no token: give --token, or set ECHO2_TOKEN")
    return Connection(address, secret, served.get("certificate_sha256") if served and local else None)


def _served(path: Path) -> dict[str, str] | None:
    text = _read(path)
    return None if text is None else json.loads(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
