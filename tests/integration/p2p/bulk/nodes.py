"""Bulk nodes on loopback for tests: identities, tickets, signed batches, files of random pieces."""

from __future__ import annotations

import hashlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import NodeEvent
from p2p.adapters.bulk.node import BulkNode, MakePolicy
from p2p.adapters.bulk.settings import BulkLimits, BulkSettings
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.codec.pieces import name
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch, text_hash
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.domain.tickets import Ticket, sign_ticket

JOB = "job"
LOOPBACK = ("127.0.0.0/8",)
COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
LIMITS = BulkLimits()


def key_of(peer: str) -> Ed25519PrivateKey:
    """A peer's key, the same each time."""
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(peer.encode()).digest())


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def ticket(fetcher: str, server: str, *, expires_at: int = 2**40, job: str = JOB, key: str | None = None, id: str = "t") -> str:
    """A ticket that the coordinator signed."""
    return sign_ticket(COORDINATOR, Ticket(id, fetcher, key or public(key_of(fetcher)), server, job, expires_at))


def settings(peer: str, **changes: object) -> BulkSettings:
    """Of a node on loopback that takes the seeder's pushes."""
    plain = BulkSettings(peer, public(COORDINATOR), host="127.0.0.1", seeders=frozenset({"seeder"}), allowed_networks=LOOPBACK)
    return replace(plain, **changes)  # type: ignore[arg-type]


class Node:
    """A running node, what it told, and its store."""

    def __init__(self, root: Path, peer: str, *, make_policy: MakePolicy | None = None, **changes: object) -> None:
        self.peer = peer
        self.store = PieceStore(root / peer, files=UNSYNCED_FILES)
        self.told: list[NodeEvent] = []
        self._changed = threading.Condition()
        self.node = BulkNode(settings(peer, **changes), key_of(peer), self.store, self._tell, make_policy=make_policy)
        address = self.node.start()
        self.address: PeerInfo = address or PeerInfo("127.0.0.1", 1, "")

    def dial(self, other: Node, **changes: object) -> None:
        self.node.dial(other.address, ticket(self.peer, other.peer, **changes))  # type: ignore[arg-type]

    def _tell(self, event: NodeEvent) -> None:
        with self._changed:
            self.told.append(event)
            self._changed.notify_all()

    def wait_for(self, is_it: Callable[[NodeEvent], bool], *, within_s: float = 15.0) -> NodeEvent:
        """The first event of that kind. Raises AssertionError."""
        with self._changed:
            found = self._changed.wait_for(lambda: next((one for one in self.told if is_it(one)), None), within_s)
            assert found is not None, f"{self.peer} told only {self.told[-8:]}"
            return found

    def wait_event(self, kind: type[NodeEvent], *, within_s: float = 15.0) -> NodeEvent:
        return self.wait_for(lambda one: isinstance(one, kind), within_s=within_s)


@contextmanager
def running(*nodes: Node) -> Iterator[None]:
    """Close the nodes afterwards, all at once."""
    try:
        yield
    finally:
        threads = [threading.Thread(target=node.node.close) for node in nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def make_pieces(count: int, size: int, seed: int = 0) -> list[bytes]:
    rng = random.Random(seed)
    return [rng.randbytes(size) for _ in range(count)]


def make_batches(data: Sequence[bytes], *, per_batch: int = 256, version: int = 1, job: str = JOB) -> list[tuple[str, str]]:
    """Signed batches of a transfer: (text, signature)."""
    pieces: list[Piece] = [name(one) for one in data]
    out: list[tuple[str, str]] = []
    for number, begin in enumerate(range(0, max(len(pieces), 1), per_batch)):
        previous = text_hash(out[-1][0]) if out else ""
        is_last = begin + per_batch >= len(pieces)
        text = Batch(job, version, "raw", None, number, previous, tuple(pieces[begin : begin + per_batch]), is_last).to_json()
        out.append((text, sign_batch(COORDINATOR, text)))
    return out


def put_all(store: PieceStore, data: Sequence[bytes]) -> None:
    for one in data:
        store.put(name(one), one)


def holds_all(store: PieceStore, data: Sequence[bytes]) -> bool:
    """Whether every piece is there, with its bytes."""
    return all(store.has(name(one).digest) and store.read(name(one).digest) == one for one in data)


def eventually(is_so: Callable[[], bool], *, within_s: float = 10.0) -> bool:
    """Whether it becomes so in time."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if is_so():
            return True
        time.sleep(0.01)
    return is_so()
