"""A worker's `Peers` beside bulk nodes on loopback, all under one coordinator's key."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.codec.pieces import name
from p2p.domain.batches import Batch, text_hash
from p2p.domain.control_messages import Neighbour, Place
from p2p.domain.signing import sign_batch
from tests.integration.p2p.bulk.nodes import COORDINATOR, JOB, Node, key_of, public, ticket
from worker_node.adapters.peers import Myself, Peers
from worker_node.config import LinkSettings, PeerSettings

HERE = "w-here"
NO_LIMITS = LinkSettings()


@asynccontextmanager
async def peers_here(root: Path, *, listens: int = 0, link: LinkSettings = NO_LIMITS) -> AsyncIterator[tuple[Peers, PieceStore]]:
    """Started, and closed afterwards; its store is `root`/here."""
    store = PieceStore(root / "here", files=UNSYNCED_FILES)
    myself = Myself(HERE, key_of(HERE), public(COORDINATOR), time.time)
    peers = Peers(myself, store, PeerSettings("127.0.0.1", listens, "127.0.0.1"), link, counter=root / "uploaded.json")
    peers.start()
    try:
        yield peers, store
    finally:
        await peers.close()


def neighbour(node: Node, fetcher: str = HERE, *, key: str | None = None, job: str = JOB) -> Neighbour:
    """As the coordinator names the node to a fetcher, with a ticket."""
    return Neighbour(
        worker_id=node.peer,
        key=public(key_of(node.peer)),
        bulk=Place(node.address.host, node.address.port),
        certificate_sha256=node.address.certificate_sha256,
        control=None,
        uplink=0,
        ticket=ticket(fetcher, node.peer, key=key, job=job),
    )


def met(peers: Peers, *nodes: Node, job: str = JOB) -> None:
    """Dial the nodes, and no others."""
    peers.meet(job, [(neighbour(node, job=job), (node.address.host, node.address.port)) for node in nodes])


def transfer_of(
    data: Sequence[bytes], *, version: int, base: str | None = None, job: str = JOB
) -> tuple[str, list[tuple[str, str]]]:
    """A transfer's id and its signed batches: the first piece, then the rest."""
    pieces = [name(one) for one in data]
    encoding = "planes" if base is None else "delta"
    first = Batch(job, version, encoding, base, 0, "", tuple(pieces[:1]), is_last=False).to_json()
    rest = Batch(job, version, encoding, base, 1, text_hash(first), tuple(pieces[1:]), is_last=True).to_json()
    return text_hash(first), [(text, sign_batch(COORDINATOR, text)) for text in (first, rest)]


def offer(node: Node, batches: Sequence[tuple[str, str]], data: Sequence[bytes] = ()) -> None:
    """The node knows the transfer, and holds this data of it."""
    for one in data:
        node.store.put(name(one), one)
    for text, signature in batches:
        node.node.add_batch(text, signature)
