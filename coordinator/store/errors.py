"""What the store can refuse or fail with.

StoreError
├── StoreLocked      another process writes to this store
├── StoreBusy        no room or no time left (also a TimeoutError)
├── StoreEnded       the store was closed or lost its lock or connection (also a ConnectionError)
├── StoreFull        the disk is full (also an OSError, ENOSPC)
├── SchemaMismatch   the tables are not those of this release
├── Conflict         a unique column already has that value
├── InvalidRow       a value that cannot be stored (also a ValueError)
└── InvalidQuery     a field or filter that does not exist (also a ValueError)

The second bases let callers that do not know this package tell "try again" and "disk full" from a fault.
"""

from __future__ import annotations

import errno


class StoreError(Exception):
    """Root of every error of the store."""


class StoreLocked(StoreError):
    """Another process holds the writer's lock (one writer per store)."""


class StoreBusy(StoreError, TimeoutError):
    """A queue was full or a deadline passed; nothing was written. Try again later."""


class StoreEnded(StoreError, ConnectionError):
    """This store can write no more: it was closed, or lost what made it the only writer. Open it anew."""


class StoreFull(StoreError, OSError):
    """The disk that holds the rows is full; nothing was written."""

    def __init__(self, message: str) -> None:
        super().__init__(errno.ENOSPC, message)


class SchemaMismatch(StoreError):
    """The database's tables are older or newer than this release's."""


class Conflict(StoreError):
    """A row would repeat a value of a unique column."""


class InvalidRow(StoreError, ValueError):
    """A value cannot be stored or read back; names the row's kind and field."""


class InvalidQuery(StoreError, ValueError):
    """A kind, field, filter or order that does not exist."""
