"""A peer's name on the control network, from its Ed25519 key and back.

libp2p calls a peer by the identity multihash of its protobuf-encoded public key, in base58 (libp2p specs, peer-ids). For Ed25519 the key
itself is inside, so both directions are arithmetic. Everything of ours names a peer by its public key in hex.
"""

from __future__ import annotations

from dataclasses import dataclass

from p2p.errors import ControlRefused

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_HEAD = bytes.fromhex("002408011220")  # identity hash of 36 bytes; key type Ed25519; 32 bytes of key
_LENGTH = 52  # characters of every Ed25519 peer id: "12D3KooW..."


@dataclass(frozen=True, slots=True)
class ControlAddress:
    """Where a peer (its Ed25519 key, hex) listens for control connections."""

    key: str
    host: str
    port: int


def peer_id_of(public_key: str) -> str:
    """The peer id (base58) of an Ed25519 public key (hex). Raises ControlRefused."""
    try:
        raw = bytes.fromhex(public_key)
    except ValueError:
        raw = b""
    if len(raw) != 32 or len(public_key) != 64:
        raise ControlRefused(f"the public key {public_key[:80]!r} is not 64 hex digits")
    number = int.from_bytes(_HEAD + raw, "big")
    digits = []
    while number:
        number, digit = divmod(number, 58)
        digits.append(_ALPHABET[digit])
    return "1" + "".join(reversed(digits))  # the head's one leading zero byte is spelled as a leading "1"


def public_key_of(peer_id: str) -> str:
    """The Ed25519 public key (hex) inside a peer id. Raises ControlRefused for ids of other kinds of keys."""
    if len(peer_id) != _LENGTH or not peer_id.startswith("12D3KooW"):
        raise ControlRefused(f"peer id {peer_id[:80]!r} does not hold an Ed25519 key; peers here have no other kind")
    number = 0
    for character in peer_id[1:]:
        digit = _ALPHABET.find(character)
        if digit < 0:
            raise ControlRefused(f"peer id {peer_id!r} is not base58: it holds {character!r}")
        number = number * 58 + digit
    raw = number.to_bytes(len(_HEAD) + 32, "big")
    if not raw.startswith(_HEAD):
        raise ControlRefused(f"peer id {peer_id!r} does not hold an Ed25519 key; peers here have no other kind")
    return raw[len(_HEAD) :].hex()
