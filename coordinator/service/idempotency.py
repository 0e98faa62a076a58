"""Repeated POSTs: the same key and body give the same stored answer, for 24 hours and across restarts.

The answer is written in the transaction of the command itself, so a crash leaves both or neither. Answers lie sealed under the
caller's own secret, because some hold a secret that is shown once (a token, an invite code) and the store keeps no such thing.
"""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass, field

from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from coordinator.domain.model import IdempotencyRecord
from coordinator.service.deps import Deps
from coordinator.service.operator_errors import invalid, unavailable
from coordinator.service.ports import Tx

KEPT_S = 24 * 3600.0
_CONTEXT = "echo2 2026-11-29 stored answers of idempotent requests"
_NONCE_BYTES = 12


@dataclass(frozen=True, slots=True)
class Slip:
    """What identifies one attempt: who, which key, on which route, with which body."""

    token_id: str
    key: str
    route: str  # method and path with query
    body_hash: str
    secret: str = field(repr=False)  # the caller's


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer as it was given the first time."""

    status: int
    text: str


async def begin(deps: Deps, slip: Slip, *, wait_s: float) -> Stored | None:
    """The stored answer, or None when this attempt is to do the work. Waits while another attempt with the key runs.

    Raises RequestRefused when the key was used for something else, or when the other attempt does not end within `wait_s`.
    """
    until = deps.clock.now() + wait_s
    with deps.wake.watch(_topic(slip)) as watch:
        while True:
            record = await deps.store.write(lambda tx: _claim(tx, deps, slip))
            if record is None:
                return None
            if record.status is not None:
                return Stored(record.status, _unseal(slip, record.response))
            left = until - deps.clock.now()
            if left <= 0 or not await watch.wait(left):
                raise unavailable(
                    "same_key_in_flight",
                    f"another request with Idempotency-Key {slip.key!r} is still running",
                    fix="repeat the request with the same key",
                    retry_after_s=5.0,
                )


async def _claim(tx: Tx, deps: Deps, slip: Slip) -> IdempotencyRecord | None:
    """Take the key if it is free, too old, or left in flight by an earlier process; else the record that holds it."""
    now = deps.clock.now()
    await tx.delete(IdempotencyRecord, created_at__lt=now - KEPT_S)
    record = await tx.get(IdempotencyRecord, slip.token_id, slip.key)
    if record is not None and (record.route, record.body_hash) != (slip.route, slip.body_hash):
        raise invalid(
            "idempotency_key_reused",
            f"Idempotency-Key {slip.key!r} was used for another request ({record.route}) or another body",
            field="Idempotency-Key",
            fix="use a new key for a new request",
        )
    if record is not None and (record.status is not None or record.created_at >= deps.started_at):
        return record
    await tx.put(IdempotencyRecord(slip.token_id, slip.key, slip.route, slip.body_hash, now))
    return None


async def finish(tx: Tx, deps: Deps, slip: Slip, answer: Stored) -> None:
    """Keep the answer; call it in the transaction of the command."""
    sealed = _seal(slip, answer.text)
    row = IdempotencyRecord(slip.token_id, slip.key, slip.route, slip.body_hash, deps.clock.now(), answer.status, sealed)
    await tx.put(row)


async def abandon(deps: Deps, slip: Slip) -> None:
    """Nothing was done: free the key, so that a repetition does the work."""
    await deps.store.write(lambda tx: tx.delete(IdempotencyRecord, token_id=slip.token_id, key=slip.key, status=None))
    announce(deps, slip)


def announce(deps: Deps, slip: Slip) -> None:
    """Wake the attempts that wait for this key."""
    deps.wake.notify(_topic(slip))


def _topic(slip: Slip) -> str:
    return f"idempotency:{slip.token_id}:{slip.key}"


def _cipher(slip: Slip) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(blake3(slip.secret.encode(), derive_key_context=_CONTEXT).digest())


def _seal(slip: Slip, text: str) -> str:
    nonce = os.urandom(_NONCE_BYTES)
    return base64.b64encode(nonce + _cipher(slip).encrypt(nonce, text.encode(), slip.key.encode())).decode()


def _unseal(slip: Slip, sealed: str) -> str:
    data = base64.b64decode(sealed)
    return _cipher(slip).decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], slip.key.encode()).decode()
