"""Edges on their way while they are still being encoded: signed piece batches, kept in memory.

Losing them in a crash changes no decision: encoding the same bits again gives the same batches, and once a version is public its
rows say all of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p.domain.batches import Batch, text_hash

MOST_OPEN = 16


@dataclass(slots=True)
class Transfer:
    """One edge's batches so far."""

    id: str
    first: Batch
    documents: list[tuple[str, str]] = field(default_factory=list)  # text, signature
    last: str = ""  # hash of the newest text
    pieces: set[str] = field(default_factory=set)
    is_complete: bool = False


class Transfers:
    """The open transfers, oldest first."""

    def __init__(self) -> None:
        self._open: dict[str, Transfer] = {}

    def add(self, text: str, signature: str) -> str:
        """Take the encoder's next batch, signed; the transfer's id. One that continues no open transfer is left out."""
        batch, found = Batch.from_json(text), text_hash(text)
        if batch.number == 0:
            self._open.pop(found, None)
            self._open[found] = Transfer(found, batch)
            while len(self._open) > MOST_OPEN:
                del self._open[next(iter(self._open))]
        transfer = self._open.get(found) or next((one for one in self._open.values() if one.last == batch.previous), None)
        if transfer is None:
            return ""
        transfer.documents.append((text, signature))
        transfer.last = found
        transfer.pieces |= {piece.digest for piece in batch.pieces}
        transfer.is_complete = batch.is_last
        return transfer.id

    def get(self, job_id: str, transfer: str) -> Transfer | None:
        """An open transfer of the job."""
        found = self._open.get(transfer)
        return found if found is not None and found.first.job_id == job_id else None

    def is_open(self, transfer: str) -> bool:
        """Whether it is under way."""
        return transfer in self._open

    def deltas(self, job_id: str) -> list[Transfer]:
        """What holders of the base may fetch already."""
        return [one for one in self._open.values() if one.first.job_id == job_id and one.first.base_digest is not None]

    def names(self, job_id: str, digest: str) -> bool:
        """Whether a piece is part of an open transfer of the job."""
        return any(digest in one.pieces for one in self._open.values() if one.first.job_id == job_id)

    def close(self, job_id: str) -> list[str]:
        """The rows say it all now, or the encoder gave up. The ids that were open."""
        gone = [one.id for one in self._open.values() if one.first.job_id == job_id]
        for transfer in gone:
            del self._open[transfer]
        return gone
