"""The thread that carries all connections of a node. It waits for sockets and for what is due, and for nothing else: no disk, no peer.

In one pass it takes in whatever came on all connections, lets the policies answer, and writes on each connection once.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from heapq import heappop, heappush
from itertools import count

from p2p.adapters.bulk.clerk import Clerk
from p2p.adapters.bulk.clock import Clock
from p2p.adapters.bulk.connection import NEVER, Connection, Parts
from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.pipe import TlsPipe

log = logging.getLogger(__name__)
SWEEP_S = 0.25  # between two looks at who is alive
ASLEEP_S = 1.0  # a pass that comes so late: the machine or this process slept


class Loop:
    """`start` begins its thread; `adopt` gives it a connection."""

    def __init__(self, parts: Parts, clock: Clock, clerk: Clerk) -> None:
        self._parts = parts
        self._clock = clock
        self._clerk = clerk
        self._epoll = select.epoll()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake_fd, select.EPOLLIN)
        self._connections: dict[int, Connection] = {}
        self._new: deque[Connection] = deque()
        self._unsettled: set[Connection] = set()  # to be looked at before the next wait
        self._held: list[tuple[float, int, Connection]] = []  # a heap: to be looked at then
        self._serial = count()
        limits = parts.hub.settings.limits
        self._sweep_s = min(SWEEP_S, limits.ping_s / 2, limits.silence_s / 4)
        self._sweep_at = 0.0
        self._due = NEVER  # when the last wait was to end
        self._is_waiting = False
        self._is_closing = False
        parts.hub.wake = self.wake
        self._thread = threading.Thread(target=self._run, name="bulk-loop", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def adopt(self, pipe: TlsPipe, link: Link, ended: Callable[[str], None]) -> None:
        """Serve a link that was opened with the hub until it ends, then call `ended(reason)`. Any thread may call it."""
        connection = Connection(pipe, link, self._parts, ended)

        def look() -> None:
            self._unsettled.add(connection)
            self.wake()

        link.wake = look
        self._new.append(connection)
        self.wake()

    def wake(self) -> None:
        """Another thread has something for this one."""
        if self._is_waiting:
            self._is_waiting = False  # once is enough
            os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        """End when the last connection has ended. Nothing may be adopted any more."""
        self._is_closing = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.is_alive():
            self._thread.join()
        self._epoll.close()
        os.close(self._wake_fd)

    # --- the thread

    def _run(self) -> None:
        while not (self._is_closing and not self._connections and not self._new):
            now = time.monotonic()
            self._meet(now)
            try:
                self._perform(now)
            except Exception:  # a defect: others must be served all the same
                log.exception("a bulk node failed to do what was due")
            self._settle(now)
            self._clerk.call()
            self._take(self._wait())

    def _take(self, found: list[tuple[int, int]]) -> None:
        """What the sockets are ready for."""
        now = time.monotonic()
        if now > self._due + ASLEEP_S:
            for connection in self._connections.values():
                connection.forgive(now - self._due)
        for fd, events in found:
            if fd != self._wake_fd:
                connection = self._connections[fd]
                connection.ready(events, now)
                self._unsettled.add(connection)
                continue
            with suppress(BlockingIOError):
                os.eventfd_read(fd)

    def _meet(self, now: float) -> None:
        """Connections that are new."""
        while self._new:
            connection = self._new.popleft()
            self._connections[connection.fd] = connection
            connection.registered = select.EPOLLIN
            self._epoll.register(connection.fd, connection.registered)
            connection.begin(now)
            self._unsettled.add(connection)

    def _perform(self, now: float) -> None:
        """What is due by the clock."""
        hub = self._parts.hub
        if now >= min(self._clock.due, hub.due):
            self._clock.tick(now)
        if now >= hub.adverts.due:
            hub.advertise(now)
        if now >= self._sweep_at:
            self._sweep_at = now + self._sweep_s
            for connection in self._connections.values():
                connection.keep_alive(now)
                if connection.is_over:
                    self._unsettled.add(connection)
        while self._held and self._held[0][0] <= now:
            self._unsettled.add(heappop(self._held)[2])

    def _settle(self, now: float) -> None:
        """Every connection of which something changed."""
        while self._unsettled:
            connection = self._unsettled.pop()
            if self._connections.get(connection.fd) is not connection:
                continue
            due = connection.due
            connection.settle(now)
            if connection.is_over:
                self._part(connection)
                continue
            if connection.wants != connection.registered:
                connection.registered = connection.wants
                self._epoll.modify(connection.fd, connection.wants)
            if connection.due < NEVER and not now < due <= connection.due:
                heappush(self._held, (connection.due, next(self._serial), connection))

    def _wait(self) -> list[tuple[int, int]]:
        """Until a socket is ready, something is due, or another thread wakes this one: what it changed before is seen here."""
        self._is_waiting = True
        hub = self._parts.hub
        now = time.monotonic()
        held = self._held[0][0] if self._held else NEVER
        self._due = max(now, min(self._clock.due, hub.due, hub.adverts.due, self._sweep_at, held))
        is_idle = not (self._new or self._unsettled)
        found = self._epoll.poll(self._due - now if is_idle else 0.0)
        self._is_waiting = False
        return found

    def _part(self, connection: Connection) -> None:
        del self._connections[connection.fd]
        self._epoll.unregister(connection.fd)
        with self._parts.hub.lock:
            connection.link.wake = lambda: None
        connection.pipe.close()
        connection.ended(connection.reason)
