"""One peer as seen over one connection: what both sides call transfers, what was asked, what is owed. Guarded by the hub's lock."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p.adapters.bulk.outbox import Outbox
from p2p.domain import bulk_frames as frames
from p2p.errors import FrameRefused

MOST_NUMBERS = 1 << 14  # transfers that one side may name on a connection
Key = tuple[str, int]  # transfer, piece


@dataclass(slots=True)
class Arriving:
    """The piece that comes in now. `buffer` is None when nobody wants its bytes any more."""

    transfer: str
    index: int
    number: int
    size: int
    buffer: bytearray | None
    since: float
    flag: int = 0
    received: int = 0
    told_at: float = 0.0

    @property
    def key(self) -> Key:
        """Which piece of which transfer."""
        return self.transfer, self.index


@dataclass(slots=True)
class Heard:
    """All that a peer announced of a transfer, and its latest figures."""

    pieces: int = 0
    queue: int = 0
    uplink: float = 0.0
    serves: bool = True


@dataclass(slots=True)
class Link:
    """The state of a peer pair within a job."""

    peer: str
    job_id: str
    dialled_here: bool
    is_seeder: bool
    uplink: float
    rtt_s: float
    key: str = ""  # of the dialler, hex; what a renewed ticket must name
    expires_at: float = float("inf")  # Unix seconds; of the ticket, where it was checked
    sock: socket.socket | None = None  # for what the kernel knows about it
    acked: int = 0  # bytes that the kernel said were delivered, when it was asked last
    wake: Callable[[], None] = lambda: None
    outbox: Outbox = field(default_factory=Outbox)
    numbers: dict[str, int] = field(default_factory=dict)  # this side's word for a transfer
    theirs: dict[int, str] = field(default_factory=dict)
    known: dict[str, int] = field(default_factory=dict)  # batches that the peer has, or was sent
    promised: dict[str, int] = field(default_factory=dict)  # batches that the peer says it has
    inquired: set[str] = field(default_factory=set)  # transfers whose batches it was asked for
    asks: int = 0  # of those, the ones that an answer is waited for
    is_kept_waiting: bool = False  # it knows more than it may be asked for at once
    unanswered: dict[str, int] = field(default_factory=dict)  # asks for a transfer's batches after which it brought nothing
    taught_at: float = float("-inf")  # time.monotonic; when it brought something new
    haves: dict[str, Heard] = field(default_factory=dict)  # all it announced, by transfer
    told: dict[str, int] = field(default_factory=dict)  # mask of what it was told of, by transfer
    news: set[str] = field(default_factory=set)  # transfers of which it is to be told, new pieces or not
    asked: Counter[Key] = field(default_factory=Counter)  # requests that no last word was heard of
    wanted: set[Key] = field(default_factory=set)  # of those, the ones not cancelled
    owed: set[Key] = field(default_factory=set)  # requests of the peer that got no last word
    pushed: set[Key] = field(default_factory=set)  # went out unasked: a request that crosses one is answered by it
    taken: set[Key] = field(default_factory=set)  # came in whole, unasked
    arriving: Arriving | None = None
    junk: int = 0  # bytes that came for transfers which are over
    is_leaving: bool = False  # the last bytes of an upload are on their way to the kernel
    closing: str | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    down_rate: float = 0.0

    def say(self, frame: bytes) -> None:
        """Write a control frame as soon as possible."""
        self.outbox.say(frame)
        self.wake()

    def close(self, reason: str) -> None:
        """End the connection; the peer is told why."""
        if self.closing is None:
            self.closing = reason
        self.wake()

    def number(self, transfer: str) -> int:
        """This side's word for a transfer, a new one if need be."""
        if transfer not in self.numbers:
            if len(self.numbers) >= MOST_NUMBERS:
                self.close(f"{MOST_NUMBERS} transfers were named on this connection; a new one starts afresh")
            self.numbers[transfer] = len(self.numbers) + 1
        return self.numbers[transfer]

    def name(self, number: int, transfer: str) -> None:
        """The peer's word for a transfer. Raises FrameRefused when it changes its meaning or there are too many."""
        if self.theirs.setdefault(number, transfer) != transfer:
            raise FrameRefused(f"number {number} stood for transfer {self.theirs[number][:12]}, now for {transfer[:12]}")
        if len(self.theirs) > MOST_NUMBERS:
            raise FrameRefused(f"{len(self.theirs)} transfers were named; at most {MOST_NUMBERS} are allowed on a connection")

    def transfer(self, number: int) -> str:
        """The transfer that the peer's number stands for. Raises FrameRefused."""
        try:
            return self.theirs[number]
        except KeyError:
            raise FrameRefused(f"number {number} stands for no transfer yet: KNOWS comes first") from None

    def request(self, key: Key) -> None:
        """Ask for a piece."""
        self.asked[key] += 1
        self.wanted.add(key)
        flag = frames.AGAIN if key in self.taken else 0
        self.say(frames.frame(frames.REQUEST, transfer=self.number(key[0]), flag=flag, a=key[1]))

    def cancel(self, key: Key) -> None:
        """Take a request back, or stop a push; the last word is still to come."""
        self.wanted.discard(key)
        self.say(frames.frame(frames.CANCEL, transfer=self.number(key[0]), a=key[1]))

    def last_word(self, key: Key) -> bool:
        """A request ended one way or the other; whether it was still wanted."""
        if self.asked[key] <= 1:
            del self.asked[key]
        else:
            self.asked[key] -= 1
            return False  # a later request for the piece is still to be answered
        was_wanted = key in self.wanted
        self.wanted.discard(key)
        return was_wanted

    def let_fall(self, nbytes: int, *, most: int) -> None:
        """So many bytes came for a transfer that is over, or has not begun: nobody's fault, within reason. Raises FrameRefused."""
        self.junk += nbytes
        if self.junk > most:
            raise FrameRefused(f"{self.junk} bytes came for transfers that are over or had not begun")

    def forget(self, transfer: str) -> None:
        """Nothing of the transfer is asked, owed or sent here any more; no last words are due."""
        for key in [key for key in self.asked if key[0] == transfer]:
            del self.asked[key]
        for keys in (self.wanted, self.owed, self.pushed, self.taken):
            keys.difference_update([key for key in keys if key[0] == transfer])
        self.outbox.forget(transfer)
        self.haves.pop(transfer, None)
        self.told.pop(transfer, None)
        self.news.discard(transfer)

    def refuse(self, key: Key) -> None:
        """Tell the peer that a piece it asked for will not come."""
        self.owed.discard(key)
        self.say(frames.frame(frames.ABSENT, transfer=self.number(key[0]), a=key[1]))

    def aborted(self, key: Key) -> None:
        """Tell the peer that a piece ends here."""
        self.owed.discard(key)
        self.say(frames.frame(frames.ABORTED, transfer=self.number(key[0]), a=key[1]))
