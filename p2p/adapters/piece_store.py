"""Verified pieces on disk, by digest. A piece is whole or absent; whatever is kept survives a restart, so a fetch resumes."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from pathlib import Path

from p2p.adapters.durable import REAL_FILES, TEMPORARY_SUFFIX, FileLayer, RealFiles, write_durably
from p2p.codec import pieces
from p2p.domain.manifest import Piece
from p2p.errors import PieceCorrupt

_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnsyncedFiles(RealFiles):
    """Files that may be lost with the power: for a receiver, which verifies what it reads and can fetch again."""

    def fsync_file(self, path: Path) -> None:
        """Nothing: see the class."""

    def fsync_dir(self, path: Path) -> None:
        """Nothing: see the class."""


UNSYNCED_FILES: FileLayer = UnsyncedFiles()


class PieceStore:
    """A folder of pieces. Any number of threads may use it at once, and so may several processes."""

    def __init__(self, root: Path, *, files: FileLayer = REAL_FILES) -> None:
        self.root = root
        self._files = files

    def path(self, digest: str) -> Path:
        """Where the piece lies if it is here. Raises ValueError for what is not a digest: no other name becomes a path."""
        if not _DIGEST.fullmatch(digest):
            raise ValueError(f"{digest[:80]!r} is not a BLAKE3 digest of 64 lower-case hex digits")
        return self.root / digest[:2] / digest

    def has(self, digest: str) -> bool:
        """Whether the piece was stored."""
        return self.path(digest).is_file()

    def put(self, piece: Piece, data: bytes | bytearray) -> None:
        """Store `data` if it is the piece; one that is here already is left alone. Raises PieceCorrupt, OSError."""
        pieces.verify(piece, data)
        path = self.path(piece.digest)
        if not path.is_file():
            write_durably(path, memoryview(data), files=self._files)

    def read(self, digest: str) -> bytes:
        """The piece, verified. Raises KeyError if absent; PieceCorrupt if the disk changed it, and then it is removed."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(digest) from None
        try:
            pieces.verify(Piece(digest, len(data)), data)
        except PieceCorrupt as error:
            self.remove(digest)
            raise PieceCorrupt(f"piece {digest} was damaged on disk and is removed: fetch it again") from error
        return data

    def remove(self, digest: str) -> None:
        """Forget the piece; one that is absent is no error."""
        self._files.remove_file(self.path(digest))

    def digests(self) -> Iterator[str]:
        """Every piece that is here."""
        return (path.name for path in self.root.glob("??/*") if _DIGEST.fullmatch(path.name))

    def keep_only(self, digests: Collection[str]) -> int:
        """Remove every other piece; how many went. Nothing may be publishing or fetching into the store meanwhile."""
        doomed = [digest for digest in self.digests() if digest not in digests]
        for digest in doomed:
            self.remove(digest)
        return len(doomed)

    def sweep(self) -> int:
        """Remove what writes that were killed left behind; how many. Call it before anything writes to the store."""
        left = [path for path in self.root.glob(f"??/.*{TEMPORARY_SUFFIX}") if path.is_file()]
        for path in left:
            self._files.remove_file(path)
        return len(left)
