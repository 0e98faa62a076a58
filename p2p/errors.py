"""What can go wrong with weights on the wire.

SwarmError
├── ManifestError   a manifest, its signature, or an edge in it cannot be used
├── SnapshotError   a directory cannot be published: its files are not what a snapshot is made of
├── PieceCorrupt    bytes do not match the piece they were sent or stored as
├── PieceAbsent     a source does not hold a piece (yet): no fault of anyone
├── FetchFailed     no source brought the pieces in time; the sources' last errors are named
├── ApplyFailed     pieces could not be turned into a snapshot; what was there before is kept
└── TicketError     a ticket or the proof of its holder is not valid here and now
"""

from __future__ import annotations


class SwarmError(Exception):
    """Root of this package's errors; the message says what failed, with which value, and what to do."""


class ManifestError(SwarmError):
    """The manifest is not one: malformed, above a limit, wrongly signed, or without a usable edge."""


class SnapshotError(SwarmError):
    """The directory does not hold a snapshot that can be published."""


class PieceCorrupt(SwarmError):
    """The bytes have another size or digest than the piece."""


class PieceAbsent(SwarmError):
    """The source does not hold the piece now."""


class FetchFailed(SwarmError):
    """The pieces did not come."""


class ApplyFailed(SwarmError):
    """The snapshot could not be assembled; nothing was changed."""


class TicketError(SwarmError):
    """The ticket or its proof is refused."""
