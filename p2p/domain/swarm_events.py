"""What a dissemination policy is told, and what it answers: one policy object per transfer and node.

A transfer is one edge's row of pieces, indexed from 0; the row grows while later shards are still being encoded. Whoever drives the
policy (sockets in production, a simulated network in tests) performs the instructions and reports what became of them.
Times are seconds, rates bytes a second, sizes bytes. Masks are ints with bit i for piece i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

# --- events


@dataclass(frozen=True, slots=True)
class Opened:
    """A connection to `peer` is up and carries pieces both ways. `uplink` is its last measured or advertised upload rate."""

    peer: str
    uplink: float
    rtt_s: float
    is_seeder: bool = False


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection is gone; whatever was asked or being sent there is lost."""

    peer: str


@dataclass(frozen=True, slots=True)
class Added:
    """More pieces are known (their sizes, in order). `held`: they are here already, as they are for the seeder."""

    sizes: tuple[int, ...]
    held: bool = False


@dataclass(frozen=True, slots=True)
class Completed:
    """No piece will be added any more: the row is as long as it gets."""


@dataclass(frozen=True, slots=True)
class Announced:
    """An advert of `peer`: pieces it holds beyond those it announced before, its queue length, its measured uplink.

    `serves`: it answers requests. A seeder that still pushes fresh pieces does not.
    """

    peer: str
    pieces: int
    queue: int
    uplink: float
    serves: bool = True


@dataclass(frozen=True, slots=True)
class Requested:
    """`peer` asks for a piece."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Cancelled:
    """`peer` does not want the piece any more."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Sent:
    """An upload ended: the last byte of the piece left (or it was aborted)."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Began:
    """A piece is arriving from `peer`: `left` bytes are still to come, at `rate`.

    Told when its first bytes come, asked for or pushed, and again about every 200 ms while it lasts: this is a peer's progress.
    """

    peer: str
    piece: int
    left: int
    rate: float


@dataclass(frozen=True, slots=True)
class Arrived:
    """A piece came from `peer` (None: found on disk, or brought by the fallback), was verified and stored.

    `flag` is the sender's word on the window: +1, 0 or -1.
    """

    peer: str | None
    piece: int
    flag: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """A requested piece will not come from `peer`: it refuses or lacks it ("absent"), or other bytes came ("corrupt")."""

    peer: str
    piece: int
    kind: Literal["absent", "corrupt"]


@dataclass(frozen=True, slots=True)
class Uplink:
    """This node's own uplink: `rate` is the best recent total (or the owner's cap), `used` what all uploads together get now.

    Told after uploads began or ended and their rate settled, at most every 100 ms. Each telling with room allows one upload more.
    """

    rate: float
    used: float


@dataclass(frozen=True, slots=True)
class Downlink:
    """Whether this node's own downlink is full; never told where no limit is known."""

    full: bool


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; due at `next_deadline()`, at most every 100 ms."""


Event = (
    Opened
    | Closed
    | Added
    | Completed
    | Announced
    | Requested
    | Cancelled
    | Sent
    | Began
    | Arrived
    | Failed
    | Uplink
    | Downlink
    | Tick
)

# --- instructions


@dataclass(frozen=True, slots=True)
class Send:
    """Upload a piece to `peer`, asked for or pushed; `flag` travels with it. Report Sent."""

    peer: str
    piece: int
    flag: int = 0


@dataclass(frozen=True, slots=True)
class Abort:
    """Stop an upload that is not wanted any more; what is in frames already leaves. Report Sent."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell `peer` that the piece will not come from here: it is not held, or too much was asked. There it is Failed, "absent"."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Request:
    """Ask `peer` for a piece. Report Arrived or Failed."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Cancel:
    """Tell `peer` that the piece is not wanted any more; it may still come."""

    peer: str
    piece: int


@dataclass(frozen=True, slots=True)
class Advertise:
    """Tell `peers` what is new here; the driver adds the measured uplink, coalesces for up to 20 ms, lets it ride on pieces.

    Without new pieces it says that this node lives and how long its queue is: it comes every 0.2 to 1 s while anybody lacks a piece.
    """

    peers: tuple[str, ...]
    pieces: int
    queue: int
    serves: bool


@dataclass(frozen=True, slots=True)
class Drop:
    """End the connection for this transfer: `peer` sent wrong bytes or makes no progress; not before `until` again."""

    peer: str
    reason: str
    until: float


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No piece came for too long from anybody: use the fallback, or say why not."""

    reason: str


Instruction = Send | Abort | Refuse | Request | Cancel | Advertise | Drop | GiveUp


class Policy(Protocol):
    """Decides who sends which piece to whom."""

    @property
    def complete(self) -> bool:
        """Whether the row is as long as it gets and every piece of it is here."""
        ...

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened; what is to be done."""
        ...

    def next_deadline(self) -> float | None:
        """When `Tick` is due if nothing happens before; None when nothing is waited for."""
        ...
