"""Law 11: one writer per store, for as long as the writer's process lives.

SQLite: an exclusive `flock` on a file beside the database, released by the kernel when the process ends. PostgreSQL: a session
advisory lock on the very connection that writes, so that nothing can be committed without it.
"""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from typing import Protocol

from coordinator.store.errors import StoreEnded, StoreLocked
from coordinator.store.links import Link

ADVISORY_KEY = 0x6563_686F_3277_7231  # "echo2wr1"; advisory keys are per database
_HOLDER = """
SELECT a.application_name, l.pid, coalesce(host(a.client_addr), 'a local socket')
FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid JOIN pg_database d ON d.oid = l.database
WHERE l.locktype = 'advisory' AND l.granted AND d.datname = current_database()
  AND ((l.classid::bigint << 32) | l.objid::bigint) = $1::bigint
"""


class WriterLock(Protocol):
    """Proof that no other process writes."""

    def check(self) -> None:
        """Raise StoreEnded when the lock is no longer ours."""
        ...

    def release(self) -> None: ...


class FileLock:
    """An exclusive lock on a file; the file stays, with the last holder's process id in it."""

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises StoreLocked, naming the holder."""
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 256).decode(errors="replace").strip() or "an unknown process"
            os.close(self._descriptor)
            raise StoreLocked(f"{path} is held by {holder}: another coordinator uses this store, stop it first") from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def check(self) -> None:
        """The lock counts only while its file is the one at the path: whoever removes the file lets a second writer in."""
        try:
            there = self._path.stat()
        except FileNotFoundError:
            there = None
        mine = os.fstat(self._descriptor)
        if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
            raise StoreEnded(f"{self._path} was removed or replaced: another coordinator may write, restart this one")

    def release(self) -> None:
        os.close(self._descriptor)


class AdvisoryLock:
    """PostgreSQL's session lock on the writing connection; it ends with the connection."""

    def __init__(self, link: Link) -> None:
        self._link = link

    @classmethod
    async def take(cls, link: Link) -> AdvisoryLock:
        """Take the lock on `link`. Raises StoreLocked, naming the holder."""
        rows = await link.fetch("SELECT pg_try_advisory_lock($1::bigint)", (ADVISORY_KEY,))
        if not rows[0][0]:
            raise StoreLocked(f"the database is held by {await _holder(link)}: another coordinator uses it, stop it first")
        return cls(link)

    def check(self) -> None:
        if self._link.is_closed():
            raise StoreEnded("the connection that held the writer's lock is gone: another coordinator may write, restart this one")

    def release(self) -> None:
        """Closing the link releases it."""


async def _holder(link: Link) -> str:
    rows = await link.fetch(_HOLDER, (ADVISORY_KEY,))
    if not rows:
        return "a process that has just ended"
    name, backend, address = rows[0]
    return f"{name or 'an unnamed process'} (server process {backend}, from {address})"


def lock_path(database: Path) -> Path:
    """The lock file of an SQLite database."""
    return database.with_name(f"{database.name}.lock")
