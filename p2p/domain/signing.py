"""Signatures of manifests: Ed25519 of the coordinator over the exact text, under a prefix no other message uses."""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2p.errors import ManifestError

PREFIX = b"echo2-manifest\n"


def sign_manifest(key: Ed25519PrivateKey, text: str) -> str:
    """The signature (hex) of a manifest's canonical JSON."""
    return key.sign(PREFIX + text.encode()).hex()


def check_manifest(public_key: str, text: str, signature: str) -> None:
    """Return if `signature` (hex) is that of `public_key` (hex) over `text`; raise ManifestError if not."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key))
        key.verify(bytes.fromhex(signature), PREFIX + text.encode())
    except (InvalidSignature, ValueError) as error:
        raise ManifestError(
            f"the manifest's signature {signature[:16]!r}... is not that of key {public_key[:16]!r}...: "
            "ask the coordinator for the manifest again, and check the key in the invite"
        ) from error
