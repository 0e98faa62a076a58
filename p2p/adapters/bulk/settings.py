"""What a bulk node is, and what it allows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from p2p.domain.batches import Batch

FIRST_GUESS = 2.5e6  # bytes a second, before anything was measured


@dataclass(frozen=True, slots=True)
class BulkLimits:
    """Bounds on what others can cost. Seconds, bytes, counts."""

    connections: int = 256  # beyond them the door closes
    connections_per_peer: int = 8
    strangers: int = 64  # connections that showed no valid ticket yet; the oldest gives way
    strangers_per_address: int = 16
    hello_s: float = 10.0  # to show one
    connect_s: float = 5.0
    ping_s: float = 2.0
    silence_s: float = 10.0  # nothing heard, not even an answer to a ping
    buffer_bytes: int = 64 << 20  # pieces that are arriving, over all connections
    owed: int = 1024  # requests of one peer that wait for an answer
    control_per_s: float = 4000.0  # frames of one peer, other than DATA; beyond them it is read more slowly
    junk_bytes: int = 64 << 20  # data for transfers that are over
    shut_s: float = 30.0  # who broke the protocol is not let in for so long
    redial_first_s: float = 0.2
    redial_most_s: float = 30.0


@dataclass(frozen=True, slots=True)
class BulkSettings:
    """`coordinator_public_key` (hex) signs tickets and batches. Rates are bytes a second; None is unbounded."""

    peer_id: str
    coordinator_public_key: str
    host: str = "0.0.0.0"  # noqa: S104  # peers come from anywhere; whoever shows no ticket is cut off
    port: int = 0  # 0 takes a free one
    listens: bool = True
    names: tuple[str, ...] = ()  # for the certificate; the host if none
    is_seeder: bool = False
    returns: bool = False  # a seeder that was away: it listens to what peers hold before it pushes
    seeders: frozenset[str] = frozenset()  # whose pushes are taken
    takes_any_push: bool = False  # of anybody with a ticket: for policies that push from peer to peer
    allowed_networks: tuple[str, ...] = ()  # CIDR, beyond the public internet
    up: float | None = None
    down: float | None = None
    cap_bytes: int | None = None  # of uploads, a month
    uplink: float = FIRST_GUESS  # as last measured
    congestion: str | None = None  # TCP's algorithm; None keeps the system's
    counter: Path | None = None  # the file that keeps this month's bytes
    limits: BulkLimits = field(default_factory=BulkLimits)
    unix: Callable[[], float] = time.time  # what tickets are judged by
    calendar: Callable[[], float] = time.time  # what the month's bytes are counted by: the owner's clock
    wants: Callable[[Batch], bool] = lambda _first: True  # whether to take part in a transfer, by its first batch; must be quick
