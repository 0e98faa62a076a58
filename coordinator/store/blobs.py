"""`ports.Blobs` in a folder: one file per blob, named by its BLAKE3, in 256 sub-folders.

A put returns only when the content and its directory entry are synced; concurrent puts into one sub-folder share a directory
sync. A file under its final name is always whole. After a failed sync nothing found in that sub-folder is taken on trust: it is
written anew, because the next sync may report success for what never reached the disk.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine, Set
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from blake3 import blake3

from coordinator.service.ports import Swept
from p2p.adapters.durable import REAL_FILES, TEMPORARY_SUFFIX, FileLayer, make_directory_durably

T = TypeVar("T")
THREADS = 8  # file operations at once
HASH_INLINE_BYTES = 64 << 10  # larger data is hashed in a thread
_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHELF = re.compile(r"[0-9a-f]{2}")


@dataclass(slots=True)
class _Claim:
    """Exclusive use of one digest, counted so that it can be forgotten."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class FileBlobs:
    """Content-addressed files below `root`. Use from one event loop."""

    def __init__(self, root: Path, files: FileLayer = REAL_FILES) -> None:
        """Make the folder if it is missing, durably. Raises OSError."""
        self._root = root
        self._files = files
        self._threads = asyncio.Semaphore(THREADS)
        self._claims: dict[str, _Claim] = {}
        self._running: set[asyncio.Task[Any]] = set()
        self._syncs = _SharedSyncs(self._threads, files)
        self._shelves: set[Path] = set()  # known to be durable
        self._doubted: set[Path] = set()  # shelves of which a sync failed
        self._shelving = asyncio.Lock()
        make_directory_durably(root, files=files)

    async def put(self, data: bytes) -> str:
        """Store durably; the digest. Raises OSError (ENOSPC: the disk is full); then nothing is promised of the blob.

        Goes on when its caller is cancelled.
        """
        if len(data) <= HASH_INLINE_BYTES:
            digest = blake3(data).hexdigest()
        else:
            digest = await self._in_thread(lambda: blake3(data).hexdigest())
        await self._finish(self._put(digest, data))
        return digest

    async def get(self, digest: str) -> bytes:
        """The bytes, verified. Raises KeyError when absent, ValueError when the file is corrupt or `digest` is none."""
        path = self.path(digest)
        try:
            data = await self._in_thread(path.read_bytes)
        except FileNotFoundError:
            raise KeyError(f"there is no blob {digest}") from None
        found = await self._in_thread(lambda: blake3(data).hexdigest())
        if found != digest:
            raise ValueError(f"blob {digest} is corrupt: its {len(data)} bytes have the digest {found}; check the disk")
        return data

    def path(self, digest: str) -> Path:
        """Where the blob lies or would lie. Raises ValueError for text that is no digest, so that no path comes from a peer."""
        if _DIGEST.fullmatch(digest) is None:
            raise ValueError(f"{digest[:80]!r} is not a blob digest: 64 lower-case hex digits are needed")
        return self._root / digest[:2] / digest

    async def free_bytes(self) -> int:
        """Free space for this process on the disk of the blobs."""
        return (await self._in_thread(lambda: shutil.disk_usage(self._root))).free

    async def remove(self, digest: str) -> bool:
        """Remove a blob; whether it was there. It may come back after a power loss, whole."""
        return (await self._finish(self._remove(digest, float("inf")))).files == 1

    async def sweep(self, keep: Set[str], *, before: float) -> Swept:
        """Remove blobs that are not in `keep` and were last put before `before` (Unix seconds), and old temporary files.

        A blob is put before the rows that name it: read `keep` after choosing `before`, and choose it older than any write can
        last. A put of the same bytes while the sweep runs is safe.
        """
        files = total = 0
        for shelf in await self._in_thread(self._present_shelves):
            for name in await self._in_thread(partial(self._old_names, shelf, before)):
                if name in keep:
                    continue
                swept = await self._finish(self._remove(name, before))
                files, total = files + swept.files, total + swept.bytes
        return Swept(files, total)

    async def _put(self, digest: str, data: bytes) -> None:
        async with self._claimed(digest):
            path = self.path(digest)
            await self._make_shelf(path.parent)
            failures = self._syncs.failures(path.parent)
            await self._in_thread(lambda: self._write(path, data))
            try:
                await self._syncs.sync(path.parent, failures)
            except OSError:
                self._doubted.add(path.parent)
                raise

    async def _make_shelf(self, shelf: Path) -> None:
        """Make a sub-folder durably, once per process: another may have died before its sync."""
        if shelf in self._shelves:
            return
        async with self._shelving:
            if shelf not in self._shelves:
                await self._in_thread(lambda: self._make_durably(shelf))
                self._shelves.add(shelf)

    def _make_durably(self, shelf: Path) -> None:
        self._files.make_dir(shelf)
        try:
            self._files.fsync_dir(shelf.parent)
        except OSError:
            with suppress(OSError):
                self._files.remove_dir(shelf)
            raise

    def _write(self, path: Path, data: bytes) -> None:
        """Put synced content at `path`; its entry is not durable yet."""
        if path.parent not in self._doubted and self._is_there(path, data):
            return
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
        try:
            self._files.write_file(temporary, data)
            self._files.fsync_file(temporary)
            self._files.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                self._files.remove_file(temporary)
            raise

    def _is_there(self, path: Path, data: bytes) -> bool:
        """Whether `path` already holds these bytes, synced and young again; a file that does not is written anew."""
        try:
            if path.stat().st_size != len(data) or path.read_bytes() != data:
                return False
            os.utime(path)
            self._files.fsync_file(path)
        except OSError:
            return False
        return True

    async def _remove(self, name: str, before: float) -> Swept:
        path = self._temporary_path(name) if name.endswith(TEMPORARY_SUFFIX) else self.path(name)
        async with self._claimed(name):
            return await self._in_thread(lambda: self._unlink_old(path, before))

    def _temporary_path(self, name: str) -> Path:
        """Where `put` leaves `.DIGEST.RANDOM.tmp` when the process dies."""
        return self._root / name[1:3] / name

    def _unlink_old(self, path: Path, before: float) -> Swept:
        try:
            found = path.stat()
        except FileNotFoundError:
            return Swept()
        if found.st_mtime >= before:
            return Swept()
        self._files.remove_file(path)
        return Swept(1, found.st_size)

    def _present_shelves(self) -> list[Path]:
        return sorted(path for path in self._root.iterdir() if _SHELF.fullmatch(path.name))

    def _old_names(self, shelf: Path, before: float) -> list[str]:
        """Blobs and temporary files last touched before then; other people's files are left alone."""
        ours = (path for path in shelf.iterdir() if _DIGEST.fullmatch(path.name) or path.name.endswith(TEMPORARY_SUFFIX))
        return sorted(path.name for path in ours if path.stat().st_mtime < before)

    @asynccontextmanager
    async def _claimed(self, name: str) -> AsyncIterator[None]:
        """Nobody else puts or removes this blob meanwhile."""
        claim = self._claims.setdefault(name, _Claim())
        claim.users += 1
        try:
            async with claim.lock:
                yield
        finally:
            claim.users -= 1
            if not claim.users:
                del self._claims[name]

    async def _in_thread(self, work: Callable[[], T]) -> T:
        async with self._threads:
            return await asyncio.to_thread(work)

    async def _finish(self, work: Coroutine[Any, Any, T]) -> T:
        """Await work that goes on when the caller is cancelled."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # seen: its caller may be gone


class _SharedSyncs:
    """Directory syncs, one at a time per directory; whoever asks while one runs shares the next."""

    def __init__(self, threads: asyncio.Semaphore, files: FileLayer) -> None:
        self._threads = threads
        self._files = files
        self._locks: dict[Path, asyncio.Lock] = {}  # one per shelf
        self._open: dict[Path, asyncio.Task[None]] = {}  # rounds that have not begun: still joinable
        self._failures: dict[Path, int] = {}

    def failures(self, directory: Path) -> int:
        """How many syncs of it have failed: ask before changing an entry, and pass the answer to `sync`."""
        return self._failures.get(directory, 0)

    async def sync(self, directory: Path, failures: int) -> None:
        """Return once entries changed before this call, and after `failures` was asked, are durable. Raises OSError."""
        round_ = self._open.get(directory)
        if round_ is None:
            round_ = asyncio.create_task(self._round(directory))
            self._open[directory] = round_
        await asyncio.shield(round_)
        if self.failures(directory) != failures:
            raise OSError(errno.EIO, "an earlier sync of the directory failed while the entry was new", str(directory))

    async def _round(self, directory: Path) -> None:
        async with self._locks.setdefault(directory, asyncio.Lock()), self._threads:
            del self._open[directory]
            try:
                await asyncio.to_thread(self._files.fsync_dir, directory)
            except OSError:
                self._failures[directory] = self.failures(directory) + 1
                raise
