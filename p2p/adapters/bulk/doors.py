"""How connections come to be: a listener that lets in holders of tickets, and diallers that keep a connection to a peer up."""

from __future__ import annotations

import os
import random
import select
import socket
import ssl
import threading
import time
from collections import Counter
from contextlib import suppress

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk import sockets
from p2p.adapters.bulk.events import PeerClosed
from p2p.adapters.bulk.handshake import Door, admit, introduce, refuse, welcome
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.loop import Loop
from p2p.adapters.bulk.pipe import TlsPipe, client_context
from p2p.domain import bulk_frames as frames
from p2p.domain.addresses import PeerInfo, may_dial, spelled
from p2p.domain.tickets import Ticket, peek_ticket
from p2p.errors import PeerLost, SwarmError

BACKLOG = 128
LIVED_S = 10.0  # a connection that lasted so long was a good one: the next dial does not wait
CROWDED_S = 0.05
ASIDE_S = 1.0  # how often a dialler looks whether the peer, connected from its end, is gone


class Listener:
    """Accepts connections. Each has a thread of its own until its handshake is over; strangers are few and have little time."""

    def __init__(self, hub: Hub, loop: Loop, door: Door, context: ssl.SSLContext) -> None:
        settings = hub.settings
        self._hub = hub
        self._loop = loop
        self._door = door
        self._context = context
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        takes_both = (
            settings.host == "::" and socket.has_dualstack_ipv6()
        )  # peers come by a name, which may stand for either family
        place = (settings.host, settings.port)
        self._server = socket.create_server(place, family=family, backlog=BACKLOG, dualstack_ipv6=takes_both)
        self._server.setblocking(False)
        self.port: int = self._server.getsockname()[1]
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, str] = {}  # oldest first; by address
        self._open: Counter[str] = Counter()  # connections by peer
        self._threads: set[threading.Thread] = set()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._is_closing = False
        self._thread = threading.Thread(target=self._accept_all, name="bulk-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, and end who showed no ticket yet."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        self._thread.join()
        with self._lock:
            strangers, threads = list(self._strangers), list(self._threads)
        for sock in strangers:
            _hang_up(sock)
        for thread in threads:
            thread.join()
        os.close(self._wake_fd)

    def _accept_all(self) -> None:
        poller = select.poll()
        poller.register(self._server, select.POLLIN)
        poller.register(self._wake_fd, select.POLLIN)
        while not self._is_closing:
            poller.poll()
            try:
                sock, address = self._server.accept()
            except (BlockingIOError, ConnectionError):
                continue
            except OSError:  # no descriptor is left: others must end before one can be taken
                time.sleep(CROWDED_S)
                continue
            self._meet(sock, str(address[0]))
        self._server.close()

    def _meet(self, sock: socket.socket, address: str) -> None:
        """A thread for a stranger, if there is room."""
        limits = self._hub.settings.limits
        with self._lock:
            from_there = sum(other == address for other in self._strangers.values())
            if from_there >= limits.strangers_per_address or self._open.total() >= limits.connections:
                sock.close()
                return
            if len(self._strangers) >= limits.strangers:
                _hang_up(next(iter(self._strangers)))
            self._strangers[sock] = address
            thread = threading.Thread(target=self._receive, args=(sock,), name="bulk-in", daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:  # the system gives no thread
            sock.close()
            with self._lock:
                self._strangers.pop(sock, None)
                self._threads.discard(thread)

    def _receive(self, sock: socket.socket) -> None:
        """A handshake; then the connection is the loop's."""
        try:
            pipe = TlsPipe(sock, self._context, server_side=True)
            link = self._let_in(pipe, time.monotonic() + self._hub.settings.limits.hello_s)
        except (SwarmError, OSError):
            sock.close()  # whoever it was could not be served and was told why, or is gone
        else:
            self._loop.adopt(pipe, link, lambda _reason: self._gone(link.peer))
        finally:
            with self._lock:
                self._strangers.pop(sock, None)
                self._threads.discard(threading.current_thread())

    def _gone(self, peer: str) -> None:
        with self._lock:
            self._open[peer] -= 1
            self._open += Counter()

    def _let_in(self, pipe: TlsPipe, deadline: float) -> Link:
        """The handshake, and a place among the links. Raises PeerLost, FrameRefused, TicketError, OSError."""
        hub = self._hub
        sockets.prepare(pipe.sock, hub.settings.congestion)
        ticket, uplink = admit(pipe, self._door, deadline)
        link = _link(hub, ticket.fetcher, ticket, pipe, uplink, dialled_here=False)
        link.key, link.expires_at = ticket.fetcher_key, ticket.expires_at
        with self._lock:
            is_crowded = self._open[ticket.fetcher] >= hub.settings.limits.connections_per_peer
            if not is_crowded:
                self._open[ticket.fetcher] += 1
        refusal = f"{ticket.fetcher} holds as many connections as it may" if is_crowded else hub.admits(link)
        try:
            if refusal is not None:
                raise PeerLost(refusal)
            welcome(pipe, hub.uplink, deadline)
            refusal = hub.open(link)
            if refusal is not None:
                raise PeerLost(refusal)
        except (PeerLost, OSError):
            if refusal is not None:
                refuse(pipe, refusal, deadline)
            if not is_crowded:
                self._gone(ticket.fetcher)
            raise
        return link


class Dialler:
    """Keeps a connection to one peer up, from this end unless there is one from the other. Redials later and later."""

    def __init__(self, hub: Hub, loop: Loop, key: Ed25519PrivateKey, address: PeerInfo, ticket: str) -> None:
        """Raises PeerLost when the address may not be dialled, TicketError when the ticket is none."""
        read = peek_ticket(ticket)
        refusal = may_dial(address.host, address.port, hub.settings.allowed_networks)
        if refusal is not None:
            raise PeerLost(f"peer {read.server} is not dialled: {refusal}")
        self.peer, self.job_id = read.server, read.job_id
        self._hub = hub
        self._loop = loop
        self._key = key
        self._address = address
        self._ticket = ticket
        self._stop = threading.Event()
        self._nudge = threading.Event()
        self._sock: socket.socket | None = None
        self._thread = threading.Thread(target=self._keep_up, name="bulk-out", daemon=True)
        self._thread.start()

    def renew(self, address: PeerInfo, ticket: str) -> None:
        """A new ticket, and the address as it is now. The open connection lives on under the ticket."""
        is_new = ticket != self._ticket
        self._address, self._ticket = address, ticket
        self._nudge.set()
        if not is_new:
            return
        hub = self._hub
        with hub.lock:
            link = hub.links.get((self.job_id, self.peer))
            if link is not None and link.dialled_here:
                link.say(frames.frame(frames.RENEW, ticket.encode()))

    def stop(self) -> None:
        """Dial no more, and end a handshake; an open connection ends with its link."""
        self._stop.set()
        self._nudge.set()
        sock = self._sock
        if sock is not None:
            _hang_up(sock)

    def join(self) -> None:
        """Wait for the thread."""
        self._thread.join()

    def _keep_up(self) -> None:
        limits = self._hub.settings.limits
        wait = limits.redial_first_s
        while not self._stop.is_set():
            if self._is_connected():
                self._pause(ASIDE_S)
                continue
            begun = time.monotonic()
            try:
                self._dial()
            except (SwarmError, OSError) as error:
                self._hub.emit(PeerClosed(self.peer, self.job_id, str(error)))
            if time.monotonic() - begun > LIVED_S:
                wait = limits.redial_first_s
            self._pause(wait * random.uniform(0.75, 1.25))  # noqa: S311  # apart from others that lost the same peer
            wait = min(wait * 2, limits.redial_most_s)

    def _pause(self, seconds: float) -> None:
        self._nudge.wait(seconds)
        self._nudge.clear()

    def _is_connected(self) -> bool:
        hub = self._hub
        with hub.lock:
            return (self.job_id, self.peer) in hub.links

    def _dial(self) -> None:
        """One connection from dialling to its end. Raises PeerLost, FrameRefused, TicketError, OSError."""
        hub = self._hub
        limits = hub.settings.limits
        address = self._address
        try:
            sock = socket.create_connection((address.host, address.port), timeout=limits.connect_s)
        except OSError as error:
            raise PeerLost(f"peer {self.peer} at {spelled(address.host, address.port)} does not answer: {error}") from error
        self._sock = sock
        with sock:
            if self._stop.is_set():
                return
            sockets.prepare(sock, hub.settings.congestion)
            pipe = TlsPipe(sock, client_context(), server_side=False)
            deadline = time.monotonic() + limits.hello_s
            ticket, uplink = introduce(pipe, address.certificate_sha256, self._ticket, self._key, hub.uplink, deadline)
            link = _link(hub, ticket.server, ticket, pipe, uplink, dialled_here=True)
            refusal = hub.open(link)
            if refusal is not None:
                refuse(pipe, refusal, deadline)
                raise PeerLost(refusal)
            self._sock = None
            over = threading.Event()
            self._loop.adopt(pipe, link, lambda _reason: over.set())
            over.wait()


def _link(hub: Hub, peer: str, ticket: Ticket, pipe: TlsPipe, uplink: float, *, dialled_here: bool) -> Link:
    rtt_s = sockets.figures(pipe.sock).rtt_s
    return Link(peer, ticket.job_id, dialled_here, peer in hub.settings.seeders, uplink, rtt_s, sock=pipe.sock)


def _hang_up(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
