"""The worker's Ed25519 key: made at the first start, kept in a 0600 file, exported and imported under a passphrase.

The key is the worker's account: who loses it loses the history and the earnings that belong to it.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from p2p.adapters.durable import write_durably
from worker_node.errors import IdentityError

FILE_NAME = "identity.pem"
_SHORTEST_PASSPHRASE = 8
_MOST_PEM_BYTES = 16_384


def identity_path(state_dir: Path) -> Path:
    """Where the key lies."""
    return state_dir / FILE_NAME


def make_state_dir(state_dir: Path) -> None:
    """Make the directory, for its owner only."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise IdentityError(
            f"--state-dir {state_dir} cannot be made: {error.strerror}; choose a directory you may write"
        ) from error


def load_or_create(state_dir: Path) -> tuple[Ed25519PrivateKey, bool]:
    """The key, and whether it was made now."""
    make_state_dir(state_dir)
    path = identity_path(state_dir)
    if path.exists():
        return load(state_dir), False
    key = Ed25519PrivateKey.generate()
    _write_private(path, _pem(key, NoEncryption()))
    return key, True


def load(state_dir: Path) -> Ed25519PrivateKey:
    """The key of this state directory. Raises IdentityError when there is none, or when others may read it."""
    path = identity_path(state_dir)
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        pem = path.read_bytes()
    except OSError as error:
        raise IdentityError(
            f"no identity at {path}: {error.strerror}; `echo2-worker join` makes one, `identity import` brings one"
        ) from error
    if mode & 0o077:
        raise IdentityError(f"{path} has mode {mode:04o}, others may read the key: run `chmod 600 {path}`")
    return _parse(pem, None, path)


def export_identity(state_dir: Path, target: Path, passphrase: str) -> None:
    """Write the key, encrypted, for a backup or another machine."""
    if len(passphrase) < _SHORTEST_PASSPHRASE:
        raise IdentityError(f"the passphrase has {len(passphrase)} characters; use at least {_SHORTEST_PASSPHRASE}")
    if target.exists():
        raise IdentityError(f"{target} exists already: name a new file")
    _write_private(target, _pem(load(state_dir), BestAvailableEncryption(passphrase.encode())))


def import_identity(state_dir: Path, source: Path, passphrase: str, *, replace: bool) -> Ed25519PrivateKey:
    """Bring an exported key here. An identity that is already here is kept unless `replace`."""
    make_state_dir(state_dir)
    path = identity_path(state_dir)
    if path.exists() and not replace:
        raise IdentityError(f"{path} holds an identity already: export it first, then import with --replace")
    try:
        with source.open("rb") as file:
            pem = file.read(_MOST_PEM_BYTES)
    except OSError as error:
        raise IdentityError(f"{source} cannot be read: {error.strerror}") from error
    key = _parse(pem, passphrase.encode(), source)
    _write_private(path, _pem(key, NoEncryption()))
    return key


def _pem(key: Ed25519PrivateKey, encryption: KeySerializationEncryption) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


def _parse(pem: bytes, passphrase: bytes | None, path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError) as error:
        raise IdentityError(f"{path} is not a readable key: a wrong passphrase, or not a file of `identity export`") from error
    if not isinstance(key, Ed25519PrivateKey):
        raise IdentityError(f"{path} holds another kind of key; an Ed25519 key is needed")
    return key


def _write_private(path: Path, data: bytes) -> None:
    """Durably, and never readable by others, not even for a moment."""
    previous = os.umask(0o077)
    try:
        write_durably(path, data)
        path.chmod(0o600)
    except OSError as error:
        raise IdentityError(f"{path} cannot be written: {error.strerror}") from error
    finally:
        os.umask(previous)
