"""One transfer on this node: its row, what is held of it, its policy, and who takes part. Guarded by the hub's lock."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p.adapters.bulk.link import Link
from p2p.domain.batches import Batch, Chain
from p2p.domain.manifest import Piece
from p2p.domain.swarm_events import Policy


@dataclass(slots=True)
class Transfer:
    """`members`: the peers that the policy was told of. `shut`: those it dropped, and until when (time.monotonic)."""

    id: str
    first: Batch
    chain: Chain
    policy: Policy
    pieces: list[Piece] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)  # by batch: how long the row is with it
    places: dict[str, list[int]] = field(default_factory=dict)
    held: int = 0  # mask of verified pieces, in memory or in the store
    unwritten: int = 0  # of those, the ones not in the store yet
    queue: int = 0  # requests that wait, as the policy said last
    serves: bool = True
    members: dict[str, Link] = field(default_factory=dict)
    shut: dict[str, float] = field(default_factory=dict)
    is_row_whole: bool = False
    is_reported: bool = False
    halted: str | None = None
    size: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    first_sent_at: float | None = None  # Unix seconds

    @property
    def job_id(self) -> str:
        """The job it belongs to."""
        return self.first.job_id

    def extend(self, pieces: Sequence[Piece]) -> range:
        """The row grows; the new indices."""
        begin = len(self.pieces)
        self.pieces += pieces
        for index in range(begin, len(self.pieces)):
            self.places.setdefault(self.pieces[index].digest, []).append(index)
            self.size += self.pieces[index].size
        self.ends.append(len(self.pieces))
        return range(begin, len(self.pieces))

    def batch_of(self, index: int) -> int:
        """The number of the batch that a piece is in."""
        return bisect_right(self.ends, index)

    def holds(self, index: int) -> bool:
        """Whether the piece is here, verified."""
        return bool(self.held >> index & 1)

    @property
    def stored(self) -> int:
        """Mask of the pieces in the store: only they are announced."""
        return self.held & ~self.unwritten

    def is_wanted(self, index: int, besides: str = "") -> bool:
        """Whether a peer, other than `besides`, has not announced the piece: it may ask for it."""
        for peer, link in self.members.items():
            if link.is_seeder or peer == besides:
                continue
            heard = link.haves.get(self.id)
            if heard is None or not heard.pieces >> index & 1:
                return True
        return False

    @property
    def is_complete(self) -> bool:
        """Whether every piece is here and none will be added."""
        return self.is_row_whole and self.held.bit_count() == len(self.pieces)
