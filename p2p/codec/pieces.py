"""Cutting a stream of bytes into pieces, naming them, and putting the stream together again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from blake3 import blake3

from p2p.codec.layout import Chunk, view
from p2p.domain.manifest import Piece
from p2p.errors import ApplyFailed, PieceCorrupt

PIECE_BYTES = 1 << 20
SMALL_PIECE_BYTES = 256 << 10
SMALL_EDGE_BYTES = 16_000_000


def name(data: Chunk) -> Piece:
    """The piece that `data` is."""
    plain = view(data)
    return Piece(blake3(plain).hexdigest(), plain.nbytes)


def verify(piece: Piece, data: bytes | bytearray) -> None:
    """Return if `data` is the piece; raise PieceCorrupt if not. The size is compared before anything is hashed."""
    if len(data) != piece.size:
        raise PieceCorrupt(f"piece {piece.digest} must hold {piece.size} bytes, got {len(data)}")
    found = blake3(data).hexdigest()
    if found != piece.digest:
        raise PieceCorrupt(f"piece {piece.digest} was asked, bytes of {found} came")


def cut(stream: Iterable[Chunk]) -> Iterator[bytes]:
    """The stream in pieces: 1 MiB each, 256 KiB if it holds less than 16 MB in all; the last one may be shorter.

    The size is settled once 16 MB or the end were seen, so at most that much waits in memory.
    """
    buffer = bytearray()
    size: int | None = None
    for chunk in stream:
        buffer += view(chunk)
        if size is None and len(buffer) < SMALL_EDGE_BYTES:
            continue
        size = PIECE_BYTES
        yield from _whole(buffer, size)
    yield from _whole(buffer, size or SMALL_PIECE_BYTES)
    if buffer:
        yield bytes(buffer)


def cut_file(data: bytes) -> list[bytes]:
    """A small file in pieces of 1 MiB, whatever its size: files shared by versions are then shared pieces."""
    return [data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES)]


class Reader:
    """Reads exact lengths from a stream of chunks; holds no more than one request and one chunk."""

    def __init__(self, chunks: Iterable[Chunk]) -> None:
        self._chunks = iter(chunks)
        self._held = bytearray()

    def take(self, length: int, what: str) -> bytes:
        """The next `length` bytes. Raises ApplyFailed if the stream ends before."""
        while len(self._held) < length:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise ApplyFailed(f"the edge ends {length - len(self._held)} bytes short in {what}")
            self._held += view(chunk)
        taken = bytes(memoryview(self._held)[:length])
        del self._held[:length]
        return taken

    def finish(self) -> None:
        """Raise ApplyFailed if anything is left."""
        if self._held or next(self._chunks, None) is not None:
            raise ApplyFailed("bytes follow the edge's last shard")


def _whole(buffer: bytearray, size: int) -> Iterator[bytes]:
    """Take whole pieces off the front of the buffer."""
    whole = len(buffer) - len(buffer) % size
    for start in range(0, whole, size):
        yield bytes(memoryview(buffer)[start : start + size])
    del buffer[:whole]
