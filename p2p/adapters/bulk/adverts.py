"""HAVE frames: every 20 ms, all that is new for a peer in one frame. What is new is worked out for all links at once.

Only what is in the store is announced: who was told of a piece does not give it to this node again. A peer that holds a new piece
itself is not told of it alone: that rides with the next frame which says something it can use.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.transfer import Transfer
from p2p.domain import bulk_frames as frames
from p2p.domain.swarm_events import Advertise

COALESCE_S = 0.02
SETTLE_S = 0.002  # a piece that just came is in the store by then
LATE_S = 0.01  # or is looked for again after so long
NEVER = float("inf")


@dataclass(slots=True)
class Speech:
    """What every HAVE of this node says besides pieces. `uplink` is in bytes a second."""

    uplink: float
    may_serve: bool


class Adverts:
    """Guarded by the hub's lock. `due` (time.monotonic) is when `tell` is to be called."""

    def __init__(self) -> None:
        self.due = NEVER
        self._told_at = float("-inf")

    def note(self, transfer: Transfer, told: Advertise) -> None:
        """The policy wants peers to know of pieces, or of a change of its queue."""
        transfer.queue, transfer.serves = told.queue, told.serves
        is_plain = bool(told.pieces) and len(told.peers) == len(transfer.members)
        for peer in () if is_plain else told.peers:
            link = transfer.members.get(peer)
            if link is not None:
                link.news.add(transfer.id)
        self.hurry()

    def hurry(self) -> None:
        """There may be something new."""
        if self.due == NEVER:
            self.due = max(self._told_at + COALESCE_S, time.monotonic() + SETTLE_S)

    def tell(self, transfers: Iterable[Transfer], speech: Speech, now: float) -> None:
        """Every frame that is due, to whomever it may serve."""
        self.due, self._told_at = NEVER, now
        for transfer in transfers:
            known: dict[tuple[int, int], bytes] = {}
            for link in transfer.members.values():
                if transfer.id in link.news or _is_news(transfer, link):
                    link.say(_have(transfer, link, speech, known))
            if transfer.unwritten:
                self.due = now + LATE_S

    def ride(self, transfers: Iterable[Transfer], link: Link, speech: Speech) -> list[bytes]:
        """The frames that may go to a peer with a part of a piece, before their time."""
        return [
            _have(transfer, link, speech, {})
            for transfer in transfers
            if transfer.members.get(link.peer) is link
            and (transfer.id in link.news or transfer.stored & ~link.told.get(transfer.id, 0))
        ]


def _is_news(transfer: Transfer, link: Link) -> bool:
    """Whether the peer can use what it was not told. A seeder counts all, and all must know whoever has everything."""
    new = transfer.stored & ~link.told.get(transfer.id, 0)
    if not new or link.is_seeder or transfer.is_complete:
        return bool(new)
    heard = link.haves.get(transfer.id)
    return heard is None or bool(new & ~heard.pieces)


def _have(transfer: Transfer, link: Link, speech: Speech, known: dict[tuple[int, int], bytes]) -> bytes:
    """The frame for one peer; frames that are the same for several are made once."""
    new = transfer.stored & ~link.told.get(transfer.id, 0)
    link.told[transfer.id] = transfer.stored
    link.news.discard(transfer.id)
    key = (link.number(transfer.id), new)
    frame = known.get(key)
    if frame is None:
        serves = transfer.serves and speech.may_serve
        frame = known[key] = frames.have(key[0], new, queue=transfer.queue, uplink=speech.uplink, serves=serves)
    return frame
