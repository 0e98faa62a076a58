"""Where a command finds its coordinator: --url and a token, or what `echo2 serve` left in its data directory."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from coordinator.config import read_settings
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
    """Given options first; then the serve.json and admin.token of the data directory on this host.

    A URL may carry the fingerprint of a self-signed certificate, as `echo2 serve` prints it: https://host:7700#sha256=HEX.
    """
    home = (read_settings(data_dir=data_dir) if data_dir else read_settings()).home
    served = _served(home / "serve.json")
    url, pin = _pinned(url)
    local = url is None or (served is not None and served["url"] == url)
    address = url or (served["url"] if served else None)
    if address is None:
        raise CoordinatorError(
            f"no coordinator is known: start one with `echo2 serve`, or give --url (looked for {home / 'serve.json'})"
        )
    secret = token or (_read(home / "admin.token") if local else None)
    if secret is None:
        raise CoordinatorError(_no_token(address, home, served, local=local))
    return Connection(address, secret, pin or (served.get("certificate_sha256") if served and local else None))


def _no_token(address: str, home: Path, served: dict[str, str] | None, *, local: bool) -> str:
    """The URL, and which file was looked for in vain: its own token is taken only for the coordinator that this data directory is of."""
    if local:
        why = f"{home / 'admin.token'} cannot be read"
    elif served is not None:
        why = f"{home / 'admin.token'} is for {served['url']}, as {home / 'serve.json'} says"
    else:
        why = f"{home / 'serve.json'} is absent, so {home / 'admin.token'} is not taken: no coordinator serves from this data directory"
    return f"no token for {address}: give --token, or set ECHO2_TOKEN ({why})"


def _pinned(url: str | None) -> tuple[str | None, str | None]:
    """A URL without its fragment, and the certificate's fingerprint from it. Raises CoordinatorError."""
    if url is None:
        return None, None
    if not url.startswith(("http://", "https://")):
        raise CoordinatorError(f"--url is {url!r}: it must start with https:// (or http:// on loopback)")
    address, _, fragment = url.partition("#")
    pin = fragment.removeprefix("sha256=")
    if fragment and not re.fullmatch("[0-9a-f]{64}", pin):
        raise CoordinatorError(
            f"--url ends in {fragment!r}: after # it must read sha256= and 64 hex digits, as `echo2 serve` prints it"
        )
    return address.rstrip("/"), pin or None


def _served(path: Path) -> dict[str, str] | None:
    text = _read(path)
    return None if text is None else json.loads(text)


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
