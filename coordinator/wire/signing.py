"""Ed25519 identities and signed requests of the worker protocol (pure: keys and bytes in, headers out).

A request's signature covers protocol version, method, path with query, the coordinator's key id, worker id, session epoch,
time, nonce, and BLAKE3 of the body as sent (before decompression). Naming the coordinator's key makes a request
worthless to any other coordinator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from coordinator.wire.messages import PROTOCOL_VERSION, AccountQuote

MAX_SKEW_S = 60.0
NONCE_KEPT_S = 180.0
REPLY_HEADER = "Echo2-Reply-Signature"
HEADERS = ("Echo2-Worker", "Echo2-Epoch", "Echo2-Time", "Echo2-Nonce", "Echo2-Signature")
_SHAPES = tuple(
    re.compile(shape)
    for shape in (
        r"w-[0-9a-f]{20}",
        r"0|[1-9][0-9]{0,17}",
        r"[0-9]{1,12}\.[0-9]{3}",
        r"[0-9a-f]{32}",
        r"[0-9a-f]{128}",
    )
)


def public_hex(key: Ed25519PrivateKey) -> str:
    """The public half, hex."""
    return key.public_key().public_bytes_raw().hex()


def key_id(public_key: str) -> str:
    """A short name for a public key (hex): the first 20 hex digits of its BLAKE3."""
    return blake3(bytes.fromhex(public_key)).hexdigest()[:20]


def worker_id(public_key: str) -> str:
    """A worker's id is derived from its key, so both sides know it before the first reply."""
    return f"w-{key_id(public_key)}"


# Points of small order (sign bit cleared): under them one signature fits every message, so nobody owns such a key.
_SMALL_ORDER = frozenset(
    bytes.fromhex(point)
    for point in (
        "00" * 32,
        "01" + "00" * 31,
        "26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05",
        "c7176a703d4dd84fba3c0b760d10670f2a2053fa2c39ccc64ec7fd7792ac037a",
        "ec" + "ff" * 30 + "7f",
        "ed" + "ff" * 30 + "7f",
        "ee" + "ff" * 30 + "7f",
    )
)


def is_weak(public_key: str) -> bool:
    """Whether the key (hex) is a point of small order, which anybody can sign for."""
    point = bytes.fromhex(public_key)
    return point[:31] + bytes([point[31] & 0x7F]) in _SMALL_ORDER if len(point) == 32 else True


def verify(public_key: str, signature: str, message: bytes) -> bool:
    """Whether `signature` (hex) is the key's over `message`. A weak key signs nothing."""
    try:
        if is_weak(public_key):
            return False
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), message)
    except (InvalidSignature, ValueError):
        return False
    return True


@dataclass(frozen=True, slots=True)
class SignedFields:
    """What a request's signature covers besides the body."""

    method: str
    path: str  # with query, as sent
    coordinator: str  # key_id of the coordinator's public key
    worker: str
    epoch: int  # 0 for join
    time: str  # Unix seconds, decimal with three places, as sent
    nonce: str  # 32 hex digits

    def message(self, body: bytes) -> bytes:
        """The exact bytes that are signed; fields cannot contain the separator."""
        parts = (
            f"echo2-worker-v{PROTOCOL_VERSION}",
            self.method.upper(),
            self.path,
            self.coordinator,
            self.worker,
            str(self.epoch),
            self.time,
            self.nonce,
            blake3(body).hexdigest(),
        )
        return "\n".join(parts).encode()


def sign_request(key: Ed25519PrivateKey, fields: SignedFields, body: bytes) -> dict[str, str]:
    """The headers to send."""
    values = (fields.worker, str(fields.epoch), fields.time, fields.nonce, key.sign(fields.message(body)).hex())
    return dict(zip(HEADERS, values, strict=True))


def read_headers(headers: Mapping[str, str], *, method: str, path: str, coordinator: str) -> tuple[SignedFields, str] | None:
    """The signed fields and the signature of a request; None when a header is missing or not of the exact form."""
    values = [headers.get(name, "") for name in HEADERS]
    if not all(shape.fullmatch(value) for shape, value in zip(_SHAPES, values, strict=True)):
        return None
    worker, epoch, time, nonce, signature = values
    return SignedFields(method, path, coordinator, worker, int(epoch), time, nonce), signature


def reply_message(nonce: str, body: bytes) -> bytes:
    """What the coordinator signs on every JSON reply: it names the request's nonce, so no reply fits another request."""
    return b"\n".join((b"echo2-reply", nonce.encode(), blake3(body).hexdigest().encode()))


def certificate_message(certificate_sha256: str) -> bytes:
    """What the coordinator's identity signs to vouch for a TLS certificate (SHA-256 of its DER, lower-case hex)."""
    return b"echo2-certificate\n" + certificate_sha256.encode()


def receipt_message(worker: str, lease_id: str, fence: int, slots: Sequence[int]) -> bytes:
    """What a receipt signs: these slots (ascending) of this lease were accepted from this worker, durably."""
    names = ",".join(str(slot) for slot in sorted(slots))
    return "\n".join(("echo2-receipt", worker, lease_id, str(fence), names)).encode()


def account_message(worker: str, line: AccountQuote) -> bytes:
    """What the receipt of an account's line signs: what this worker is owed under this quote, and of what it was reckoned."""
    rate = "" if line.uusd_per_million_tokens is None else line.uusd_per_million_tokens
    figures = (line.tokens, line.paid_ms, rate, line.uusd_per_idle_hour, line.owed_uusd, line.posted_uusd)
    return "\n".join(("echo2-account", worker, line.quote_id, f"{line.as_of:.3f}", *map(str, figures))).encode()


def is_receipt(public_key: str, worker: str, line: AccountQuote) -> bool:
    """Whether the coordinator with this public key (hex) signed the line for this worker."""
    return verify(public_key, line.receipt, account_message(worker, line))
