"""Which piece to ask of which source, when to ask another, and when to give up: events and the time in, requests out.

The rules. Each source has a window of requests in flight that grows with every piece it brings. A failure closes the window
to one and bans the source for a while that doubles with each further incident and is forgotten with time; damaged bytes count
threefold. A source that does not hold a piece is not blamed: it is not asked for that piece again for a while. When nothing is
left to ask for, a source with room is asked for what others have been slow to bring, and the slower copy is cancelled.
Origins (the coordinator) are kept to one request in flight while any other source is usable, so that peers carry most bytes.
If no piece arrives for `no_progress_s`, the fetch ends with the last error of each source.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Literal

from p2p.domain.manifest import Piece
from p2p.errors import FetchFailed

SCAN = 256  # pieces looked at to find one that a source may hold
CORRUPT_STRIKES = 3
MAX_STRIKES = 16


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Seconds and counts. A request is given up after `no_progress_s`, and the fetch if no piece came for that long."""

    no_progress_s: float = 30.0
    window: int = 4  # requests in flight at one source
    steal_after_s: float = 2.0  # age of a request before another source is asked too
    absent_s: float = 2.0  # how long "I do not hold it" is believed
    ban_first_s: float = 1.0
    ban_most_s: float = 30.0
    forget_s: float = 30.0  # one strike is forgotten after so long without another


@dataclass(frozen=True, slots=True)
class Request:
    """Ask `source` for `piece`; in a list from `handle`: drop that request, its answer is not wanted any more."""

    source: str
    piece: Piece


@dataclass(frozen=True, slots=True)
class Arrived:
    """The piece came, was verified and stored."""

    request: Request


@dataclass(frozen=True, slots=True)
class Failed:
    """The request ended without the piece. absent: the source does not hold it; corrupt: other bytes came."""

    request: Request
    kind: Literal["absent", "failed", "corrupt"]
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed: requests that are too old are given up."""


Event = Arrived | Failed | Tick


@dataclass(slots=True)
class _Source:
    name: str
    origin: bool
    window: int = 1
    in_flight: int = 0
    delivered: int = 0
    strikes: int = 0
    struck_at: float = 0.0
    banned_until: float = float("-inf")
    absents: int = 0  # in a row
    absent: OrderedDict[str, float] = field(default_factory=OrderedDict)  # digest -> believed until, oldest first
    last_error: str = "no answer yet"


class Fetching:
    """One fetch. Not thread-safe; the caller performs the requests and reports what became of them."""

    def __init__(
        self,
        pieces: Iterable[Piece],
        sources: Iterable[str],
        *,
        now: float,
        limits: FetchLimits,
        origins: Collection[str] = (),
        salt: str = "",
    ) -> None:
        """`salt` differs between receivers, so that they ask in different orders and have something to give each other."""
        wanted = dict.fromkeys(pieces)
        order = sorted(wanted, key=lambda piece: blake2b((salt + piece.digest).encode(), digest_size=8).digest())
        self._waiting: OrderedDict[str, Piece] = OrderedDict((piece.digest, piece) for piece in order)
        self._asked: dict[str, dict[str, float]] = {}  # digest -> source -> since
        self._pieces = {piece.digest: piece for piece in order}
        self._sources = {name: _Source(name, name in origins) for name in sources}
        self._limits = limits
        self._steal_after = min(limits.steal_after_s, limits.no_progress_s / (2 * (len(self._sources) + 1)))
        self._ban_most = min(limits.ban_most_s, limits.no_progress_s / 4)
        self._progress_at = now
        self._now = now

    @property
    def done(self) -> bool:
        """Whether every piece arrived."""
        return not self._pieces

    def next_requests(self, now: float) -> list[Request]:
        """What to ask now, and of whom. Raises FetchFailed when no piece arrived for too long, or there is no source."""
        self._now = now
        if self.done:
            return []
        if not self._sources or now >= self._progress_at + self._limits.no_progress_s:
            raise FetchFailed(self._story(now))
        for source in self._sources.values():
            _forget_absent(source, now)
        requests: list[Request] = []
        while fresh := [request for source in self._by_merit() if (request := self._ask(source, now)) is not None]:
            requests += fresh
        return requests

    def handle(self, event: Event, now: float) -> list[Request]:
        """Take in what happened; the requests returned are to be cancelled and need no report."""
        self._now = now
        if isinstance(event, Arrived):
            return self._arrived(event.request, now)
        if isinstance(event, Tick):
            return self._expire(now)
        self._failed(event.request, event.kind, event.reason, now)
        return []

    def next_deadline(self) -> float | None:
        """When to call `handle(Tick())` and `next_requests`, with one `now`, if nothing happens before; None when done."""
        if self.done:
            return None
        limits = self._limits
        times = [self._progress_at + limits.no_progress_s]
        for source in self._sources.values():
            times.append(source.banned_until)
            times += islice(source.absent.values(), 1)
        for asks in self._asked.values():
            times.append(min(asks.values()) + limits.no_progress_s)
            times.append(max(asks.values()) + self._steal_after)
        return min((time for time in times if time > self._now), default=self._now)

    def _by_merit(self) -> list[_Source]:
        """Sources in the order they are asked: peers before origins, the proven before the unproven."""
        return sorted(self._sources.values(), key=lambda source: (source.origin, -source.delivered, source.strikes))

    def _ask(self, source: _Source, now: float) -> Request | None:
        """The next request to one source, if it has room and there is one to make."""
        if source.banned_until > now or source.in_flight >= self._room(source, now):
            return None
        piece = self._fresh(source) if self._waiting else self._stealable(source, now)
        if piece is None:
            return None
        self._waiting.pop(piece.digest, None)
        self._asked.setdefault(piece.digest, {})[source.name] = now
        source.in_flight += 1
        return Request(source.name, piece)

    def _room(self, source: _Source, now: float) -> int:
        """The source's window; one for an origin while a peer is usable."""
        peers = any(not other.origin and other.banned_until <= now for other in self._sources.values())
        return 1 if source.origin and peers else source.window

    def _fresh(self, source: _Source) -> Piece | None:
        """A piece that nobody is asked for."""
        waiting = islice(self._waiting.values(), SCAN)
        return next((piece for piece in waiting if piece.digest not in source.absent), None)

    def _stealable(self, source: _Source, now: float) -> Piece | None:
        """The piece that others were asked for longest ago, if that is long enough."""
        slow = [
            (max(asks.values()), digest)
            for digest, asks in self._asked.items()
            if source.name not in asks and digest not in source.absent and max(asks.values()) + self._steal_after <= now
        ]
        return self._pieces[min(slow)[1]] if slow else None

    def _arrived(self, request: Request, now: float) -> list[Request]:
        digest = request.piece.digest
        if self._pieces.pop(digest, None) is None:
            return []
        self._waiting.pop(digest, None)
        source = self._sources[request.source]
        source.delivered += 1
        source.absents = 0
        source.window = min(source.window + 1, self._limits.window)
        self._progress_at = now
        asks = self._asked.pop(digest, {})
        for name in asks:
            self._sources[name].in_flight -= 1
        return [Request(name, request.piece) for name in asks if name != request.source]

    def _failed(self, request: Request, kind: str, reason: str, now: float) -> None:
        asks = self._asked.get(request.piece.digest, {})
        if asks.pop(request.source, None) is None:
            return  # given up before, or the piece came from elsewhere
        source = self._sources[request.source]
        source.in_flight -= 1
        source.last_error = reason
        if not asks:
            del self._asked[request.piece.digest]
            self._waiting[request.piece.digest] = request.piece
        if kind == "absent":
            self._note_absent(source, request.piece, now)
        else:
            self._blame(source, CORRUPT_STRIKES if kind == "corrupt" else 1, now)

    def _note_absent(self, source: _Source, piece: Piece, now: float) -> None:
        """Believe it for a while, and do not ask in a rush a source that holds little."""
        source.absent[piece.digest] = now + self._limits.absent_s
        source.absent.move_to_end(piece.digest)
        pause = min(self._limits.absent_s, 0.02 * 2 ** min(source.absents, MAX_STRIKES))
        source.absents += 1
        source.banned_until = max(source.banned_until, now + min(pause, self._ban_most))

    def _blame(self, source: _Source, strikes: int, now: float) -> None:
        """Close the window and ban. Failures of requests that were in flight at an earlier one are the same incident."""
        source.window = 1
        if source.strikes and source.banned_until > now:
            return
        forgiven = int((now - source.struck_at) / self._limits.forget_s)
        source.strikes = min(max(source.strikes - forgiven, 0) + strikes, MAX_STRIKES)
        source.struck_at = now
        source.banned_until = now + min(self._ban_most, self._limits.ban_first_s * 2 ** (source.strikes - 1))

    def _expire(self, now: float) -> list[Request]:
        limit = self._limits.no_progress_s
        old = [
            Request(name, self._pieces[digest])
            for digest, asks in self._asked.items()
            for name, since in asks.items()
            if now >= since + limit
        ]
        for request in old:
            self._failed(request, "failed", f"no answer within {limit:g} s", now)
        return old

    def _story(self, now: float) -> str:
        """Why the fetch ends, source by source."""
        told = "; ".join(f"{source.name}: {source.last_error}" for source in self._sources.values())
        waited = now - self._progress_at
        return f"no piece arrived for {waited:.0f} s, {len(self._pieces)} are missing; last errors: {told or 'there is no source'}"


def _forget_absent(source: _Source, now: float) -> None:
    """Drop what is believed no longer."""
    while source.absent and next(iter(source.absent.values())) <= now:
        source.absent.popitem(last=False)
