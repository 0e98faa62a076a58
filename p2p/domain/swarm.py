"""The swarm rule: one decentralised pull rule that brings a file to all peers within a tenth of the fluid bound.

Four things carry it. The seeder pushes each piece once, to peers in proportion to what they pass on, before it serves anything
twice. Everybody else pulls, with a window to each neighbour just long enough that its queue does not run dry for one round trip.
A request that waits at a slow holder is moved to a fast one. Neighbours are few and pieces small.

This file takes in events, ends what makes no progress, and names who is to blame; `swarm_sender` and `swarm_receiver` hold the
two halves of the rule.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf
from random import Random

from p2p.domain.swarm_blame import Blame
from p2p.domain.swarm_board import Board, Neighbour
from p2p.domain.swarm_events import (
    Added,
    Advertise,
    Announced,
    Arrived,
    Began,
    Cancel,
    Cancelled,
    Closed,
    Completed,
    Downlink,
    Drop,
    Event,
    Failed,
    GiveUp,
    Instruction,
    Opened,
    Refuse,
    Requested,
    Sent,
    Tick,
    Uplink,
)
from p2p.domain.swarm_limits import SwarmLimits
from p2p.domain.swarm_receiver import Receiver
from p2p.domain.swarm_sender import Sender


class Swarm:
    """One node's part in one transfer. Not thread-safe; the driver performs the instructions and reports what became of them."""

    def __init__(
        self,
        *,
        uplink: float,
        now: float,
        rng: Random,
        is_seeder: bool = False,
        returns: bool = False,
        limits: SwarmLimits | None = None,
    ) -> None:
        """`uplink`: bytes a second, as last measured. `rng` is seeded otherwise on each node.

        `returns`: a seeder that was away; it listens for `settle_s` to what the peers hold before it pushes.
        """
        self._limits = limits or SwarmLimits()
        self._board = Board(self._limits, rng)
        self._receiver = Receiver(self._board)
        self._sender = Sender(self._board, max(uplink, self._limits.least_uplink), is_seeder)
        self._blame = Blame(self._limits)
        self._push_at = inf if returns else now
        self._sender.may_push = is_seeder and not returns
        self._is_seeder = is_seeder
        self._now = now
        self._tick_at = now
        self._progress_at = now
        self._told_at = now
        self._told = (0, self._sender.serves)

    @property
    def complete(self) -> bool:
        """Whether the row is as long as it gets and every piece of it is here."""
        return self._board.complete

    @property
    def held(self) -> int:
        """Mask of the pieces here."""
        return self._board.mine

    def next_deadline(self) -> float | None:
        """When `Tick` is due; None when neither this node nor a neighbour lacks anything."""
        return None if self._board.is_over() else self._tick_at

    def handle(self, event: Event, now: float) -> list[Instruction]:
        """Take in what happened; what is to be done."""
        self._pass_time(now)
        out = self._take(event, self._now)
        out += self._sender.serve(self._now)
        if self._sender.serves != self._told[1]:
            out += self._advertise(self._board.neighbours, 0)
        return out

    def _take(self, event: Event, now: float) -> list[Instruction]:
        match event:
            case Opened():
                return self._opened(event, now)
            case Closed():
                return self._closed(event.peer, now)
            case Added() | Completed():
                return self._grown(event, now)
            case Arrived():
                return self._arrived(event, now)
            case Began():
                self._receiver.began(event, now)
            case Uplink():
                self._sender.measured(event.rate, event.used)
            case Downlink():
                self._receiver.downlink_full = event.full
            case Tick():
                return self._tick(now)
            case _:
                peer = self._board.neighbours.get(event.peer)
                return [] if peer is None else self._said(peer, event, now)
        return []

    def _said(self, peer: Neighbour, event: Announced | Requested | Cancelled | Sent | Failed, now: float) -> list[Instruction]:
        """What concerns one neighbour."""
        match event:
            case Announced():
                return self._announced(peer, event, now)
            case Requested():
                return self._requested(peer, event.piece, now)
            case Cancelled():
                return self._cancelled(peer, event.piece, now)
            case Sent():
                self._sender.ended(peer, event.piece)
                return []
            case _:
                return self._failed(peer, event, now)

    def _opened(self, event: Opened, now: float) -> list[Instruction]:
        out = self._closed(event.peer, now)
        until = self._blame.banned_until(event.peer)
        if until > now:
            return [*out, Drop(event.peer, "banned for what it sent before", until)]
        self._board.open(event, now)
        self._push_at = min(self._push_at, now + self._limits.settle_s)
        sender = self._sender
        return [*out, Advertise((event.peer,), self._board.mine, sender.queue, sender.serves)]

    def _closed(self, name: str, now: float) -> list[Instruction]:
        peer = self._board.close(name)
        if peer is None:
            return []
        self._sender.lost(peer)
        return self._receiver.fill_all(now)

    def _grown(self, event: Added | Completed, now: float) -> list[Instruction]:
        self._progress_at = now
        if isinstance(event, Completed):
            self._board.closed = True
            return [one for peer in tuple(self._board.neighbours.values()) for one in self._check_claims(peer, now)]
        new = self._board.extend(event.sizes, event.held)
        if not event.held:
            return self._receiver.fill_all(now)
        self._sender.find_fresh()
        return self._advertise(self._board.neighbours, new)

    def _arrived(self, event: Arrived, now: float) -> list[Instruction]:
        board = self._board
        if event.piece >= board.count:
            return []
        bit = 1 << event.piece
        is_new = not board.mine & bit
        out = self._receiver.arrived(event, now)
        if is_new:
            self._progress_at = now
            out += self._advertise(board.neighbours, bit)
        source = board.neighbours.get(event.peer or "")
        return out if source is None else out + self._receiver.fill(source, now)

    def _announced(self, peer: Neighbour, event: Announced, now: float) -> list[Instruction]:
        new = self._board.learn(peer, event, now)
        if self._is_seeder:
            self._sender.reported(peer, new)
        return self._check_claims(peer, now) or self._receiver.fill(peer, now)

    def _check_claims(self, peer: Neighbour, now: float) -> list[Instruction]:
        """Nobody holds what is not in the row."""
        board = self._board
        beyond = peer.have & ~board.known if board.closed else peer.have >> self._limits.pieces
        return self._drop(peer, "announces pieces that are not in the row", 3, now) if beyond else []

    def _requested(self, peer: Neighbour, piece: int, now: float) -> list[Instruction]:
        peer.heard_at = now
        if peer.have >> piece & 1 or peer.served > 64 + 4 * self._board.count:
            return self._drop(peer, f"asks for piece {piece} again", 1, now) or [Refuse(peer.name, piece)]
        return self._sender.want(peer, piece)

    def _cancelled(self, peer: Neighbour, piece: int, now: float) -> list[Instruction]:
        peer.heard_at = now
        peer.cancels += 1
        if peer.cancels > 64 + 8 * (peer.served + len(peer.waiting)):
            return self._drop(peer, "cancels without end", 1, now)
        return self._sender.unwant(peer, piece)

    def _failed(self, peer: Neighbour, event: Failed, now: float) -> list[Instruction]:
        peer.heard_at = now
        if event.kind == "corrupt":
            return self._drop(peer, f"piece {event.piece} came with other bytes", 3, now)
        if event.piece in peer.asks:
            self._board.release(event.piece)
        peer.absent |= 1 << event.piece
        peer.absent_until = now + self._limits.absent_s
        peer.refusals += 1
        if peer.refusals < self._limits.window:
            return self._receiver.fill_all(now)
        peer.refusals = 0
        return self._bench(peer, now)

    def _bench(self, peer: Neighbour, now: float) -> list[Instruction]:
        """Ask others for what was asked there, and nothing more of it for a while."""
        peer.benched_until = self._blame.strike(peer.name, 1, now)
        peer.window = 1
        pieces = [*peer.asks, *peer.pushes]
        for piece in pieces:
            self._board.release(piece)
        return [*(Cancel(peer.name, piece) for piece in pieces), *self._receiver.fill_all(now)]

    def _drop(self, peer: Neighbour, why: str, weight: int, now: float) -> list[Instruction]:
        """Strikes for a lie; the connection ends when there are too many."""
        until = self._blame.strike(peer.name, weight, now)
        if weight < 3 and self._blame.strikes(peer.name, now) < self._limits.drop_strikes:
            return []
        self._blame.ban(peer.name, until)
        return [Drop(peer.name, why, until), *self._closed(peer.name, now)]

    def _advertise(self, peers: Iterable[str], pieces: int) -> list[Instruction]:
        sender = self._sender
        self._told_at = self._now
        self._told = (sender.queue, sender.serves)
        names = tuple(peers)
        return [Advertise(names, pieces, sender.queue, sender.serves)] if names else []

    def _tick(self, now: float) -> list[Instruction]:
        if now < self._tick_at:
            return []
        self._tick_at = now + self._limits.tick_s
        if self._is_seeder and not self._sender.may_push and now >= self._push_at:
            self._sender.may_push = True
            self._sender.find_fresh()
        out: list[Instruction] = []
        for peer in tuple(self._board.neighbours.values()):
            out += self._watch(peer, now)
        out += self._receiver.fill_all(now)
        out += self._tell(now)
        if not self._is_seeder and not self.complete and now >= self._progress_at + self._limits.no_progress_s:
            out.append(GiveUp(self._story()))
            self._progress_at = now
        return out

    def _watch(self, peer: Neighbour, now: float) -> list[Instruction]:
        """End what makes no progress."""
        limits = self._limits
        if peer.absent and now >= peer.absent_until:
            peer.absent = 0
        if now >= peer.heard_at + limits.silent_s and not (self.complete and self._board.has_all(peer)):
            return self._part(peer, f"nothing heard for {limits.silent_s:g} s", now)
        if any(now >= since + limits.upload_s for since in peer.sending.values()):
            return self._part(peer, f"does not take a piece in {limits.upload_s:g} s", now)
        if (peer.asks or peer.pushes) and now >= peer.progress_at + limits.request_s:
            return self._bench(peer, now)
        return []

    def _part(self, peer: Neighbour, why: str, now: float) -> list[Instruction]:
        """End a connection that leads nowhere; it may be made again soon."""
        return [Drop(peer.name, why, now + self._limits.ban_first_s), *self._closed(peer.name, now)]

    def _tell(self, now: float) -> list[Instruction]:
        """A sign of life, and the length of the queue, to those who may ask."""
        since = now - self._told_at
        changed = self._told[0] != self._sender.queue
        if since < self._limits.alive_s and not (changed and since >= self._limits.advert_s):
            return []
        board = self._board
        return self._advertise([name for name, peer in board.neighbours.items() if not (board.complete and board.has_all(peer))], 0)

    def _pass_time(self, now: float) -> None:
        """The clock never runs back here. A gap means that this node was asleep: nobody else is to blame for it."""
        gap = max(0.0, now - self._now)
        self._now += gap
        if gap < self._limits.stall_s:
            return
        self._progress_at += gap
        for peer in self._board.neighbours.values():
            peer.heard_at += gap
            peer.progress_at += gap
            for piece in peer.sending:
                peer.sending[piece] += gap

    def _story(self) -> str:
        """Why nothing came."""
        board = self._board
        missing = (board.known & ~board.mine).bit_count()
        row = (
            f"{missing} of {board.count} pieces missing"
            if missing or board.closed
            else f"{board.count} pieces here, the row goes on"
        )
        peers = sorted(board.neighbours.values(), key=lambda peer: peer.progress_at)[:8]
        told = "; ".join(f"{peer.name}: holds {peer.held}, {len(peer.asks)} asked" for peer in peers) or "no neighbour is connected"
        return f"no piece for {self._limits.no_progress_s:g} s, {row}; {told}"
