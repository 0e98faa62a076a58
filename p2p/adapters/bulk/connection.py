"""A connection at work: one thread that reads, writes and waits; it owns the TLS state, which no two threads may touch at once.

Each turn reads a bounded amount and writes one burst (control frames and adverts first, then one part of a piece), so that neither
direction starves the other and a cancel is never behind a whole piece. What to do with frames is decided by the hub's parts.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from contextlib import suppress

from p2p.adapters.bulk.catalogue import Catalogue
from p2p.adapters.bulk.exchange import Exchange
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Arriving, Link
from p2p.adapters.bulk.outbox import MOST_CONTROL, Upload, burst_bytes, part_bytes
from p2p.adapters.bulk.pipe import TlsPipe
from p2p.adapters.bulk.renewal import renewed
from p2p.domain import bulk_frames as frames
from p2p.domain.bucket import TokenBucket
from p2p.errors import FrameRefused, PeerLost, TicketError

log = logging.getLogger(__name__)
FAREWELL_S = 0.5
RETRY_S = 0.01  # while there is no room for a piece
CONTROL_BURST = 2.0  # seconds' worth of control frames that may come at once
COSTS = {frames.BATCH: 20, frames.ASK: 20, frames.KNOWS: 4, frames.RENEW: 100}  # in control frames
_CATALOGUE = frozenset({frames.KNOWS, frames.ASK, frames.BATCH, frames.FORGET})
_EXCHANGE = frozenset({frames.HAVE, frames.REQUEST, frames.CANCEL, frames.ABSENT, frames.ABORTED})


class Connection:
    """Runs a link until it ends. `run` is the whole of it; everything else is called from there, in the same thread."""

    def __init__(self, pipe: TlsPipe, link: Link, hub: Hub, catalogue: Catalogue, exchange: Exchange) -> None:
        self._pipe = pipe
        self._link = link
        self._hub = hub
        self._catalogue = catalogue
        self._exchange = exchange
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._events = select.POLLIN
        self._poller.register(pipe.sock, self._events)
        self._thread = threading.get_ident()
        now = time.monotonic()
        rate = hub.settings.limits.control_per_s
        self._control = TokenBucket(rate, rate * CONTROL_BURST, now=now)
        self._head_bytes = memoryview(bytearray(frames.HEAD_BYTES))
        self._head: frames.Head | None = None
        self._rest = self._head_bytes  # what the next bytes fill: a head, a payload, or a part of a piece
        self._payload = bytearray()
        self._arriving: Arriving | None = None
        self._scratch = memoryview(b"")
        self._is_stuck = False
        self._heard_at = now
        self._pinged_at = now
        self._leaving: Upload | None = None
        link.wake = self._wake

    def run(self) -> str:
        """Serve the connection until it ends; why it did. The link is closed with the hub, the socket is closed."""
        at_fault = False
        try:
            self._catalogue.greet(self._link)
            self._decode()  # what came in one read with the end of the handshake
            while self._link.closing is None:
                self._turn()
            reason = self._link.closing
        except (FrameRefused, TicketError) as error:
            reason, at_fault = str(error), True
        except (PeerLost, OSError) as error:
            reason = str(error)
        except Exception as error:  # a defect here: it must not leave the link behind
            reason = f"internal error: {type(error).__name__}"
            log.exception("the connection with %s ended by a defect", self._link.peer)
        self._hub.close(self._link, reason, at_fault)
        self._say_farewell(reason)
        return reason

    def _wake(self) -> None:
        if threading.get_ident() != self._thread:  # this thread looks again before it waits
            os.eventfd_write(self._wake_fd, 1)

    def _say_farewell(self, reason: str) -> None:
        with suppress(PeerLost, OSError):
            self._pipe.write(frames.bye(reason))
            self._pipe.flush_by(time.monotonic() + FAREWELL_S)
        with self._hub.lock:
            self._link.wake = lambda: None
        self._pipe.close()
        os.close(self._wake_fd)

    # --- one turn

    def _turn(self) -> None:
        now = time.monotonic()
        self._keep_alive(now)
        wait_s, events = self._interest(now)
        if events != self._events:
            self._events = events
            self._poller.modify(self._pipe.sock, events)
        found = dict(self._poller.poll(max(0.0, wait_s) * 1000))
        if self._wake_fd in found:
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
        ready = found.get(self._pipe.sock.fileno(), 0)
        if ready & ~select.POLLOUT or self._is_stuck:
            self._receive()
        if ready & select.POLLOUT:
            self._transmit()

    def _interest(self, now: float) -> tuple[float, int]:
        """How long to wait at most, and for what."""
        wait = self._pinged_at + self._hub.settings.limits.ping_s - now
        events = 0
        hold = max(self._control.wait(now), self._hub.throttle.down_wait(now))
        if self._is_stuck:
            wait = min(wait, RETRY_S)
        elif hold > 0:
            self._heard_at = now  # it is this side that does not listen
            wait = min(wait, hold)
        else:
            events |= select.POLLIN
        if self._pipe.unsent:
            return wait, events | select.POLLOUT
        with self._hub.lock:
            outbox = self._link.outbox
            due = outbox.due(self._hub.pause_s)
            has_control, has_uploads = bool(outbox.control), bool(outbox.uploads)
        up_wait = self._hub.throttle.up_wait(now) if has_uploads else 0.0
        if has_control or (has_uploads and up_wait <= 0) or (due is not None and due <= now):
            return wait, events | select.POLLOUT
        if has_uploads:
            wait = min(wait, up_wait)
        return wait if due is None else min(wait, due - now), events

    def _keep_alive(self, now: float) -> None:
        limits = self._hub.settings.limits
        if now - self._heard_at > limits.silence_s:
            raise PeerLost(f"nothing was heard of {self._link.peer} for {limits.silence_s:g} s")
        if self._hub.settings.unix() >= self._link.expires_at:
            self._link.close("the ticket expired; a new one renews the connection before that")
        if now - self._pinged_at >= limits.ping_s:
            self._pinged_at = now
            stamp = int(now * 1e6)
            with self._hub.lock:
                self._link.say(frames.frame(frames.PING, a=stamp >> 32 & 0xFFFFFFFF, b=stamp & 0xFFFFFFFF))
        if self._link.outbox.control_bytes > MOST_CONTROL:
            raise PeerLost(f"{self._link.peer} does not read: {self._link.outbox.control_bytes} bytes of control frames wait")

    # --- reading

    def _receive(self) -> None:
        """Take a bounded amount from the socket."""
        if self._is_stuck:
            self._is_stuck = False
            if not self._start(self._head):
                return
        elif not self._pipe.fill():
            return
        self._heard_at = time.monotonic()
        self._decode()

    def _decode(self) -> None:
        """Handle every whole frame that is here."""
        read_into = self._pipe.read_into
        while self._link.closing is None and not self._is_stuck:
            rest = self._rest
            count = read_into(rest)
            if count == 0:
                return
            if count < len(rest):
                self._rest = rest[count:]
            else:
                self._step()

    def _step(self) -> None:
        """A head or a payload is whole."""
        head = self._head
        if head is None:
            self._start(frames.read_head(self._head_bytes))
            return
        if head.kind == frames.DATA:
            assert self._arriving is not None
            self._hub.throttle.received(head.length, self._heard_at)
            self._exchange.part(self._link, self._arriving, head.length, head.flag)
        else:
            self._handle(head, self._payload)
        self._expect_head()

    def _expect_head(self) -> None:
        self._head, self._rest = None, self._head_bytes

    def _start(self, head: frames.Head | None) -> bool:
        """A frame begins; False if there is no room for its piece yet."""
        assert head is not None
        self._head = head
        if head.kind != frames.DATA:
            self._control.take(COSTS.get(head.kind, 1), self._heard_at)
            self._payload = bytearray(head.length)
            self._rest = memoryview(self._payload)
            if head.length == 0:
                self._step()
            return True
        target = self._data_target(head)
        self._is_stuck = target is None
        if target is not None:
            self._rest = target
        return target is not None

    def _data_target(self, head: frames.Head) -> memoryview | None:
        """Where the part's bytes go: into the piece, or nowhere."""
        arriving = self._link.arriving
        if arriving is None:
            arriving = self._exchange.begin(self._link, head)
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
            self._exchange.take(self._link, head, payload)
        elif head.kind in _CATALOGUE:
            self._catalogue.take(self._link, head, payload)
        elif head.kind == frames.PING:
            with self._hub.lock:
                self._link.say(frames.frame(frames.PONG, a=head.a, b=head.b))
        elif head.kind == frames.PONG:
            self._ponged(head)
        elif head.kind == frames.BYE:
            raise PeerLost(f"{self._link.peer} ended the connection: {frames.reason_of(payload)}")
        elif head.kind == frames.RENEW:
            renewed(self._link, payload, self._hub.settings)
        elif head.kind < frames.FIRST_SKIPPABLE:
            raise FrameRefused(f"a {frames.name_of(head.kind)} frame came after the handshake")

    def _ponged(self, head: frames.Head) -> None:
        """A round trip: the echo of this node's own clock. The shortest counts, since queues only lengthen it."""
        now = int(self._heard_at * 1e6)
        spent = (now - (head.a << 32 | head.b)) / 1e6
        if 0 <= spent <= self._hub.settings.limits.silence_s:
            self._link.rtt_s = min(self._link.rtt_s, spent)

    # --- writing

    def _transmit(self) -> None:
        """One burst, or what is left of the last one."""
        if not self._pipe.unsent:
            self._compose(time.monotonic())
        if self._pipe.flush() and self._leaving is not None:
            upload, self._leaving = self._leaving, None
            self._exchange.sent(self._link, upload)

    def _compose(self, now: float) -> None:
        """Control frames and adverts, then parts of a piece: one on a slow uplink, a few on a fast one."""
        throttle, outbox, uplink = self._hub.throttle, self._link.outbox, self._hub.uplink
        left = burst_bytes(uplink) if throttle.up_wait(now) <= 0 else 0
        if left:
            self._load_first()
        with self._hub.lock:
            control = outbox.take_control(uplink, now, self._hub.pause_s)
        if control:
            self._pipe.write(b"".join(control))
        begun, most = left, part_bytes(uplink)
        while left > 0 and self._leaving is None:
            with self._hub.lock:
                taken = outbox.take_part(most)
                if taken is not None and taken[3]:
                    self._exchange.written(self._link, taken[0])
            if taken is None:
                break
            upload, part, begin, is_last = taken
            self._pipe.write(frames.data_head(upload.number, upload.index, begin, len(part), upload.flag))
            self._pipe.write(part)
            left -= len(part)
            if is_last:
                self._leaving = upload
        if left < begun:
            throttle.sent(begun - left, now)

    def _load_first(self) -> None:
        """The data of the next upload, read and verified before its first byte leaves."""
        with self._hub.lock:
            uploads = self._link.outbox.uploads
            first = uploads[0] if uploads else None
        if first is not None and first.data is None:
            self._exchange.load(self._link, first)
