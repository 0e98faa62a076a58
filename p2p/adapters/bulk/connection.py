"""A connection at work: what it does when its socket is ready, when something waits to be written, and when time has passed.

It never waits: the loop's thread calls it, and asks it what to wait for. Each turn reads a bounded amount and writes about 10 ms of what can leave
(control frames and adverts first, then parts of pieces), so that no connection and neither direction starves another and a cancel is
behind little. Few turns of much each: what a turn costs besides its bytes is what a fast link's CPU goes to. What to do with frames
is decided by the hub's parts.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable
from dataclasses import dataclass

from p2p.adapters.bulk.catalogue import Catalogue
from p2p.adapters.bulk.exchange import Exchange
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Arriving, Link
from p2p.adapters.bulk.outbox import MOST_BURST, MOST_CONTROL, Upload, part_bytes, turn_bytes
from p2p.adapters.bulk.pipe import READ_BYTES, TlsPipe
from p2p.adapters.bulk.renewal import renewed
from p2p.domain import bulk_frames as frames
from p2p.errors import FrameRefused, PeerLost, TicketError

log = logging.getLogger(__name__)
FAREWELL_S = 0.5
RETRY_S = 0.01  # while there is no room for a piece
CONTROL_BURST = 2.0  # seconds' worth of control frames that may come at once
COSTS = {frames.BATCH: 20, frames.ASK: 20, frames.KNOWS: 4, frames.RENEW: 100}  # in control frames
NEVER = float("inf")
NOTHING = memoryview(b"")
MOST_FILLS = 4  # reads from a socket in one turn
STAGE_BYTES = 16 << 10  # a TLS record
_CATALOGUE = frozenset({frames.KNOWS, frames.ASK, frames.BATCH, frames.FORGET})
_EXCHANGE = frozenset({frames.HAVE, frames.REQUEST, frames.CANCEL, frames.ABSENT, frames.ABORTED})


@dataclass(frozen=True, slots=True)
class Parts:
    """What every connection works with."""

    hub: Hub
    catalogue: Catalogue
    exchange: Exchange


class Connection:
    """Serves a link until it ends. `fd` and `wants` are for epoll, `due` is when to `settle` even if nothing happens.

    When `is_over`, the link is closed with the hub and the socket is to be closed.
    """

    def __init__(self, pipe: TlsPipe, link: Link, parts: Parts, ended: Callable[[str], None]) -> None:
        """`ended(reason)` is for whoever made the connection."""
        hub = parts.hub
        self.pipe = pipe
        self.link = link
        self.ended = ended
        self.fd = pipe.sock.fileno()
        self.wants = 0
        self.registered = 0  # what epoll was told
        self.due = NEVER
        self.is_over = False
        self.reason = ""
        self._hub = hub
        self._catalogue = parts.catalogue
        self._exchange = parts.exchange
        now = time.monotonic()
        rate = hub.settings.limits.control_per_s
        self._rate = rate
        self._credit = rate * CONTROL_BURST  # control frames that may come; a token bucket, filled when it is empty
        self._filled_at = now
        self._stage = memoryview(bytearray(STAGE_BYTES))
        self._staged = 0  # bytes in it: the beginning of a frame
        self._head: frames.Head | None = None
        self._rest = NOTHING  # what the next bytes fill: the rest of a payload or part; empty before a frame begins
        self._payload = bytearray()
        self._arriving: Arriving | None = None
        self._scratch = NOTHING
        self._is_stuck = False
        self._heard_at = now
        self._pinged_at = now
        self._leaving: Upload | None = None
        self._over_by = NEVER  # it is ending: when the farewell must have left

    # --- what the loop calls

    def begin(self, now: float) -> None:
        """Say what is known here; take what came in one read with the end of the handshake."""
        self._guarded(self._begin, now)

    def ready(self, events: int, now: float) -> None:
        """The socket can be read or written."""
        if self._over_by < NEVER:
            self._leave(now)
            return
        if events & ~select.EPOLLOUT:
            self._guarded(self._receive, now)
        if events & select.EPOLLOUT and self._over_by == NEVER:
            self._guarded(self._transmit, now)

    def settle(self, now: float) -> None:
        """Write what waits and may go at once; say what to wait for."""
        if self._over_by < NEVER:
            self._leave(now)
            return
        self._guarded(self._settle, now)

    def keep_alive(self, now: float) -> None:
        """Called now and then: pings, silence, the ticket's end."""
        if self._over_by == NEVER:
            self._guarded(self._keep_alive, now)

    def forgive(self, seconds: float) -> None:
        """This node was asleep for so long: the peer is not to blame for its silence."""
        self._heard_at += seconds

    # --- the end

    def _guarded(self, step: Callable[[float], None], now: float) -> None:
        try:
            step(now)
        except (FrameRefused, TicketError) as error:
            self._end(str(error), now, at_fault=True)
        except (PeerLost, OSError) as error:
            self._end(str(error), now)
        except Exception as error:  # a defect here: it must not leave the link behind
            log.exception("the connection with %s ended by a defect", self.link.peer)
            self._end(f"internal error: {type(error).__name__}", now)

    def _end(self, reason: str, now: float, *, at_fault: bool = False) -> None:
        self.reason = reason
        self._over_by = now + FAREWELL_S
        self._hub.close(self.link, reason, at_fault)
        try:
            self.pipe.write(frames.bye(reason))
        except (PeerLost, OSError):
            self.is_over = True
            return
        self._leave(now)

    def _leave(self, now: float) -> None:
        """The farewell, as long as the peer takes it."""
        self.wants, self.due = select.EPOLLOUT, self._over_by
        try:
            self.is_over = self.pipe.flush() or now >= self._over_by
        except (PeerLost, OSError):
            self.is_over = True

    # --- time

    def _begin(self, now: float) -> None:
        self._catalogue.greet(self.link)
        self._decode()
        self._settle(now)

    def _settle(self, now: float) -> None:
        """Control frames go at once, unless a part is about to take them along; parts wait until the kernel asks for more."""
        link, outbox = self.link, self.link.outbox
        if link.closing is not None:
            self._end(link.closing, now)
            return
        self.due = NEVER
        wants = self._listens(now)
        if not self.pipe.unsent:
            is_sending = bool(outbox.uploads) and self._may_send(now)
            if outbox.control and not (is_sending and not self.wants & select.EPOLLOUT):
                self._say()
            if is_sending:
                wants |= select.EPOLLOUT
        if self.pipe.unsent:
            wants |= select.EPOLLOUT
        self.wants = wants

    def _listens(self, now: float) -> int:
        """Whether to wait for the peer's bytes now."""
        if self._is_stuck:
            self._is_stuck = False
            self._parse(self._staged)
            self._decode()
        hold = RETRY_S if self._is_stuck else self._hold(now)
        if hold <= 0:
            return select.EPOLLIN
        self._heard_at = now  # it is this side that does not listen
        self.due = min(self.due, now + hold)
        return 0

    def _hold(self, now: float) -> float:
        """Seconds until more may come."""
        return max(self._overdraft(now), self._hub.throttle.down_wait(now))

    def _overdraft(self, now: float) -> float:
        """Seconds until the peer may say more."""
        if self._credit >= 0:
            return 0.0
        self._credit = min(self._credit + (now - self._filled_at) * self._rate, self._rate * CONTROL_BURST)
        self._filled_at = now
        return max(0.0, -self._credit / self._rate)

    def _may_send(self, now: float) -> bool:
        """Whether the first upload's next part can go."""
        wait = self._hub.throttle.up_wait(now)
        if wait > 0:
            self.due = min(self.due, now + wait)
            return False
        with self._hub.lock:
            uploads = self.link.outbox.uploads
            first = uploads[0] if uploads else None
        return first is not None and (first.held is not None or self._exchange.seek(self.link, first))

    def _keep_alive(self, now: float) -> None:
        limits = self._hub.settings.limits
        if not self.wants & select.EPOLLIN:
            self._heard_at = now
        if now - self._heard_at > limits.silence_s:
            raise PeerLost(f"nothing was heard of {self.link.peer} for {limits.silence_s:g} s")
        if self._hub.settings.unix() >= self.link.expires_at:
            self.link.close("the ticket expired; a new one renews the connection before that")
        if now - self._pinged_at >= limits.ping_s:
            self._pinged_at = now
            stamp = int(now * 1e6)
            with self._hub.lock:
                self.link.say(frames.frame(frames.PING, a=stamp >> 32 & 0xFFFFFFFF, b=stamp & 0xFFFFFFFF))
        if self.link.outbox.control_bytes > MOST_CONTROL:
            raise PeerLost(f"{self.link.peer} does not read: {self.link.outbox.control_bytes} bytes of control frames wait")

    # --- reading

    def _receive(self, now: float) -> None:
        """Take a bounded amount from the socket, as long as it gives all that is asked for."""
        for _ in range(MOST_FILLS):
            count = self.pipe.fill()
            if not count:
                break
            self._heard_at = now
            self._decode()
            if count < READ_BYTES or self._is_stuck or self.link.closing is not None or self._hold(now) > 0:
                break
        self._exchange.progress(self.link, now)

    def _decode(self) -> None:
        """Handle every whole frame that is here. Long payloads are read where they belong, all else by way of the stage."""
        read_into, read_record = self.pipe.read_into, self.pipe.read_record
        while self.link.closing is None and not self._is_stuck:
            rest = self._rest
            if not rest:
                count = read_record(self._stage[self._staged :])
                if count == 0:
                    return
                self._parse(self._staged + count)
                continue
            count = read_into(rest)
            if count == 0:
                return
            self._rest = rest[count:]
            if count == len(rest):
                self._finish()

    def _parse(self, end: int) -> None:
        """Handle the frames in the stage's first `end` bytes; what is left of them moves to its front."""
        stage, at = self._stage, 0
        while end - at >= frames.HEAD_BYTES and self.link.closing is None:
            head = self._head = frames.read_head(stage, at)
            target = self._start(head)
            if target is None:
                break
            at += frames.HEAD_BYTES
            here = min(head.length, end - at)
            target[:here] = stage[at : at + here]
            at += here
            if here < head.length:
                self._rest = target[here:]
                break
            self._finish()
        self._staged = end - at
        if at and self._staged:
            stage[: self._staged] = bytes(stage[at:end])

    def _start(self, head: frames.Head) -> memoryview | None:
        """A frame begins: where its payload goes; None if there is no room for its piece yet."""
        if head.kind == frames.DATA:
            target = self._data_target(head)
            self._is_stuck = target is None
            return target
        self._credit -= COSTS.get(head.kind, 1)
        self._payload = bytearray(head.length)
        return memoryview(self._payload)

    def _finish(self) -> None:
        """A frame is whole."""
        head = self._head
        assert head is not None
        if head.kind != frames.DATA:
            self._handle(head, self._payload)
            return
        assert self._arriving is not None
        self._hub.throttle.received(head.length, self._heard_at)
        self._exchange.part(self.link, self._arriving, head.length, head.flag)

    def _data_target(self, head: frames.Head) -> memoryview | None:
        """Where the part's bytes go: into the piece, or nowhere."""
        arriving = self.link.arriving
        if arriving is None:
            arriving = self._exchange.begin(self.link, head)
            if arriving is None:
                return None
        elif (head.transfer, head.a) != (arriving.number, arriving.index):
            raise FrameRefused(f"piece {head.a} came in the middle of piece {arriving.index}")
        elif head.b != arriving.received:
            raise FrameRefused(f"piece {head.a} goes on at byte {head.b}; {arriving.received} bytes came so far")
        if arriving.received + head.length > arriving.size:
            raise FrameRefused(f"piece {head.a} holds {arriving.size} bytes; {arriving.received + head.length} or more came")
        self._arriving = arriving
        if arriving.buffer is None:
            if not self._scratch:
                self._scratch = memoryview(bytearray(frames.PART_BYTES))
            return self._scratch[: head.length]
        return memoryview(arriving.buffer)[arriving.received : arriving.received + head.length]

    def _handle(self, head: frames.Head, payload: bytearray) -> None:
        """Every frame but DATA."""
        if head.kind in _EXCHANGE:
            self._exchange.take(self.link, head, payload)
        elif head.kind in _CATALOGUE:
            self._catalogue.take(self.link, head, payload)
        elif head.kind == frames.PING:
            with self._hub.lock:
                self.link.say(frames.frame(frames.PONG, a=head.a, b=head.b))
        elif head.kind == frames.PONG:
            self._ponged(head)
        elif head.kind == frames.BYE:
            raise PeerLost(f"{self.link.peer} ended the connection: {frames.reason_of(payload)}")
        elif head.kind == frames.RENEW:
            renewed(self.link, payload, self._hub.settings)
        elif head.kind < frames.FIRST_SKIPPABLE:
            raise FrameRefused(f"a {frames.name_of(head.kind)} frame came after the handshake")

    def _ponged(self, head: frames.Head) -> None:
        """A round trip: the echo of this node's own clock. The shortest counts, since queues only lengthen it."""
        now = int(self._heard_at * 1e6)
        spent = (now - (head.a << 32 | head.b)) / 1e6
        if 0 <= spent <= self._hub.settings.limits.silence_s:
            self.link.rtt_s = min(self.link.rtt_s, spent)

    # --- writing

    def _say(self) -> None:
        """Control frames, in one record."""
        with self._hub.lock:
            control = self.link.outbox.take_control()
        if control:
            self.pipe.write(control)
            self.pipe.flush()

    def _transmit(self, now: float) -> None:
        """One turn: the rest of the last one; or control frames and adverts, then parts of pieces until the kernel has enough."""
        if self.pipe.unsent:
            self._flush()
            return
        pace = self._pace()
        left = turn_bytes(pace)
        while left > 0:
            written = self._compose(left, part_bytes(pace), now)
            if not self._flush() or not written:
                return
            left -= written

    def _flush(self) -> bool:
        """Whether the kernel took all. Then a piece of which that was the end is sent."""
        if not self.pipe.flush():
            return False
        if self._leaving is not None:
            upload, self._leaving = self._leaving, None
            self._exchange.sent(self.link, upload)
        return True

    def _pace(self) -> float:
        """Bytes a second that may leave: what can, within the owner's limit of this moment."""
        limit = self._hub.throttle.up_limit
        return self._hub.pace if limit is None else min(self._hub.pace, limit)

    def _compose(self, most: int, part: int, now: float) -> int:
        """Control frames and adverts, then about `most` bytes of a piece, in parts of `part` bytes; how many."""
        hub, outbox = self._hub, self.link.outbox
        may_send = bool(outbox.uploads) and self._may_send(now)
        with hub.lock:
            if may_send:
                hub.let_ride(self.link)
            control = outbox.take_control()
        if may_send:
            return self._write_parts(control, most, part, now)
        if control:
            self.pipe.write(control)
        return 0

    def _write_parts(self, before: bytes, most: int, size: int, now: float) -> int:
        """Parts of a piece, given to the kernel burst by burst; what goes before them is in one record with the first one's head."""
        hub, outbox = self._hub, self.link.outbox
        written = unsent = 0
        while written < most and self._leaving is None:
            if unsent >= MOST_BURST:
                if not self.pipe.flush():
                    break
                unsent = 0
            with hub.lock:
                taken = outbox.take_part(size)
                if taken is not None and taken[3]:
                    self._exchange.written(self.link, taken[0])
            if taken is None:
                break
            upload, part, begin, is_last = taken
            self.pipe.write(before + frames.data_head(upload.number, upload.index, begin, len(part), upload.flag))
            self.pipe.write(part)
            hub.throttle.sent(len(part), now)
            before = b""
            written += len(part)
            unsent += len(part)
            if is_last:
                self._leaving = upload
        if before:
            self.pipe.write(before)
        return written
