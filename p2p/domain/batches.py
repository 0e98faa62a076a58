"""Signed batches of pieces: an edge's pieces become known, and travel, while later shards are still being encoded.

A transfer is one edge's row of pieces, indexed from 0 in order. Its batches form a chain: each names the hash of the text before it, so
that whoever accepted one knows that all before it are the coordinator's. The transfer's id is the hash of its first batch's text.
A batch is canonical JSON, signed as text (`signing.py`) and specified in PROTOCOL.md. The manifest closes the chain: it names the
transfer and all its pieces, and nothing is applied before it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from blake3 import blake3

from p2p.domain import strict_json as js
from p2p.domain.manifest import (
    DIGEST,
    ENCODING,
    JOB,
    MAX_PIECES,
    MAX_TOTAL_BYTES,
    Piece,
    most_edge_bytes,
    plain_pieces,
    read_pieces,
)
from p2p.domain.signing import check_batch
from p2p.errors import BatchRefused

FORMAT = "echo2-batch-1"
MAX_TEXT = 48 << 10  # characters: with its signature it fits a control message of 64 KB
MAX_BATCH_PIECES = 512
MAX_EDGE_BYTES = most_edge_bytes(MAX_TOTAL_BYTES)

_PREVIOUS = re.compile(r"|[0-9a-f]{64}")
_KEYS = frozenset({"format", "job_id", "version", "encoding", "base_digest", "number", "previous", "pieces", "is_last"})


def text_hash(text: str) -> str:
    """BLAKE3 (hex) of a batch's text: what the next one names as `previous`, and of the first one the transfer's id."""
    return blake3(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Batch:
    """The next pieces of one edge. `previous` is the hash of the batch before, "" for number 0. The last one may hold none."""

    job_id: str
    version: int
    encoding: str
    base_digest: str | None
    number: int
    previous: str
    pieces: tuple[Piece, ...]
    is_last: bool

    @property
    def edge(self) -> tuple[str, int, str, str | None]:
        """What all batches of a transfer have in common: job, version, encoding, base digest."""
        return self.job_id, self.version, self.encoding, self.base_digest

    def to_json(self) -> str:
        """The canonical text, the one that is signed."""
        return js.canonical(
            {
                "format": FORMAT,
                "job_id": self.job_id,
                "version": self.version,
                "encoding": self.encoding,
                "base_digest": self.base_digest,
                "number": self.number,
                "previous": self.previous,
                "pieces": plain_pieces(self.pieces),
                "is_last": self.is_last,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Batch:
        """Read and check a batch. Raises BatchRefused."""
        try:
            batch = _batch(js.parse(text, limit=MAX_TEXT))
            if batch.to_json() != text:
                raise js.JsonRefused("the text is not canonical JSON (sorted keys, no spaces, ASCII): send it exactly as signed")
        except js.JsonRefused as error:
            raise BatchRefused(f"the batch is refused: {error}") from error
        return batch


class Chain:
    """The batches of one transfer that were accepted here, in order. Any number of peers may bring them, any number of times."""

    def __init__(self, transfer: str, public_key: str, *, most_bytes: int = MAX_EDGE_BYTES) -> None:
        """`public_key` (hex) is the coordinator's; `most_bytes` what the whole edge may take here."""
        self.transfer = transfer
        self._public_key = public_key
        self._most_bytes = most_bytes
        self._documents: list[tuple[str, str]] = []
        self._hashes: list[str] = []
        self._pieces: list[Piece] = []
        self._sizes: dict[str, int] = {}
        self._bytes = 0
        self._first: Batch | None = None
        self._is_complete = False

    @property
    def first(self) -> Batch | None:
        """The batch that says which edge this is; None before it came."""
        return self._first

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """The row as far as it is known."""
        return tuple(self._pieces)

    @property
    def is_complete(self) -> bool:
        """Whether the last batch came."""
        return self._is_complete

    @property
    def next_number(self) -> int:
        """The batch to ask for next."""
        return len(self._documents)

    def documents(self, since: int = 0) -> tuple[tuple[str, str], ...]:
        """(text, signature) of the accepted batches from number `since` on: what is passed on to others."""
        return tuple(self._documents[since:])

    def accept(self, text: str, signature: str) -> tuple[Piece, ...]:
        """Take the next batch; the pieces that it adds (none for a batch that was accepted before). Raises BatchRefused.

        A refusal changes nothing. The signature is checked before anything is read, and the size before that.
        """
        if len(text) > MAX_TEXT:
            raise BatchRefused(f"the batch holds {len(text)} characters, above the limit of {MAX_TEXT}")
        check_batch(self._public_key, text, signature)
        batch, found = Batch.from_json(text), text_hash(text)
        if batch.number < len(self._hashes):
            return self._repeated(batch, found)
        self._check_place(batch, found)
        self._check_size(batch)
        self._documents.append((text, signature))
        self._hashes.append(found)
        self._pieces += batch.pieces
        self._sizes.update((piece.digest, piece.size) for piece in batch.pieces)
        self._bytes += sum(piece.size for piece in batch.pieces)
        self._first = self._first or batch
        self._is_complete = batch.is_last
        return batch.pieces

    def _repeated(self, batch: Batch, found: str) -> tuple[Piece, ...]:
        if found != self._hashes[batch.number]:
            raise BatchRefused(
                f"batch {batch.number} of transfer {self.transfer[:12]} came before with other content: "
                "fetch by the manifest, and report the coordinator's key as doubtful"
            )
        return ()

    def _check_place(self, batch: Batch, found: str) -> None:
        """Whether the batch is the next one of this very transfer."""
        place = f"batch {batch.number} of transfer {self.transfer[:12]}"
        if self._is_complete:
            raise BatchRefused(f"{place} follows the last one, number {len(self._hashes) - 1}: drop it")
        if batch.number > len(self._hashes):
            raise BatchRefused(f"{place} is out of order: number {len(self._hashes)} is next, ask for it first")
        if self._first is None:
            if found != self.transfer:
                raise BatchRefused(
                    f"the first batch has hash {found[:12]}, not the transfer's {self.transfer[:12]}: it is another's"
                )
        elif batch.edge != self._first.edge:
            raise BatchRefused(f"{place} is of edge {batch.edge}, the transfer of {self._first.edge}: it is another's")
        elif batch.previous != self._hashes[-1]:
            raise BatchRefused(
                f"{place} follows a batch {batch.previous[:12]}, here {self._hashes[-1][:12]} is before it: it is another's"
            )

    def _check_size(self, batch: Batch) -> None:
        """Whether the edge stays within its limits."""
        place = f"transfer {self.transfer[:12]}"
        count, size = len(self._pieces) + len(batch.pieces), self._bytes + sum(piece.size for piece in batch.pieces)
        if count > MAX_PIECES or size > self._most_bytes:
            raise BatchRefused(
                f"{place} would hold {count} pieces of {size} bytes; at most {MAX_PIECES} of {self._most_bytes} are allowed"
            )
        for piece in batch.pieces:
            if self._sizes.get(piece.digest, piece.size) != piece.size:
                raise BatchRefused(f"{place} gives piece {piece.digest} two sizes: {self._sizes[piece.digest]} and {piece.size}")


def _batch(value: object) -> Batch:
    fields = js.record(value, "batch", _KEYS)
    if fields["format"] != FORMAT:
        js.refuse("format", fields["format"], repr(FORMAT))
    base, is_last = fields["base_digest"], fields["is_last"]
    if type(is_last) is not bool:
        js.refuse("is_last", is_last, "true or false")
    batch = Batch(
        job_id=js.text(fields["job_id"], "job_id", JOB),
        version=js.integer(fields["version"], "version", least=0, most=2**53),
        encoding=js.text(fields["encoding"], "encoding", ENCODING),
        base_digest=None if base is None else js.text(base, "base_digest", DIGEST),
        number=js.integer(fields["number"], "number", least=0, most=MAX_PIECES),
        previous=js.text(fields["previous"], "previous", _PREVIOUS),
        pieces=read_pieces(fields["pieces"], "pieces", limit=MAX_EDGE_BYTES, most=MAX_BATCH_PIECES),
        is_last=is_last,
    )
    if (batch.number == 0) != (batch.previous == ""):
        js.refuse("previous", batch.previous, 'the hash of the batch before, and "" for number 0 only')
    if not batch.pieces and not batch.is_last:
        js.refuse("pieces", [], "one piece or more: only the last batch may hold none")
    return batch
