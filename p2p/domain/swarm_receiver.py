"""The receiver's half of the rule: pull with a window to each neighbour, and move what waits at a slow one."""

from __future__ import annotations

from math import ceil

from p2p.domain.swarm_board import Board, Neighbour
from p2p.domain.swarm_events import Arrived, Began, Cancel, Instruction, Request


class Receiver:
    """Decides what to ask of whom."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self.downlink_full = False

    def fill(self, source: Neighbour, now: float) -> list[Instruction]:
        """Requests to one neighbour, as many as its window allows; one of them may be taken from a slower one."""
        board = self._board
        if not board.asked and not board.wanted:
            return []
        if not source.serves or source.benched_until > now:
            return []
        self._open_window(source)
        out: list[Instruction] = []
        while len(source.asks) < source.window:
            choice = source.have & board.wanted & ~source.absent
            if not choice:
                return out + self._steal(source, now)
            piece = board.choose(choice)
            board.ask(source, piece, now)
            out.append(Request(source.name, piece))
        return out

    def fill_all(self, now: float) -> list[Instruction]:
        """`fill` for every neighbour, those with the shortest wait first."""
        board = self._board
        if not board.asked and not board.wanted:
            return []
        sources = sorted(board.neighbours.values(), key=lambda source: source.eta_s(board.piece_bytes))
        return [one for source in sources for one in self.fill(source, now)]

    def began(self, event: Began, now: float) -> None:
        """A piece is arriving. One that nobody was asked for is a push, and believed of a seeder only."""
        source = self._board.neighbours.get(event.peer)
        if source is None or event.piece >= self._board.count:
            return
        source.heard_at = now
        ask = self._board.asked.get(event.piece)
        if ask is None and source.is_seeder and self._board.wanted >> event.piece & 1:
            ask = self._board.expect(source, event.piece, now)
        if ask is None or ask.holder is not source:
            return
        if ask.left is None or event.left < ask.left:
            source.progress_at = now
        ask.left, ask.rate, ask.told_at = event.left, event.rate, now

    def arrived(self, event: Arrived, now: float) -> list[Instruction]:
        """A piece is here, perhaps not from whom it was asked."""
        board = self._board
        source = board.neighbours.get(event.peer or "")
        if source is not None:
            source.heard_at = source.progress_at = now
            if event.piece in source.asks:
                source.window = min(max(source.window + event.flag, 1), board.limits.window)
        holder = board.release(event.piece)
        board.hold(event.piece)
        if holder is None or holder is source:
            return []
        return [Cancel(holder.name, event.piece), *self.fill(holder, now)]

    def _open_window(self, source: Neighbour) -> None:
        board = self._board
        if source.window == 0:
            share = board.piece_bytes * len(board.neighbours)
            source.window = min(1 + ceil(source.rtt_s * source.uplink / share), board.limits.window)

    def _steal(self, thief: Neighbour, now: float) -> list[Instruction]:
        """Move the request that would take longest where it is, if `thief` would bring it much sooner; one at a time."""
        board = self._board
        if self.downlink_full:
            return []
        found = self._slowest(thief, now)
        if found is None:
            return []
        piece, rest = found
        moves = board.asked[piece].moves + 1
        soon = thief.eta_s(board.piece_bytes) + thief.rtt_s
        if rest <= board.limits.steal_ratio * soon + thief.rtt_s / 2:
            return []
        loser = board.release(piece)
        assert loser is not None
        board.ask(thief, piece, now, moves)
        return [Cancel(loser.name, piece), Request(thief.name, piece)]

    def _slowest(self, thief: Neighbour, now: float) -> tuple[int, float] | None:
        """Of what `thief` holds and another was asked for long enough ago, the piece with most time left, and that time.

        Long enough doubles with each move of a piece: where advertised uplinks are wrong, it would wander for ever.
        """
        board = self._board
        reach = thief.have & ~thief.absent
        best: tuple[int, float] | None = None
        for piece, ask in board.asked.items():
            if not reach >> piece & 1 or ask.holder is thief:
                continue
            if now - ask.since < board.limits.steal_age_s * 2.0**ask.moves + thief.rtt_s:
                continue
            rest = ask.rest_s(board.piece_bytes, board.limits.late_s, now)
            if best is None or rest > best[1]:
                best = piece, rest
        return best
