"""A bulk node: pieces of policy versions to and from peers, over TLS 1.3 on TCP, in threads.

    node = BulkNode(settings, key, store, tell)     # tell(event) is called from one thread of the node's own, in order
    address = node.start()                          # listens; the PeerInfo to hand to the coordinator (None: does not listen)
    node.dial(address, ticket)                      # keep a connection to a peer up; again with a new ticket renews it
    node.hang_up(peer_id, job_id)                   # dial it no more, and end the connection
    node.stop_dialling(peer_id, job_id)             # dial it no more, and end the connection unless the peer dialled it
    node.add_batch(text, signature) -> transfer id  # from the coordinator: a signed batch (see p2p/domain/batches.py)
    node.found(transfer, digest)                    # a piece came into the store another way
    node.resume(transfer)                           # after a final GaveUp, when there is space again
    node.want(transfer) / node.retire(transfer)     # take part after all / not any more; pieces stay in the store
    node.set_limits(up=..., down=..., cap_bytes=...)  # live; bytes a second, bytes a month; None is unbounded
    node.state() -> NodeState                       # figures for metrics
    node.close()

Any thread may call any method; none waits for the network except `close` (a second or two). From asyncio call them directly, and let
`tell` hand events over with `loop.call_soon_threadsafe`. What `tell` gets is in `events.py`, what a node allows in `settings.py`.
Connections belong to a job: the ticket names it, and only transfers of that job are spoken of. One thread carries them all, another
one reads and writes pieces and calls `tell`; handshakes have threads of their own, and so has each peer that is dialled.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from random import SystemRandom

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.catalogue import Catalogue
from p2p.adapters.bulk.clerk import Clerk
from p2p.adapters.bulk.clock import Clock
from p2p.adapters.bulk.connection import Parts
from p2p.adapters.bulk.doors import Dialler, Listener
from p2p.adapters.bulk.events import NodeEvent
from p2p.adapters.bulk.exchange import Exchange
from p2p.adapters.bulk.handshake import Door
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.loop import Loop
from p2p.adapters.bulk.pipe import server_context
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.bulk.throttle import Throttle
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.tls import self_signed
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch
from p2p.domain.swarm import Swarm
from p2p.domain.swarm_events import Policy
from p2p.domain.tickets import peek_ticket

MakePolicy = Callable[[Batch, float, float], Policy]

__all__ = ["BulkNode", "LinkState", "MakePolicy", "NodeState", "TransferState"]


@dataclass(frozen=True, slots=True)
class LinkState:
    """An open connection: pieces' bytes each way, seconds of a round trip, the peer's advertised uplink in bytes a second."""

    peer: str
    job_id: str
    dialled: bool
    bytes_up: int
    bytes_down: int
    rtt_s: float
    uplink: float


@dataclass(frozen=True, slots=True)
class TransferState:
    """A transfer here. `first_sent_at`: Unix seconds when its first piece began to leave; `copies`: bytes sent per byte of the row."""

    transfer: str
    job_id: str
    version: int
    pieces: int
    held: int
    size: int
    bytes_up: int
    bytes_down: int
    is_complete: bool
    halted: str | None
    first_sent_at: float | None
    mask: int = 0  # bit i: piece i is here

    @property
    def copies(self) -> float:
        """How often the row was sent."""
        return self.bytes_up / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class NodeState:
    """Everything at one moment. `uplink`: measured, bytes a second; `used_this_month`: bytes of pieces sent."""

    uplink: float
    used_this_month: int
    links: tuple[LinkState, ...]
    transfers: tuple[TransferState, ...]


class BulkNode:
    """See the module."""

    def __init__(
        self,
        settings: BulkSettings,
        key: Ed25519PrivateKey,
        store: PieceStore,
        tell: Callable[[NodeEvent], None],
        *,
        make_policy: MakePolicy | None = None,
    ) -> None:
        """`key` is this peer's own, the one that its tickets name. `make_policy(first batch, uplink, now)`; the swarm rule if None."""
        self._settings = settings
        self._key = key
        self._store = store
        self._clerk = Clerk(tell)
        throttle = Throttle(
            up=settings.up,
            down=settings.down,
            cap_bytes=settings.cap_bytes,
            counter=settings.counter,
            unix=settings.calendar,
        )
        self._hub = Hub(settings, throttle, self._clerk.emit, make_policy or self._swarm)
        self._exchange = Exchange(self._hub, store, self._clerk)
        self._catalogue = Catalogue(self._hub, store)
        self._clock = Clock(self._hub, self._catalogue)
        self._loop = Loop(Parts(self._hub, self._catalogue, self._exchange), self._clock, self._clerk)
        self._lock = threading.Lock()
        self._diallers: dict[tuple[str, str], Dialler] = {}
        self._listener: Listener | None = None

    def start(self) -> PeerInfo | None:
        """Begin. The certificate is kept in the store's `tls` folder. Raises OSError (port taken, disk)."""
        settings = self._settings
        address = None
        if settings.listens:
            names = settings.names or (settings.host, settings.peer_id)
            certificate, key, fingerprint = self_signed(self._store.root / "tls", names)
            door = Door(settings.peer_id, fingerprint, settings.coordinator_public_key, settings.unix)
            self._listener = Listener(self._hub, self._loop, door, server_context(str(certificate), str(key)))
            address = PeerInfo(settings.host, self._listener.port, fingerprint)
        self._clerk.start()
        self._loop.start()
        return address

    def dial(self, address: PeerInfo, ticket: str) -> None:
        """Keep a connection to the ticket's peer up. Raises PeerLost (may not be dialled), TicketError (no ticket)."""
        read = peek_ticket(ticket)
        with self._lock:
            known = self._diallers.get((read.job_id, read.server))
            if known is None:
                self._diallers[read.job_id, read.server] = Dialler(self._hub, self._loop, self._key, address, ticket)
            else:
                known.renew(address, ticket)

    def hang_up(self, peer: str, job_id: str) -> None:
        """Dial the peer no more and end the connection, whoever dialled it. One that is unknown is no error."""
        self._end_dialler(peer, job_id)
        with self._hub.lock:
            link = self._hub.links.get((job_id, peer))
            if link is not None:
                link.close("this end needs the connection no more")

    def stop_dialling(self, peer: str, job_id: str) -> None:
        """Dial the peer no more and end the connection if this end dialled it. One that is unknown is no error."""
        self._end_dialler(peer, job_id)
        with self._hub.lock:
            link = self._hub.links.get((job_id, peer))
            if link is not None and link.dialled_here:
                link.close("this end needs the connection no more")

    def add_batch(self, text: str, signature: str) -> str:
        """A signed batch (signature in hex) from the coordinator; the transfer's id. Raises BatchRefused; then nothing changed.

        A seeder sends it to all peers of the job at once, others say that they have it. Pieces that lie in the store already count as held.
        """
        return self._catalogue.add(text, signature)

    def found(self, transfer: str, digest: str) -> None:
        """A piece is in the store that no peer brought. One that is not of the transfer is no error."""
        with self._hub.lock:
            known = self._hub.transfers.get(transfer)
            places = known.places.get(digest, []) if known is not None else []
            if known is not None and places and self._store.has(digest):
                self._exchange.arrived(known, places[0], None, 0)

    def resume(self, transfer: str) -> None:
        """Go on with a transfer that was halted (a final GaveUp)."""
        with self._hub.lock:
            known = self._hub.transfers.get(transfer)
            if known is None or known.halted is None:
                return
            known.halted = None
            self._hub.begin_again(known)
            for link in list(self._hub.links.values()):
                if transfer in link.promised:
                    self._hub.join(known, link)

    def want(self, transfer: str) -> None:
        """Take part in a transfer that `wants` declined, or that was retired, as soon as a peer offers it."""
        self._catalogue.want(transfer)

    def retire(self, transfer: str) -> None:
        """Take no part in a transfer any more. Its pieces stay in the store."""
        self._catalogue.retire(transfer)

    def set_limits(self, *, up: float | None, down: float | None, cap_bytes: int | None) -> None:
        """Bytes a second up and down, bytes a calendar month (UTC) up; None is unbounded. With effect at once."""
        self._hub.throttle.set_limits(up, down, cap_bytes)
        with self._hub.lock:
            for link in self._hub.links.values():
                link.wake()

    def state(self) -> NodeState:
        """The figures of now."""
        hub = self._hub
        with hub.lock:
            links = tuple(
                LinkState(one.peer, one.job_id, one.dialled_here, one.bytes_up, one.bytes_down, one.rtt_s, one.uplink)
                for one in hub.links.values()
            )
            transfers = tuple(
                TransferState(
                    one.id,
                    one.job_id,
                    one.first.version,
                    len(one.pieces),
                    one.stored.bit_count(),
                    one.size,
                    one.bytes_up,
                    one.bytes_down,
                    one.is_complete,
                    one.halted,
                    one.first_sent_at,
                    one.held,
                )
                for one in hub.transfers.values()
            )
            return NodeState(hub.uplink, hub.throttle.used_this_month, links, transfers)

    def close(self) -> None:
        """End every connection and every thread. Events that wait are told before it returns."""
        with self._lock:
            diallers = list(self._diallers.values())
            self._diallers.clear()
        for dialler in diallers:
            dialler.stop()
        with self._hub.lock:
            self._hub.is_closing = True
            for link in self._hub.links.values():
                link.close("this peer goes away")
        if self._listener is not None:
            self._listener.close()
        for dialler in diallers:
            dialler.join()
        self._loop.close()
        self._clock.keep()
        self._clerk.close()

    def _end_dialler(self, peer: str, job_id: str) -> None:
        with self._lock:
            dialler = self._diallers.pop((job_id, peer), None)
        if dialler is not None:
            dialler.stop()

    def _swarm(self, _first: Batch, uplink: float, now: float) -> Policy:
        settings = self._settings
        return Swarm(uplink=uplink, now=now, rng=SystemRandom(), is_seeder=settings.is_seeder, returns=settings.returns)
