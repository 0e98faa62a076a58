"""Pieces on their way: who assembles waits for the next one, so that decoding goes on while the rest is being fetched."""

from __future__ import annotations

import threading

from p2p.adapters.piece_store import PieceStore

LOOK_S = 0.02  # a look is one stat; a piece takes longer than this on any link that a person would call slow


class ArrivingPieces:
    """The pieces of a store that a fetch fills. For one reading thread; `end` and `abandon` may be called from any."""

    def __init__(self, store: PieceStore) -> None:
        self._store = store
        self._over = threading.Event()
        self.is_abandoned = False

    def end(self) -> None:
        """Nothing comes any more: what is not here by now is absent."""
        self._over.set()

    def abandon(self) -> None:
        """Nobody wants the rest: the next piece is absent, here or not, so that no more is decoded for nothing."""
        self.is_abandoned = True
        self._over.set()

    def read(self, digest: str) -> bytes:
        """The piece, verified, once it is here. Raises KeyError if it is absent at the end; PieceCorrupt as the store does."""
        while not self._store.has(digest) and not self._over.wait(LOOK_S):
            pass
        if self.is_abandoned:
            raise KeyError(digest)
        return self._store.read(digest)
