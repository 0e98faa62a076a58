"""What a bulk node tells its owner, in order, from one thread of its own."""

from __future__ import annotations

from dataclasses import dataclass

from p2p.domain.batches import Batch
from p2p.domain.manifest import Piece


@dataclass(frozen=True, slots=True)
class BatchSeen:
    """A batch was accepted: signed by the coordinator and next in its transfer's chain. `peer` is None for one of the owner's."""

    transfer: str
    batch: Batch
    text: str
    signature: str
    peer: str | None


@dataclass(frozen=True, slots=True)
class PieceStored:
    """A piece came from `peer`, was verified, and is in the store."""

    transfer: str
    index: int
    piece: Piece
    peer: str


@dataclass(frozen=True, slots=True)
class TransferComplete:
    """Every piece of the transfer is in the store and none will be added."""

    transfer: str


@dataclass(frozen=True, slots=True)
class GaveUp:
    """No progress, or the store cannot write: the owner may bring pieces another way and report them with `found`.

    The node goes on trying, unless `is_final`: then only `BulkNode.resume` makes it.
    """

    transfer: str
    reason: str
    is_final: bool = False


@dataclass(frozen=True, slots=True)
class PeerOpened:
    """A connection to `peer` is up; `dialled` from here or not."""

    peer: str
    job_id: str
    dialled: bool


@dataclass(frozen=True, slots=True)
class PeerClosed:
    """The connection to `peer` ended, or a dial failed. While it is a dial target it is dialled again, later and later."""

    peer: str
    job_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerDropped:
    """`peer` takes no part in the transfer for `for_s` seconds, because of what it did."""

    transfer: str
    peer: str
    reason: str
    for_s: float


NodeEvent = BatchSeen | PieceStored | TransferComplete | GaveUp | PeerOpened | PeerClosed | PeerDropped
