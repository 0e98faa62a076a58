"""The one door of the control network: which TCP connections are dialled and accepted, how many, and how fast they may be read.

It stands in libp2p's place for transports, so that no path around it exists: not the addresses that peers tell of themselves, not those
that gossip or a relay brings. It also ends the task that libp2p 0.8.1 keeps for every accepted connection until the host stops: without
that, a listener takes its maximum of connections once and is deaf from then on.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network

import trio
from libp2p.abc import IListener, IRawConnection
from libp2p.custom_types import THandler
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr
from multiaddr.exceptions import ProtocolLookupError

from p2p.domain.addresses import may_dial
from p2p.domain.bucket import TokenBucket

READ_RATE = 1 << 20  # bytes a second from one connection: control is small, floods are not
READ_BURST = 4 << 20
_AFTER_END_S = 0.5


@dataclass(frozen=True, slots=True)
class Limits:
    """What one node accepts. `allowed_networks` and `denied_networks` are CIDRs: dialled though not public; never dialled nor accepted."""

    allowed_networks: tuple[str, ...] = ()
    denied_networks: tuple[str, ...] = ()
    connections: int = 256
    connections_per_ip: int = 8


class Guard:
    """Counts accepted connections and judges addresses."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._allowed = frozenset(limits.allowed_networks)
        self._accepted: Counter[str] = Counter()

    def allow(self, networks: Iterable[str]) -> None:
        """Networks (CIDR) that may be dialled from now on, besides those of the limits."""
        self._allowed = frozenset((*self._limits.allowed_networks, *networks))

    def refuse_dial(self, host: str, port: int) -> str | None:
        """None if the address may be dialled, else the reason."""
        if self._is_denied(host):
            return f"{host} is in a denied network"
        return may_dial(host, port, tuple(self._allowed))

    def enter(self, host: str) -> bool:
        """Count an accepted connection in; False if it is one too many or denied."""
        origin = _origin(host)
        full = self._accepted.total() >= self._limits.connections or self._accepted[origin] >= self._limits.connections_per_ip
        if full or self._is_denied(host):
            return False
        self._accepted[origin] += 1
        return True

    def leave(self, host: str) -> None:
        """Count it out."""
        origin = _origin(host)
        self._accepted[origin] -= 1
        if self._accepted[origin] <= 0:
            del self._accepted[origin]

    def _is_denied(self, host: str) -> bool:
        return _within(host, self._limits.denied_networks)


class GuardedTCP(TCP):  # type: ignore[misc]  # libp2p is skipped by the type checker: it may be missing
    """libp2p's TCP transport behind a Guard; no names are resolved."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard
        self._streams: weakref.WeakSet[_PacedStream] = weakref.WeakSet()

    async def dial(self, maddr: Multiaddr) -> IRawConnection:
        host, port = _place(maddr)
        if reason := self._guard.refuse_dial(host, port):
            raise OpenConnectionError(reason)
        connection = await self._dial_resolved(maddr)
        assert isinstance(connection, RawConnection)
        assert isinstance(connection.stream, TrioTCPStream)
        return RawConnection(self._paced(connection.stream), initiator=True)

    async def dial_with_source(self, maddr: Multiaddr, source: tuple[str, int]) -> IRawConnection:
        raise OpenConnectionError(f"no hole punching here: {maddr} is not dialled from {source}")

    def create_listener(self, handler_function: THandler) -> IListener:
        async def admit(stream: ReadWriteCloser) -> None:
            assert isinstance(stream, TrioTCPStream)
            host = _remote_host(stream)
            if host is None or not self._guard.enter(host):
                await stream.close()
                return
            try:
                await _until_closed(self._paced(stream), handler_function)
            finally:
                self._guard.leave(host)

        return TCPListener(admit)

    def close_sockets(self) -> None:
        """Close whatever libp2p left open; for the end of the node."""
        for stream in list(self._streams):
            stream.stream.socket.close()

    def _paced(self, raw: TrioTCPStream) -> _PacedStream:
        stream = _PacedStream(raw)
        self._streams.add(stream)
        return stream


class _PacedStream(TrioTCPStream):  # type: ignore[misc]
    """A TCP stream that is read at a bounded rate and tells when it has ended."""

    def __init__(self, raw: TrioTCPStream) -> None:
        super().__init__(raw.stream)
        self.ended = trio.Event()
        self._bucket = TokenBucket(READ_RATE, READ_BURST, now=time.monotonic())

    async def read(self, n: int | None = None) -> bytes:
        try:
            data: bytes = await super().read(n)
        except Exception:
            self.ended.set()
            raise
        if not data and n != 0:
            self.ended.set()
        await trio.sleep(self._bucket.take(len(data), time.monotonic()))
        return data

    async def close(self) -> None:
        self.ended.set()
        await super().close()


async def _until_closed(stream: _PacedStream, handle: THandler) -> None:
    """Run libp2p's handler of a connection, which never returns by itself, until the connection has ended."""
    async with trio.open_nursery() as nursery:

        async def run() -> None:
            await handle(stream)
            nursery.cancel_scope.cancel()

        nursery.start_soon(run)
        await stream.ended.wait()
        await trio.sleep(_AFTER_END_S)  # libp2p closes what hangs on it
        nursery.cancel_scope.cancel()
    with trio.CancelScope(shield=True):
        await stream.close()


def _place(maddr: Multiaddr) -> tuple[str, int]:
    for kind in ("ip4", "ip6"):
        try:
            return str(maddr.value_for_protocol(kind)), int(maddr.value_for_protocol("tcp") or 0)
        except (ProtocolLookupError, ValueError):
            continue
    raise OpenConnectionError(f"{maddr} is not an IP address and a TCP port")


def _remote_host(stream: TrioTCPStream) -> str | None:
    """The other end's address; None when it is gone already; libp2p 0.8.1 gives none for IPv6."""
    try:
        host = str(stream.stream.socket.getpeername()[0])
    except OSError:
        return None
    address = ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _origin(host: str) -> str:
    """Who counts as one: an IPv4 address, or an IPv6 network of 64 bits, which is what one customer has."""
    return str(ip_network(f"{host}/64", strict=False)) if ":" in host else host


def _within(host: str, networks: Iterable[str]) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    return any(address in ip_network(network, strict=False) for network in networks)
