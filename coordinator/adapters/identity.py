"""The coordinator's Ed25519 identity: made at first start, 0600, never logged."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from coordinator.errors import CannotServe
from p2p.adapters.durable import write_durably


def identity_key(path: Path) -> Ed25519PrivateKey:
    """Load the key, or make it. Workers' invites pin it: back this file up."""
    if path.exists():
        key = load_pem_private_key(path.read_bytes(), password=None)
        if not isinstance(key, Ed25519PrivateKey):
            raise CannotServe(f"{path} holds no Ed25519 key: restore the coordinator's identity from a backup, or remove the file")
        return key
    key = Ed25519PrivateKey.generate()
    write_durably(path, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    return key
