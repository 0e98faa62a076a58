"""TLS 1.3 over a non-blocking TCP socket, for one thread.

The TLS state sits between two memory buffers instead of on the socket: one system call then moves many records, which costs half the CPU
of `ssl.SSLSocket` on the receiving side, and a frame's head and body leave together.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, cast

from p2p.errors import PeerLost

READ_BYTES = 256 << 10


def server_context(certificate: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 or nothing, with this certificate; no session tickets, since no session is resumed."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    context.load_cert_chain(certificate, key)
    return context


def client_context() -> ssl.SSLContext:
    """TLS 1.3 or nothing. The certificate is compared with the pin by whoever dials: there is no authority to ask."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


class TlsPipe:
    """Bytes in and out of one connection. Raises PeerLost when TLS or the connection fails."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server_side: bool) -> None:
        self.sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server_side)
        self._read = cast(Callable[[int, memoryview], int], cast(Any, self._tls).read)
        self._raw = memoryview(bytearray(READ_BYTES))
        self._unsent = memoryview(b"")

    @property
    def unsent(self) -> bool:
        """Whether bytes wait for the socket."""
        return bool(self._unsent) or self._outgoing.pending > 0

    def peer_certificate(self) -> bytes:
        """The other side's certificate (DER); empty if it showed none."""
        return self._tls.getpeercert(binary_form=True) or b""

    def fill(self) -> int:
        """Take what the socket has, at most READ_BYTES; how many bytes, 0 if there are none now."""
        try:
            count = self.sock.recv_into(self._raw)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        if count == 0:
            raise PeerLost("the other side closed the connection")
        self._incoming.write(self._raw[:count])
        return count

    def read_record(self, view: memoryview) -> int:
        """`read_into` of no more than one record: a frame's head comes in one, and what follows it is read where it belongs."""
        if not self._incoming.pending and not self._tls.pending():
            return 0
        try:
            count = self._read(len(view), view)
        except ssl.SSLWantReadError:
            return 0
        except ssl.SSLError as error:
            raise PeerLost(f"TLS failed: {error.reason or error}") from error
        if count == 0:
            raise PeerLost("the other side ended TLS")
        return count

    def read_into(self, view: memoryview) -> int:
        """Decrypted bytes into `view`, as many as fit and are here; 0 if none are."""
        read, incoming, pending = self._read, self._incoming, self._tls.pending
        size, done = len(view), 0
        try:
            while done < size and (incoming.pending or pending()):  # to ask for nothing costs ten times as much
                count = read(size - done, view[done:])  # of one record of 16 KiB
                if count == 0:
                    raise PeerLost("the other side ended TLS")
                done += count
        except ssl.SSLWantReadError:
            return done
        except ssl.SSLError as error:
            raise PeerLost(f"TLS failed: {error.reason or error}") from error
        return done

    def write(self, data: bytes | memoryview) -> None:
        """Encrypt; `flush` sends."""
        try:
            done = self._tls.write(data)
            view = memoryview(data)
            while done < len(data):
                done += self._tls.write(view[done:])
        except ssl.SSLError as error:
            raise PeerLost(f"TLS failed: {error.reason or error}") from error

    def flush(self) -> bool:
        """Give the socket what it takes; True when nothing is left."""
        if not self._unsent:
            self._unsent = memoryview(self._outgoing.read())
        try:
            while self._unsent:
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
                if not self._unsent:
                    self._unsent = memoryview(self._outgoing.read())
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as error:
            raise PeerLost(f"the connection broke: {error}") from error
        return True

    # --- with a deadline, for the beginning and the end of a connection (`deadline` by time.monotonic)

    def handshake(self, deadline: float) -> None:
        """TLS's own. Raises PeerLost."""
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                self.flush_by(deadline)
                self._await(select.POLLIN, deadline)
                self.fill()
            except ssl.SSLError as error:
                raise PeerLost(f"the TLS handshake failed: {error.reason or error}") from error
        self.flush_by(deadline)

    def read_exactly(self, count: int, deadline: float) -> bytes:
        """`count` bytes. Raises PeerLost."""
        target = memoryview(bytearray(count))
        got = 0
        while got < count:
            taken = self.read_into(target[got:])
            got += taken
            if taken == 0:
                self._await(select.POLLIN, deadline)
                self.fill()
        return bytes(target)

    def flush_by(self, deadline: float) -> None:
        """Send everything that was written. Raises PeerLost."""
        while not self.flush():
            self._await(select.POLLOUT, deadline)

    def close(self) -> None:
        """End the connection; what the socket took still leaves."""
        self.sock.close()

    def _await(self, events: int, deadline: float) -> None:
        poller = select.poll()
        poller.register(self.sock, events)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise PeerLost("the other side took too long")
