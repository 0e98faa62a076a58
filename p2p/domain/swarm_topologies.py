"""Fixed trees: the yardsticks of the paper's comparison. A member sends each piece, in order, to each of its children.

Star: the seeder's children are all others. Chain: each member has one child. Tree: each has up to k. The members are an ordered
list with the seeder first; nobody is asked for anything, so one slow interior uplink is everybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from p2p.domain.swarm_copies import indices
from p2p.domain.swarm_events import (
    Added,
    Advertise,
    Announced,
    Arrived,
    Closed,
    Completed,
    Event,
    GiveUp,
    Instruction,
    Opened,
    Send,
    Sent,
    Uplink,
)

UPLOADS = 8  # at once, to fill the uplink
FILLED = 0.95


def star_children(members: int, position: int) -> range:
    """Positions of the children in a star."""
    return range(1, members) if position == 0 else range(0)


def tree_children(members: int, position: int, width: int) -> range:
    """Positions of the children in a tree of at most `width` children each, filled level by level; width 1 is a chain."""
    first = position * width + 1
    return range(min(first, members), min(first + width, members))


@dataclass(slots=True)
class _Child:
    have: int = 0
    sent: int = 0
    sending: int | None = None
    is_open: bool = False


@dataclass(slots=True)
class _State:
    count: int = 0
    known: int = 0
    mine: int = 0
    closed: bool = False
    children: dict[str, _Child] = field(default_factory=dict)


class FixedTree:
    """One node's part in a fixed tree; built by `star`, `chain` and `tree`."""

    def __init__(self, children: Sequence[str], now: float, no_progress_s: float = 30.0) -> None:
        self._state = _State(children={name: _Child() for name in children})
        self._peers: list[str] = []
        self._no_progress_s = no_progress_s
        self._progress_at = now
        self._has_spare = False

    @property
    def complete(self) -> bool:
        """Whether the row is as long as it gets and every piece of it is here."""
        return self._state.closed and self._state.mine == self._state.known

    def next_deadline(self) -> float | None:
        """When it would give up; None when everything is here."""
        return None if self.complete else self._progress_at + self._no_progress_s

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened; what is to be done."""
        out = self._take(event, now)
        out += self._serve()
        if not self.complete and now >= self._progress_at + self._no_progress_s:
            self._progress_at = now
            missing = (self._state.known & ~self._state.mine).bit_count()
            out.append(
                GiveUp(f"no piece for {self._no_progress_s:g} s, {missing} of {self._state.count} pieces missing; parent silent")
            )
        return out

    def _take(self, event: Event, now: float) -> list[Instruction]:
        state = self._state
        match event:
            case Added():
                new = ((1 << len(event.sizes)) - 1) << state.count
                state.count += len(event.sizes)
                state.known |= new
                state.mine |= new if event.held else 0
                self._progress_at = now
            case Completed():
                state.closed = True
            case Opened():
                return self._opened(event.peer)
            case Closed():
                self._closed(event.peer)
            case Announced():
                if event.peer in state.children:
                    state.children[event.peer].have |= event.pieces
            case Sent():
                self._sent(event)
            case Arrived():
                return self._arrived(event.piece, now)
            case Uplink():
                self._has_spare = event.used < FILLED * event.rate
            case _:
                pass
        return []

    def _opened(self, peer: str) -> list[Instruction]:
        self._closed(peer)
        self._peers.append(peer)
        if peer in self._state.children:
            self._state.children[peer] = _Child(is_open=True)
        return [Advertise((peer,), self._state.mine, 0, False)]

    def _closed(self, peer: str) -> None:
        if peer in self._peers:
            self._peers.remove(peer)
        if peer in self._state.children:
            self._state.children[peer] = _Child()

    def _sent(self, event: Sent) -> None:
        child = self._state.children.get(event.peer)
        if child is not None and child.sending == event.piece:
            child.sending = None

    def _arrived(self, piece: int, now: float) -> list[Instruction]:
        bit = 1 << piece
        if self._state.mine & bit:
            return []
        self._state.mine |= bit
        self._progress_at = now
        return [Advertise(tuple(self._peers), bit, 0, False)] if self._peers else []

    def _serve(self) -> list[Instruction]:
        """The lowest piece to the child that was sent least; one upload, more only to fill the uplink."""
        out: list[Instruction] = []
        state = self._state
        while self._has_room():
            due = [
                (child.sent.bit_count(), name, todo)
                for name, child in state.children.items()
                if child.is_open and child.sending is None and (todo := state.mine & ~child.sent & ~child.have)
            ]
            if not due:
                return out
            _, name, todo = min(due)
            piece = next(indices(todo))
            child = state.children[name]
            child.sending = piece
            child.sent |= 1 << piece
            self._has_spare = False
            out.append(Send(name, piece))
        return out

    def _has_room(self) -> bool:
        active = sum(child.sending is not None for child in self._state.children.values())
        return active == 0 or (self._has_spare and active < UPLOADS)


def star(members: Sequence[str], me: str, now: float, no_progress_s: float = 30.0) -> FixedTree:
    """The seeder, which is the first member, sends everything to everyone, piece by piece in turn."""
    return FixedTree([members[i] for i in star_children(len(members), members.index(me))], now, no_progress_s)


def chain(members: Sequence[str], me: str, now: float, no_progress_s: float = 30.0) -> FixedTree:
    """Each member passes on to the next."""
    return tree(members, me, 1, now, no_progress_s)


def tree(members: Sequence[str], me: str, width: int, now: float, no_progress_s: float = 30.0) -> FixedTree:
    """Each member passes on to at most `width` others."""
    return FixedTree([members[i] for i in tree_children(len(members), members.index(me), width)], now, no_progress_s)
