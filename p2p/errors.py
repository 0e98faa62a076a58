"""What can go wrong with weights on the wire.

SwarmError
├── ManifestError   a manifest, its signature, or an edge in it cannot be used
├── SnapshotError   a directory cannot be published: its files are not what a snapshot is made of
├── BatchRefused    a signed batch of pieces does not continue its transfer's chain
├── PieceCorrupt    bytes do not match the piece they were sent or stored as
├── PieceAbsent     a source does not hold a piece (yet): no fault of anyone
├── FetchFailed     no source brought the pieces in time; the sources' last errors are named
├── ApplyFailed     pieces could not be turned into a snapshot; what was there before is kept
├── WeightsFileRefused  a weights delta file is damaged, made for another base, or none
├── TicketError     a ticket or the proof of its holder is not valid here and now
├── CounterUnreadable  the file that counts the month's uploads is damaged, and a cap depends on it
├── FrameRefused    a peer's frame on a bulk connection is malformed, above a limit, or not due: the connection ends
├── PeerLost        a bulk connection could not be made, or ended; the message says why
└── ControlError    a control message could not be carried
    ├── ControlMissing     libp2p is not installed here
    ├── ControlDown        the control network does not run now
    ├── ControlUnreachable no connection to the peer could be made
    ├── ControlTimeout     no answer within the deadline
    └── ControlRefused     a message is above a limit or malformed, or the other side refused it in words
"""

from __future__ import annotations


class SwarmError(Exception):
    """Root of this package's errors; the message says what failed, with which value, and what to do."""


class ManifestError(SwarmError):
    """The manifest is not one: malformed, above a limit, wrongly signed, or without a usable edge."""


class BatchRefused(SwarmError):
    """The batch is forged, foreign, out of order, above a limit, or says something else than one that was accepted."""


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


class CounterUnreadable(SwarmError):
    """How much of the month's uploads is used up cannot be known."""


class WeightsFileRefused(SwarmError):
    """The file is not a weights delta that can be read or applied here."""


class TicketError(SwarmError):
    """The ticket or its proof is refused."""


class ControlError(SwarmError):
    """A control message could not be carried: use the other way, or try again later."""


class ControlMissing(ControlError):
    """libp2p is not installed."""


class ControlDown(ControlError):
    """The control network was not started, has died, or was closed."""


class ControlUnreachable(ControlError):
    """No connection to the peer."""


class ControlTimeout(ControlError):
    """No answer in time."""


class ControlRefused(ControlError):
    """A message above a limit, malformed, or refused by the other side."""


class FrameRefused(SwarmError):
    """A frame breaks the protocol; the connection cannot go on."""


class PeerLost(SwarmError):
    """A bulk connection ended, or was refused."""
