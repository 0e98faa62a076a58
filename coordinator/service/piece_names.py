"""Which pieces a manifest or a hop names. Texts are large, and the same ones are looked at with each version and each piece: they are parsed once."""

from __future__ import annotations

from collections.abc import Hashable, ItemsView
from typing import Generic, TypeVar

from p2p.domain.hops import pieces_named

MOST = 1 << 19  # names of 32 bytes: about 50 MB, a keyframe of 140 GB twice
Key = TypeVar("Key", bound=Hashable)


class PieceNames(Generic[Key]):
    """Names (the digests' bytes) by a key that tells the text. At most `most` are kept, the oldest texts go first; those of the newest always are.

    For one thread at a time.
    """

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._known: dict[Key, frozenset[bytes]] = {}
        self.count = 0

    def of(self, key: Key, text: str) -> frozenset[bytes]:
        """What the text names. Raises ManifestError."""
        known = self._known.get(key)
        if known is None:
            known = frozenset(bytes.fromhex(piece.digest) for piece in pieces_named(text))
            self.count += len(known)
            while self._known and self.count > self._most:
                self.count -= len(self._known.pop(next(iter(self._known))))
            self._known[key] = known
        return known

    def items(self) -> ItemsView[Key, frozenset[bytes]]:
        """What is kept now."""
        return self._known.items()


def name_of(digest: str) -> bytes:
    """The bytes that a digest in hex spells; nothing, which is no piece's name, where it is none or is spelled otherwise."""
    try:
        name = bytes.fromhex(digest)
    except ValueError:
        return b""
    return name if name.hex() == digest else b""
