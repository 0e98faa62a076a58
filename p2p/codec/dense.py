"""The dense coding of a part: gaps within each exponent class under a fitted geometric model, and an adaptive range coder.

Within 1 % of the entropy of the changes given the base's exponents.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from p2p.codec.changes import Changes
from p2p.codec.frames import Blob
from p2p.codec.words import WordKind, Words
from p2p.errors import ApplyFailed

WORD = 4
_ROOM = 8192  # words beyond the part's own size that an encoder may fill before the part is known not to compress


def encode_dense(kind: WordKind, words: Words, changes: Changes) -> bytes:
    """Body of a part, given the base's words."""
    from p2p.codec import dense_loops

    out = np.empty(words.nbytes // WORD + _ROOM, "<u4")
    following = np.empty(len(changes), np.uint32)
    written = dense_loops.encode_changes(
        words, changes.positions, changes.differences, *kind.exponent, kind.bits, following, *_model(kind), out
    )
    return out[:written].tobytes() if written >= 0 else bytes(out.nbytes)


def locate_dense(kind: WordKind, words: Words, count: int, blob: Blob) -> Changes:
    """The changes that a body names, given the base's words. Raises ApplyFailed."""
    from p2p.codec import dense_loops

    if blob.left % WORD:
        raise ApplyFailed(f"{blob.place} is {blob.left} bytes long; the range coder writes {WORD} at a time")
    coded = np.frombuffer(blob.take(blob.left), "<u4")
    positions = np.empty(count, np.uint32)
    differences: Words = np.empty(count, kind.dtype)
    status = dense_loops.locate_changes(words, *kind.exponent, kind.bits, coded, *_model(kind), positions, differences)
    if status < 0:
        raise ApplyFailed(f"{blob.place} is not {count} changes of its {len(words)} elements: made from another base, or damaged")
    return Changes(positions, differences)


def _model(kind: WordKind) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
    """The table and the contexts as both ends start with them."""
    from p2p.codec import dense_loops

    table = np.zeros((kind.classes, dense_loops.COLUMNS), np.int64)
    return table, np.full(kind.classes * dense_loops.ROW, dense_loops.HALF, np.uint32)
