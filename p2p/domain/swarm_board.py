"""What a node knows of a transfer: the row, its neighbours, who holds what, and what is asked of whom. Masks have bit i for piece i."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from random import Random

from p2p.domain.swarm_copies import Copies, pick
from p2p.domain.swarm_events import Announced, Opened
from p2p.domain.swarm_limits import SwarmLimits


@dataclass(slots=True)
class Ask:
    """A piece that is to come from a neighbour, by request or pushed; `left` is None until it begins."""

    holder: Neighbour
    since: float
    moves: int = 0  # how often it was moved before, from holder to holder
    left: int | None = None
    rate: float = 0.0
    told_at: float = 0.0

    def rest_s(self, piece_bytes: float, patience_s: float, now: float) -> float:
        """Seconds until it is here, as far as is known; what is late beyond `patience_s` is believed to stay away as long again."""
        late = now - max(self.since, self.told_at) - patience_s
        if self.left is None:
            return max(late, self.holder.eta_s(piece_bytes))
        return max(late, self.left / max(self.rate, 1.0) - (now - self.told_at))


@dataclass(slots=True)
class Neighbour:
    """A peer with an open connection."""

    name: str
    uplink: float
    rtt_s: float
    is_seeder: bool
    heard_at: float
    progress_at: float
    announced: bool = False  # at least once on this connection
    have: int = 0
    held: int = 0  # pieces in `have`
    queue: int = 0
    serves: bool = True
    # as a source
    window: int = 0  # 0: not set yet
    asks: dict[int, Ask] = field(default_factory=dict)
    pushes: dict[int, Ask] = field(default_factory=dict)
    absent: int = 0
    absent_until: float = 0.0
    benched_until: float = float("-inf")
    # as a receiver
    waiting: dict[int, None] = field(default_factory=dict)  # pieces it asked for, oldest first
    waits: int = 0  # the same as a mask
    sending: dict[int, float] = field(default_factory=dict)  # since when
    given: int = 0  # pieces pushed
    unreported: int = 0  # pushed, and announced by nobody else yet
    served: int = 0  # uploads to it that ended
    cancels: int = 0
    refusals: int = 0

    def eta_s(self, piece_bytes: float) -> float:
        """Seconds for its queue and one piece more."""
        return (self.queue + 1) * piece_bytes / self.uplink


class Board:
    """State shared by the two halves of the rule, and kept consistent here."""

    def __init__(self, limits: SwarmLimits, rng: Random) -> None:
        self.limits = limits
        self.rng = rng
        self.neighbours: dict[str, Neighbour] = {}
        self.asked: dict[int, Ask] = {}
        self.count = 0
        self.known = 0
        self.mine = 0
        self.wanted = 0  # known, not here and asked of nobody
        self.closed = False  # no piece will be added
        self.piece_bytes = 1.0  # mean
        self._bytes = 0
        self.copies = Copies()  # among the neighbours that are not seeders

    @property
    def complete(self) -> bool:
        """Whether everything is here and nothing will be added."""
        return self.closed and self.mine == self.known

    def has_all(self, peer: Neighbour) -> bool:
        """Whether a neighbour said so of itself."""
        return self.closed and not self.known & ~peer.have

    def is_over(self) -> bool:
        """Whether neither this node nor a neighbour lacks anything."""
        return self.complete and all(self.has_all(peer) for peer in self.neighbours.values())

    def extend(self, sizes: tuple[int, ...], held: bool) -> int:
        """The row grows; the mask of what is new."""
        new = ((1 << len(sizes)) - 1) << self.count
        self.count += len(sizes)
        self.known |= new
        self._bytes += sum(sizes)
        self.piece_bytes = max(1.0, self._bytes / max(1, self.count))
        if held:
            self.mine |= new
        self.wanted |= new & ~self.mine
        return new

    def open(self, event: Opened, now: float) -> Neighbour:
        """A new neighbour."""
        peer = Neighbour(event.peer, self._believed(event.uplink), max(0.0, event.rtt_s), event.is_seeder, now, now)
        self.neighbours[event.peer] = peer
        return peer

    def close(self, name: str) -> Neighbour | None:
        """A neighbour is gone: what was to come from it is wanted again, its copies do not count any more."""
        peer = self.neighbours.pop(name, None)
        if peer is None:
            return None
        for piece in (*peer.asks, *peer.pushes):
            self.release(piece)
        if not peer.is_seeder:
            self.copies.remove(peer.have)
        return peer

    def learn(self, peer: Neighbour, event: Announced, now: float) -> int:
        """An advert; the mask of what the peer had not announced before."""
        peer.heard_at = now
        peer.announced = True
        peer.queue = max(0, event.queue)
        peer.uplink = self._believed(event.uplink)
        peer.serves = event.serves
        new = event.pieces & ~peer.have
        peer.have |= new
        peer.held = peer.have.bit_count()
        if not peer.is_seeder:
            self.copies.add(new)
        return new

    def ask(self, peer: Neighbour, piece: int, now: float, moves: int = 0) -> None:
        """A request goes out."""
        if not peer.asks:
            peer.progress_at = now
        self.asked[piece] = peer.asks[piece] = Ask(peer, now, moves)
        self.wanted &= ~(1 << piece)

    def expect(self, peer: Neighbour, piece: int, now: float) -> Ask:
        """A push begins to arrive."""
        ask = self.asked[piece] = peer.pushes[piece] = Ask(peer, now)
        self.wanted &= ~(1 << piece)
        return ask

    def release(self, piece: int) -> Neighbour | None:
        """A piece is asked of nobody any more; of whom it was."""
        ask = self.asked.pop(piece, None)
        if ask is None:
            return None
        ask.holder.asks.pop(piece, None)
        ask.holder.pushes.pop(piece, None)
        self.wanted |= (1 << piece) & self.known & ~self.mine
        return ask.holder

    def hold(self, piece: int) -> None:
        """A piece is here."""
        self.mine |= 1 << piece
        self.wanted &= ~(1 << piece)

    def choose(self, choice: int) -> int:
        """One piece of a mask that is not empty, of those that fewest neighbours hold; ties at random."""
        return pick(self.copies.rarest(choice), self.rng)

    def live_copies(self) -> int:
        """Pieces that a neighbour holds, or was given and may still pass on."""
        held = 0
        for peer in self.neighbours.values():
            held |= peer.unreported if peer.is_seeder else peer.have | peer.unreported
        return held

    def _believed(self, uplink: float) -> float:
        if not isfinite(uplink):
            return self.limits.least_uplink
        return min(max(uplink, self.limits.least_uplink), self.limits.most_uplink)
