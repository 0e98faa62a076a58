"""The sender's half of the rule: a seeder pushes each fresh piece once; everything else is an answer to a request."""

from __future__ import annotations

from math import ceil

from p2p.domain.swarm_board import Board, Neighbour
from p2p.domain.swarm_events import Abort, Instruction, Refuse, Send


class Sender:
    """Decides what goes out next.

    One upload is active at a time, more only while they do not fill the uplink: a piece that is there in whole can be passed on.
    They do not fill it when less than it was measured, or when one is still active by the time at which all that was begun would have left.
    The measure comes late (every 100 ms) and knows what the receivers' downlinks hold up; the clock knows at once of a path that starts slowly.
    """

    def __init__(self, board: Board, uplink: float, is_seeder: bool) -> None:
        self._board = board
        self._is_seeder = is_seeder
        self.may_push = is_seeder  # not while it still learns what the peers hold
        self.uplink = uplink
        self.fresh = 0  # held here; no neighbour holds it or was given it
        self._active = 0
        self._has_spare = False
        self._busy_until = 0.0  # when all that was begun would have left at the uplink's rate

    @property
    def serves(self) -> bool:
        """Whether requests are answered: by a seeder not before each piece was pushed."""
        return not self._is_seeder or (self.may_push and not self.fresh)

    @property
    def queue(self) -> int:
        """Requests that wait."""
        return sum(len(peer.waiting) for peer in self._board.neighbours.values())

    def measured(self, rate: float, used: float) -> None:
        """The uplink, and whether it has room for one upload more."""
        self.uplink = max(rate, self._board.limits.least_uplink)
        self._has_spare = used < self._board.limits.filled * rate

    def find_fresh(self) -> None:
        """Work out from the neighbours' adverts what nobody holds."""
        if self._is_seeder:
            self.fresh = self._board.mine & ~self._board.live_copies()

    def serve(self, now: float) -> list[Instruction]:
        """As many uploads as may begin now."""
        out: list[Instruction] = []
        while self._has_room(now):
            send = self._answer(now) if self.serves else self._push(now)
            if send is None:
                return out
            self._has_spare = False
            self._busy_until = max(self._busy_until, now) + self._board.piece_bytes / self.uplink
            self._active += 1
            out.append(send)
        return out

    def want(self, peer: Neighbour, piece: int) -> list[Instruction]:
        """A request: queued, refused if not held or too many wait already."""
        if piece in peer.waiting or piece in peer.sending:
            return []
        if not self._board.mine >> piece & 1 or len(peer.waiting) >= self._board.limits.window:
            return [Refuse(peer.name, piece)]
        peer.waiting[piece] = None
        peer.waits |= 1 << piece
        return []

    def unwant(self, peer: Neighbour, piece: int) -> list[Instruction]:
        """A request is taken back."""
        if piece in peer.waiting:
            _forget(peer, piece)
            return []
        return [Abort(peer.name, piece)] if piece in peer.sending else []

    def ended(self, peer: Neighbour, piece: int) -> None:
        """An upload ended."""
        if piece in peer.sending:
            del peer.sending[piece]
            peer.served += 1
            self._active -= 1

    def lost(self, peer: Neighbour) -> None:
        """A neighbour is gone: what only it held or was given is fresh again."""
        self._active -= len(peer.sending)
        self.find_fresh()

    def reported(self, peer: Neighbour, pieces: int) -> None:
        """`peer` announced pieces: whoever was given them has passed them on."""
        self.fresh &= ~pieces
        for other in self._board.neighbours.values():
            if other is not peer:
                other.unreported &= ~pieces

    def _has_room(self, now: float) -> bool:
        return self._active == 0 or ((self._has_spare or now > self._busy_until) and self._active < self._board.limits.uploads)

    def _push(self, now: float) -> Send | None:
        """The next fresh piece, to whom it brings most: in proportion to what each can pass on, and does.

        Who is being served already may be the one: if pieces that fill up went to others only, slow peers would get more
        than they can pass on.
        """
        if not self.may_push:
            return None
        board = self._board
        most = board.limits.pushes
        peers = [peer for peer in board.neighbours.values() if len(peer.sending) < most and not board.has_all(peer)]
        if not peers:
            return None
        target = min(peers, key=lambda peer: ((peer.unreported.bit_count() + 1) / peer.uplink, peer.given / peer.uplink))
        bit = self.fresh & -self.fresh
        self.fresh ^= bit
        target.given += 1
        target.unreported |= bit
        piece = bit.bit_length() - 1
        target.sending[piece] = now
        return Send(target.name, piece)

    def _answer(self, now: float) -> Send | None:
        """A request: the only copy of a piece first, to the best relay; then whoever has least."""
        board = self._board
        # While the uplink is being filled up, whoever is served already is what limits it.
        askers = [peer for peer in board.neighbours.values() if peer.waiting and not (self._active and peer.sending)]
        if not askers:
            return None
        shared = board.copies.anywhere()
        lone = [peer for peer in askers if peer.waits & ~shared]
        if not lone:
            asker = min(askers, key=lambda peer: peer.held)
            return self._send(asker, next(iter(asker.waiting)), now)
        asker = max(lone, key=lambda peer: (int(peer.uplink).bit_length(), -peer.held))  # uplinks alike to a factor 2 are equal
        return self._send(asker, next(piece for piece in asker.waiting if not shared >> piece & 1), now)

    def _send(self, peer: Neighbour, piece: int, now: float) -> Send:
        _forget(peer, piece)
        peer.sending[piece] = now
        covered = ceil(self.uplink * peer.rtt_s / self._board.piece_bytes)
        waiting = self.queue
        if waiting < covered:
            return Send(peer.name, piece, 1)
        return Send(peer.name, piece, -1 if waiting > 2 * covered + 2 else 0)


def _forget(peer: Neighbour, piece: int) -> None:
    del peer.waiting[piece]
    peer.waits &= ~(1 << piece)
