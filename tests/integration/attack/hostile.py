"""A worker written from PROTOCOL.md that lies: joins a real coordinator over TLS and sends what it is told to."""

from __future__ import annotations

import io
import secrets
import ssl
import time
from types import TracebackType
from typing import Any

import aiohttp
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from numpy.typing import NDArray

from coordinator.wire.canary import scripted_canary
from coordinator.wire.frames import encode_frame
from coordinator.wire.signing import SignedFields, key_id, public_hex, sign_request, worker_id

CANARY_TOKENS = 23
FRAME = "application/vnd.echo2.frame"
Arrays = dict[str, NDArray[Any]]


class Hostile:
    """Use as an async context manager. Replies come back as (status, document)."""

    def __init__(self, base: str, public_key: str, invite: str, *, name: str = "mallory") -> None:
        self.base = base
        self.name = name
        self._invite = invite
        self._coordinator = key_id(public_key)
        self.key = Ed25519PrivateKey.generate()
        self.id = worker_id(public_hex(self.key))
        self.epoch = 0
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Hostile:
        context = ssl._create_unverified_context()
        timeout = aiohttp.ClientTimeout(20)
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=0), timeout=timeout)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._session.close()

    async def call(self, route: str, body: bytes, *, media: str = "application/json", **signed: Any) -> tuple[int, Any]:
        """One signed POST; keyword arguments replace signed fields."""
        path = f"/worker/v1/{route}"
        values: dict[str, Any] = {
            "method": "POST",
            "path": path,
            "coordinator": self._coordinator,
            "worker": self.id,
            "epoch": self.epoch,
            "time": f"{time.time():.3f}",
            "nonce": secrets.token_hex(16),
        }
        headers = sign_request(self.key, SignedFields(**(values | signed)), body) | {"Content-Type": media}
        async with self._session.post(self.base + path, data=io.BytesIO(body), headers=headers) as answer:
            document = await answer.json(content_type=None)
            assert answer.status < 500 or (answer.status == 503 and "Retry-After" in answer.headers), (answer.status, document)
            return answer.status, document

    async def say(self, route: str, **message: Any) -> tuple[int, Any]:
        """One JSON message in the session."""
        import json

        document = message if route in ("account", "join") else {"session_epoch": self.epoch, **message}
        return await self.call(route, json.dumps(document).encode(), epoch=0 if route == "join" else self.epoch)

    async def join(self, **changes: Any) -> Any:
        """A new session."""
        status, welcome = await self.say(
            "join",
            **{
                "invite_code": self._invite,
                "public_key": public_hex(self.key),
                "name": self.name,
                "engine": {"kind": "scripted", "version": "1", "dtype": "float32"},
                "price_uusd_per_hour": 1,
                "max_slots": 64,
                "tokens_per_s": 1e9,
                **changes,
            },
        )
        assert status == 200, welcome
        self.epoch = welcome["session_epoch"]
        return welcome

    async def newest(self) -> Any:
        """The newest version that a beat announces."""
        _, reply = await self.say("heartbeat", held=[], free_slots=64)
        return reply["versions"][0]

    async def confirm(self, version: Any, canary: list[float] | None = None) -> Any:
        """A canary, by default the right one of a scripted engine."""
        values = list(scripted_canary(version["digest"], CANARY_TOKENS)) if canary is None else canary
        named = {name: version[name] for name in ("job_id", "version", "digest")}
        return (await self.say("confirm", **named, canary_logprobs=values))[1]

    async def lease(self, version: Any, *, free: int = 4, wait_s: float = 5.0) -> Any:
        """The first lease of a reply, or None."""
        named = {name: version[name] for name in ("job_id", "version", "digest")}
        _, reply = await self.say("lease", **named, free_slots=free, wait_s=wait_s)
        return reply["leases"][0] if reply.get("leases") else None

    async def submit(self, lease: Any, **changes: Any) -> tuple[int, Any]:
        """Completions that are right in form, but for the arrays and head fields in `changes`."""
        cap, slots = lease["sampling"]["max_new_tokens"], lease["slots"]
        total = cap * len(slots)
        arrays: Arrays = {
            "token_ids": np.full(total, 5, np.int32),
            "logprobs": np.full(total, -0.5, np.float32),
            "versions": np.full(total, lease["version"], np.int32),
        }
        head: dict[str, Any] = {
            "session_epoch": self.epoch,
            "lease_id": lease["lease_id"],
            "fence": lease["fence"],
            "digests": {str(lease["version"]): lease["digest"]},
            "completions": [{"slot": slot, "length": cap, "stop_reason": "length", "generate_s": 1.0} for slot in slots],
        }
        arrays |= {name: value for name, value in changes.items() if name in arrays}
        head |= {name: value for name, value in changes.items() if name not in arrays}
        import json

        return await self.call("submit", encode_frame(json.dumps(head).encode(), arrays), media=FRAME)
