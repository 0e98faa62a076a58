"""The listening socket: how many connections may be open at once, in all and from one address (law 5).

Counted where they are accepted, before TLS, so that a stranger who opens connections and says nothing cannot use up the
process's file descriptors. What is over a bound is closed at once; a client tries again, as after any broken connection.
"""

from __future__ import annotations

import resource
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

BACKLOG = 512
DESCRIPTORS_KEPT = 256  # for the store, blobs, learners, graders and pieces being served
MOST_CONNECTIONS = 8192
LEAST_CONNECTIONS = 64


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Open connections at once. `per_address` None: a proxy stands in front, so that all come from one address."""

    total: int
    per_address: int | None


def connection_limits(*, behind_proxy: bool) -> ConnectionLimits:
    """Bounds that leave descriptors for everything else; the soft limit on them is raised to the hard one first."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = (
        MOST_CONNECTIONS + DESCRIPTORS_KEPT if hard == resource.RLIM_INFINITY else min(hard, MOST_CONNECTIONS + DESCRIPTORS_KEPT)
    )
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    total = max(LEAST_CONNECTIONS, wanted - DESCRIPTORS_KEPT)
    return ConnectionLimits(total, None if behind_proxy else max(LEAST_CONNECTIONS, total // 2))


@dataclass(slots=True)
class OpenConnections:
    """The connections that are open now, by address."""

    limits: ConnectionLimits
    total: int = 0
    by_address: Counter[str] = field(default_factory=Counter)
    refused: int = 0

    def admit(self, address: str) -> bool:
        """Count one more, unless it would be one too many."""
        most = self.limits.per_address
        if self.total >= self.limits.total or (most is not None and self.by_address[address] >= most):
            self.refused += 1
            return False
        self.total += 1
        self.by_address[address] += 1
        return True

    def closed(self, address: str) -> None:
        """One of the address's is gone."""
        self.total -= 1
        self.by_address[address] -= 1
        if not self.by_address[address]:
            del self.by_address[address]


class Connection(socket.socket):
    """An accepted connection that says once when it is closed."""

    on_close: Callable[[], None] | None = None

    def close(self) -> None:
        """Close, and be counted no longer."""
        on_close, self.on_close = self.on_close, None
        super().close()
        if on_close is not None:
            on_close()


class BoundedListener(socket.socket):
    """A listening TCP socket that accepts within the limits."""

    open_connections: OpenConnections

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection within the limits; those over them are closed. Raises BlockingIOError when none waits."""
        while True:
            descriptor, address = self._accept()  # type: ignore[attr-defined]  # as socket.socket.accept does
            connection = Connection(self.family, self.type, self.proto, fileno=descriptor)
            name = str(address[0])
            if self.open_connections.admit(name):
                connection.on_close = partial(self.open_connections.closed, name)
                return connection, address
            connection.close()


def listen(host: str, port: int, limits: ConnectionLimits) -> tuple[BoundedListener, ...]:
    """Listen on every address of `host`, all under the same limits; port 0 picks one for all. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    counted = OpenConnections(limits)
    listeners: list[BoundedListener] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            chosen = listeners[0].getsockname()[1] if listeners else port
            listeners.append(_listener(family, kind, protocol))
            listeners[-1].open_connections = counted
            listeners[-1].bind((address[0], chosen, *address[2:]))
            listeners[-1].listen(BACKLOG)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return tuple(listeners)


def _listener(family: int, kind: int, protocol: int) -> BoundedListener:
    listener = BoundedListener(family, kind, protocol)
    listener.setblocking(False)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return listener
