"""Files that survive a power loss, or are not there: write, sync, rename, sync the directory.

Every change to the disk goes through a `FileLayer`, so that tests can inject a disk that loses what was not synced.
Reading needs no layer. What is promised: once one of these functions returns, the new content is durable; if the power
fails before that, the old content or the new one is found, whole, and never a mixture.
"""

from __future__ import annotations

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from blake3 import blake3

TEMPORARY_SUFFIX = ".tmp"
HASH_BLOCK_BYTES = 1 << 20
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


class FileLayer(Protocol):
    """The changes a disk can make. Each raises OSError when it fails; none is durable before its fsync."""

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Create or truncate `path` and write `data`."""
        ...

    def write_chunks(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        """`write_file` of the chunks one after another, without holding them all."""
        ...

    def fsync_file(self, path: Path) -> None:
        """Make the content of `path` durable. After an error the content is unknown: write it anew, never sync again."""
        ...

    def fsync_dir(self, path: Path) -> None:
        """Make the entries of the directory durable: names made, renamed or removed in it."""
        ...

    def make_dir(self, path: Path) -> None:
        """Create one directory; one that exists already is no error."""
        ...

    def replace(self, source: Path, target: Path) -> None:
        """Rename atomically within one file system; a file at `target` is replaced, a non-empty directory is an error."""
        ...

    def exchange(self, one: Path, other: Path) -> None:
        """Swap two names atomically. Raises OSError(ENOTSUP) where the system cannot."""
        ...

    def remove_file(self, path: Path) -> None:
        """Remove a file; one that is absent is no error."""
        ...

    def remove_dir(self, path: Path) -> None:
        """Remove an empty directory."""
        ...

    def remove_tree(self, path: Path) -> None:
        """Remove a directory and all in it; one that is absent is no error."""
        ...


class RealFiles:
    """The operating system's files."""

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        with path.open("wb") as out:
            out.write(data)

    def write_chunks(self, path: Path, chunks: Iterable[bytes | memoryview]) -> None:
        with path.open("wb") as out:
            for chunk in chunks:
                out.write(chunk)

    def fsync_file(self, path: Path) -> None:
        _fsync(path, os.O_RDONLY)

    def fsync_dir(self, path: Path) -> None:
        _fsync(path, os.O_RDONLY | os.O_DIRECTORY)

    def make_dir(self, path: Path) -> None:
        path.mkdir(exist_ok=True)

    def replace(self, source: Path, target: Path) -> None:
        source.replace(target)

    def exchange(self, one: Path, other: Path) -> None:
        _exchange(one, other)

    def remove_file(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def remove_dir(self, path: Path) -> None:
        path.rmdir()

    def remove_tree(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(path)


REAL_FILES: FileLayer = RealFiles()


def write_durably(path: Path, data: bytes | memoryview, *, files: FileLayer = REAL_FILES) -> None:
    """Put `data` at `path`, whole and durable on return; a missing parent directory is made.

    Raises OSError; then `path` holds its old content or the new one, whole, and the temporary file is gone if the disk allows it.
    """
    make_directory_durably(path.parent, files=files)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        files.write_file(temporary, data)
        files.fsync_file(temporary)
        files.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.fsync_dir(path.parent)


def make_directory_durably(path: Path, *, files: FileLayer = REAL_FILES) -> None:
    """Make `path` and its missing ancestors, each entry durable on return. One that exists is taken as durable.

    Raises OSError; a directory whose entry could not be synced is taken back, so that the next call makes it again.
    """
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        files.make_dir(directory)
        try:
            files.fsync_dir(directory.parent)
        except OSError:
            with suppress(OSError):
                files.remove_dir(directory)
            raise


def replace_directory_durably(temporary: Path, final: Path, *, files: FileLayer = REAL_FILES) -> None:
    """Sync every file and directory below `temporary`, then rename it to `final`; durable on return.

    Both must lie on one file system. An older directory at `final` is swapped out atomically and removed. Only where the
    system cannot swap names (not Linux) is it renamed aside first: a crash around those two renames can leave `final` absent,
    with the older directory beside it as `NAME.RANDOM.old`. Raises OSError; `final` is then the old directory or the new one, whole.
    """
    make_directory_durably(final.parent, files=files)
    sync_tree(temporary, files=files)
    if not final.is_dir():
        files.replace(temporary, final)
        _sync_parents(temporary, final, files)
        return
    replaced = _swap(temporary, final, files)
    _sync_parents(temporary, final, files)
    files.remove_tree(replaced)


def sync_tree(directory: Path, *, files: FileLayer = REAL_FILES) -> None:
    """Make the content of a directory durable, files first, then directories from the deepest up (its own name excepted)."""
    for path, is_directory in _bottom_up(directory):
        if is_directory:
            files.fsync_dir(path)
        else:
            files.fsync_file(path)


def hash_file(path: Path) -> str:
    """BLAKE3 of a file in hex, read in blocks."""
    state = blake3()
    with path.open("rb") as source:
        while block := source.read(HASH_BLOCK_BYTES):
            state.update(block)
    return state.hexdigest()


def _bottom_up(directory: Path) -> Iterator[tuple[Path, bool]]:
    """Every regular file and directory below and including `directory`; (path, is a directory). Links are not followed."""
    for root, _, names in os.walk(directory, topdown=False):
        here = Path(root)
        for name in names:
            if not (here / name).is_symlink():
                yield here / name, False
        yield here, True


def _swap(temporary: Path, final: Path, files: FileLayer) -> Path:
    """Put `temporary` at `final`, which exists; where the older directory lies now."""
    try:
        files.exchange(temporary, final)
    except OSError as error:
        if error.errno not in (errno.ENOTSUP, errno.EINVAL, errno.ENOSYS):
            raise
    else:
        return temporary
    aside = final.with_name(f"{final.name}.{secrets.token_hex(8)}.old")
    files.replace(final, aside)
    files.fsync_dir(final.parent)  # the older directory has its new name before it loses the old one for good
    files.replace(temporary, final)
    return aside


def _sync_parents(temporary: Path, final: Path, files: FileLayer) -> None:
    """Make both ends of a rename durable, the new name first."""
    files.fsync_dir(final.parent)
    if temporary.parent != final.parent:
        files.fsync_dir(temporary.parent)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(one: Path, other: Path) -> None:
    """renameat2(RENAME_EXCHANGE): Python has no call for it."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        raise OSError(errno.ENOTSUP, "this system cannot swap two names", str(other))
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(other))
