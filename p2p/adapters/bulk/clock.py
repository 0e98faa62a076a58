"""The clock of a bulk node: policies' deadlines, the measured uplink, batches that did not come, the counter file."""

from __future__ import annotations

import threading
import time
from contextlib import suppress

from p2p.adapters.bulk import sockets
from p2p.adapters.bulk.catalogue import Catalogue
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Link
from p2p.domain.swarm_events import Downlink, Uplink
from p2p.domain.uplink import UplinkMeter

SAMPLE_S = 0.1
REST_S = 0.5  # while nothing is sent
KEEP_S = 5.0
UNCHANGED = 0.75  # the kernel's bound on unsent bytes follows the uplink when it changed by more than a quarter


class Clock:
    """What the loop does by the clock. `due` (time.monotonic) says when, besides the hub's own deadlines."""

    def __init__(self, hub: Hub, catalogue: Catalogue) -> None:
        self.due = 0.0
        self._hub = hub
        self._catalogue = catalogue
        self._meter = UplinkMeter(hub.settings.uplink)
        self._sampled_at = time.monotonic()
        self._kept_at = self._sampled_at
        self._delivered = 0
        self._is_full = False
        self._bounded_for = 0.0
        self._keeping = threading.Lock()

    def tick(self, now: float) -> None:
        """Perform what is due."""
        self._hub.tick(now)
        if now >= self._sampled_at + SAMPLE_S:
            self._sample(now)
            self._catalogue.tick(now)
        if now >= self._kept_at + KEEP_S and not self._keeping.locked():  # a disk that hangs gets no second writer
            self._kept_at = now
            threading.Thread(target=self.keep, name="bulk-keeper", daemon=True).start()  # a sync may take its time
        self.due = self._sampled_at + SAMPLE_S if not self._hub.was_idle else now + REST_S

    def keep(self) -> None:
        """The month's count to disk, one at a time."""
        with self._keeping, suppress(OSError):  # the disk is full: the count goes on in memory
            self._hub.throttle.keep()

    def _sample(self, now: float) -> None:
        """How much was delivered since the last sample, and what the policies make of it."""
        hub = self._hub
        since, self._sampled_at = now - self._sampled_at, now
        with hub.lock:
            was_busy, hub.was_idle = not hub.was_idle, not hub.has_uploads()
            fresh = sum(_fresh(link) for link in hub.links.values())
            self._delivered += fresh
            self._meter.sample(self._delivered, was_busy, now)
            rate, limit = self._meter.rate(now), hub.throttle.up_limit
            hub.uplink = rate if limit is None else min(rate, limit)
            hub.pace = max(hub.uplink, fresh / since)
            if was_busy:
                hub.feed_all(Uplink(hub.uplink, fresh / since))
            is_full = hub.throttle.down_limit is not None and hub.throttle.down_wait(now) > 0
            if is_full != self._is_full:
                self._is_full = is_full
                hub.feed_all(Downlink(is_full))
            if not UNCHANGED * self._bounded_for <= hub.uplink <= self._bounded_for / UNCHANGED:
                self._bounded_for = hub.uplink
                for link in hub.links.values():
                    _bound(link, hub.uplink)


def _fresh(link: Link) -> int:
    """Bytes that reached the peer since it was last asked."""
    if link.sock is None:
        return 0
    try:
        acked = sockets.figures(link.sock).acked
    except OSError:
        return 0
    fresh, link.acked = max(acked - link.acked, 0), acked
    return fresh


def _bound(link: Link, uplink: float) -> None:
    if link.sock is not None:
        with suppress(OSError):  # closed meanwhile
            sockets.bound_unsent(link.sock, uplink)
