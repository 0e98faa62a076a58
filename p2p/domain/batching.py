"""How an edge's row of pieces is told in batches: one rule, so that the same row always becomes the same transfer.

The encoder tells batches while it encodes, the coordinator again after a restart, from the row that it kept: both end at the same transfer id.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from p2p.domain.batches import Batch, text_hash
from p2p.domain.manifest import Edge, Piece

BATCH_BYTES = 4 << 20  # pieces told at once: few signatures, and no long wait before the first piece may leave
MOST_IN_BATCH = 64


def batches(job_id: str, version: int, encoding: str, base_digest: str | None, row: Iterable[Piece]) -> Iterator[Batch]:
    """Batches of the row, each as soon as its pieces came; the last one, which may hold none, when the row ends.

    The first piece is told at once: its journey is what everyone waits for.
    """
    waiting: list[Piece] = []
    number, previous = 0, ""
    for piece in row:
        waiting.append(piece)
        if number == 0 or len(waiting) >= MOST_IN_BATCH or sum(one.size for one in waiting) >= BATCH_BYTES:
            batch = Batch(job_id, version, encoding, base_digest, number, previous, tuple(waiting), is_last=False)
            yield batch
            number, previous, waiting = number + 1, text_hash(batch.to_json()), []
    yield Batch(job_id, version, encoding, base_digest, number, previous, tuple(waiting), is_last=True)


def edge_batches(job_id: str, version: int, edge: Edge) -> list[Batch]:
    """The batches of an edge that was published before."""
    return list(batches(job_id, version, edge.encoding, edge.base_digest, edge.pieces))
