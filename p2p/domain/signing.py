"""Signatures of manifests, hops and piece batches: Ed25519 of the coordinator over the exact text, each kind under its own prefix."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.errors import BatchRefused, ManifestError

PREFIX = b"echo2-manifest\n"
BATCH_PREFIX = b"echo2-batch\n"
HOP_PREFIX = b"echo2-hop\n"


def sign_manifest(key: Ed25519PrivateKey, text: str) -> str:
    """The signature (hex) of a manifest's canonical JSON."""
    return key.sign(PREFIX + text.encode()).hex()


def check_manifest(public_key: str, text: str, signature: str) -> None:
    """Return if `signature` (hex) is that of `public_key` (hex) over `text`; raise ManifestError if not."""
    if not _is_signed(public_key, PREFIX, text, signature):
        raise ManifestError(
            f"the manifest's signature {signature[:16]!r}... is not that of key {public_key[:16]!r}...: "
            "ask the coordinator for the manifest again, and check the key in the invite"
        )


def sign_batch(key: Ed25519PrivateKey, text: str) -> str:
    """The signature (hex) of a batch's canonical JSON."""
    return key.sign(BATCH_PREFIX + text.encode()).hex()


def check_batch(public_key: str, text: str, signature: str) -> None:
    """Return if `signature` (hex) is that of `public_key` (hex) over the batch `text`; raise BatchRefused if not."""
    if not _is_signed(public_key, BATCH_PREFIX, text, signature):
        raise BatchRefused(
            f"the batch's signature {signature[:16]!r}... is not that of key {public_key[:16]!r}...: "
            "ask the coordinator for the batch again, and check the key in the invite"
        )


def sign_hop(key: Ed25519PrivateKey, text: str) -> str:
    """The signature (hex) of a hop's canonical JSON."""
    return key.sign(HOP_PREFIX + text.encode()).hex()


def check_hop(public_key: str, text: str, signature: str) -> None:
    """Return if `signature` (hex) is that of `public_key` (hex) over the hop `text`; raise ManifestError if not."""
    if not _is_signed(public_key, HOP_PREFIX, text, signature):
        raise ManifestError(
            f"the hop's signature {signature[:16]!r}... is not that of key {public_key[:16]!r}...: "
            "ask the coordinator for the manifest again, and check the key in the invite"
        )


def _is_signed(public_key: str, prefix: bytes, text: str, signature: str) -> bool:
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), prefix + text.encode())
    except (InvalidSignature, ValueError):
        return False
    return True
