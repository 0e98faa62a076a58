"""One swarm policy alone, fed by hand: what tests say to it, and the kinds of instructions it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from p2p.domain.swarm import Swarm
from p2p.domain.swarm_events import Added, Announced, Completed, Event, Instruction, Opened
from p2p.domain.swarm_limits import SwarmLimits

PIECE = 100_000
ALL = -1  # every piece of the row

T = TypeVar("T", bound=Instruction)


def of(kind: type[T], instructions: list[Instruction]) -> list[T]:
    """The instructions of one kind."""
    return [one for one in instructions if isinstance(one, kind)]


@dataclass(slots=True)
class Alone:
    """A policy with a row of `pieces` pieces of 100 kB, an uplink of 1 MB/s, and a clock that tests set."""

    pieces: int = 10
    is_seeder: bool = False
    returns: bool = False
    closed: bool = True
    limits: SwarmLimits = field(default_factory=SwarmLimits)
    now: float = 0.0
    policy: Swarm = field(init=False)

    def __post_init__(self) -> None:
        self.policy = Swarm(uplink=1e6, now=0.0, rng=Random(3), is_seeder=self.is_seeder, returns=self.returns, limits=self.limits)
        self.tell(Added((PIECE,) * self.pieces, held=self.is_seeder))
        if self.closed:
            self.tell(Completed())

    def tell(self, event: Event, at: float | None = None) -> list[Instruction]:
        """Feed an event, at a later time if one is given."""
        self.now = self.now if at is None else at
        return self.policy.handle(event, self.now)

    def open(self, *peers: str, uplink: float = 1e6, rtt_s: float = 0.0, is_seeder: bool = False) -> list[Instruction]:
        """Connect peers."""
        return [one for peer in peers for one in self.tell(Opened(peer, uplink, rtt_s, is_seeder))]

    def hear(self, peer: str, pieces: int = 0, queue: int = 0, uplink: float = 1e6, serves: bool = True) -> list[Instruction]:
        """An advert."""
        mask = (1 << self.pieces) - 1 if pieces == ALL else pieces
        return self.tell(Announced(peer, mask, queue, uplink, serves))
