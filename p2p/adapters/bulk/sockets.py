"""Options of bulk sockets, and what the kernel knows about them."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

LEAST_UNSENT = 32 << 10
FIRST_UNSENT = 64 << 10
MOST_UNSENT = 1 << 20
UNSENT_S = 0.04  # what lies unsent in the kernel can be neither reordered nor cancelled; it asks for more when half is gone
_TCP_NOTSENT_LOWAT = getattr(socket, "TCP_NOTSENT_LOWAT", 25)
_INFO_BYTES = 152
_UNKNOWN = 2**32 - 1
_INFO_ACKED = struct.Struct("<Q")
_INFO_U32 = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class TcpFigures:
    """`acked`: bytes that the other host has; `unsent`: bytes not yet on the way; `rtt_s`: the shortest round trip, 0 if unknown."""

    acked: int
    unsent: int
    rtt_s: float


def prepare(sock: socket.socket, congestion: str | None) -> None:
    """Non-blocking, small frames at once, little unsent. `congestion` names the kernel's algorithm; None keeps its default."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, FIRST_UNSENT)
    if congestion is not None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


def bound_unsent(sock: socket.socket, uplink: float) -> None:
    """Let the kernel hold 40 ms of the uplink (bytes a second) unsent.

    SO_SNDBUF stays automatic: it would bound what is in flight as well, and with it the speed of long paths.
    """
    most = max(LEAST_UNSENT, min(int(uplink * UNSENT_S), MOST_UNSENT))
    sock.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, most)


def figures(sock: socket.socket) -> TcpFigures:
    """TCP_INFO (linux/tcp.h: struct tcp_info). Raises OSError when the socket is closed."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    (acked,) = _INFO_ACKED.unpack_from(info, 120)
    (unsent,) = _INFO_U32.unpack_from(info, 144)
    (rtt_us,) = _INFO_U32.unpack_from(info, 148)
    return TcpFigures(acked, unsent, 0.0 if rtt_us == _UNKNOWN else rtt_us / 1e6)
