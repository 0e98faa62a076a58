"""Verified pieces on disk, by digest. A piece is whole or absent; whatever is kept survives a restart, so a fetch resumes."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

from p2p.adapters.durable import REAL_FILES, TEMPORARY_SUFFIX, FileLayer, RealFiles, make_directory_durably
from p2p.codec import pieces
from p2p.domain.manifest import Piece
from p2p.errors import PieceCorrupt

_DIGEST = re.compile(r"[0-9a-f]{64}")


class UnsyncedFiles(RealFiles):
    """Files that may be lost with the power: for a receiver, which verifies what it reads and can fetch again."""

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Four system calls fewer than a file object makes; there are many pieces, and small ones."""
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            done = os.write(descriptor, data)
            while done < len(data):
                done += os.write(descriptor, data[done:])
        finally:
            os.close(descriptor)

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
        self._serial = count()
        self._sound: set[str] = set()  # pieces that this process read and verified
        self._knows_cached = True  # the file system can tell whether reading would wait

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
        self.keep(piece, data)

    def keep(self, piece: Piece, data: bytes | bytearray) -> None:
        """`put` of bytes that were verified. Raises OSError."""
        path = self.path(piece.digest)
        if path.exists():
            return
        files, folder = self._files, path.parent
        temporary = folder / f".{piece.digest}.{os.getpid()}-{next(self._serial)}{TEMPORARY_SUFFIX}"
        view = memoryview(data)
        try:
            try:
                files.write_file(temporary, view)
            except FileNotFoundError:
                make_directory_durably(folder, files=files)
                files.write_file(temporary, view)
            files.fsync_file(temporary)
            files.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                files.remove_file(temporary)
            raise
        files.fsync_dir(folder)

    def load(self, piece: Piece, buffer: bytearray, *, waits: bool = True) -> None:
        """Fill `buffer`, of the piece's size; it is verified when this process reads it for the first time. Raises as `read`.

        Unless it `waits` for the disk: then OSError when the piece is not in the system's cache, or that cannot be known.
        """
        if not waits and not self._knows_cached:
            raise BlockingIOError("this file system does not tell whether a read would wait")
        try:
            descriptor = os.open(self.path(piece.digest), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise KeyError(piece.digest) from None
        try:
            count = os.preadv(descriptor, [buffer], 0, 0 if waits else os.RWF_NOWAIT)
            is_whole = count == piece.size and os.fstat(descriptor).st_size == piece.size
        except OSError as error:
            self._knows_cached = self._knows_cached and error.errno != errno.EOPNOTSUPP
            raise
        finally:
            os.close(descriptor)
        if not is_whole and not waits:
            raise BlockingIOError(f"{count} bytes of piece {piece.digest} were in memory")
        if is_whole and piece.digest in self._sound:
            return
        try:
            pieces.verify(piece, buffer if is_whole else b"")
        except PieceCorrupt as error:
            raise self._damaged(piece.digest) from error
        self._sound.add(piece.digest)

    def read(self, digest: str) -> bytes:
        """The piece, verified. Raises KeyError if absent; PieceCorrupt if the disk changed it, and then it is removed."""
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(digest) from None
        try:
            pieces.verify(Piece(digest, len(data)), data)
        except PieceCorrupt as error:
            raise self._damaged(digest) from error
        return data

    def remove(self, digest: str) -> None:
        """Forget the piece; one that is absent is no error."""
        self._sound.discard(digest)
        self._files.remove_file(self.path(digest))

    def forget(self, digests: Iterable[str]) -> None:
        """Remember of these no more that they were verified: another process may remove them, and names of pieces never end."""
        self._sound.difference_update(digests)

    def _damaged(self, digest: str) -> PieceCorrupt:
        self.remove(digest)
        return PieceCorrupt(f"piece {digest} was damaged on disk and is removed: fetch it again")

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
