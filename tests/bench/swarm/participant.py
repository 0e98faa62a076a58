"""The product on one host: its bulk node, its policies, its piece store, tickets and signed batches as the coordinator makes them.

Keys are derived from the payload's digest, so that every participant can sign what the coordinator would have handed it.
A worker dials those before it in the list, as one behind a NAT would; pieces flow both ways on each connection.
"""

from __future__ import annotations

import queue
import time
from pathlib import Path
from random import Random

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import BatchSeen, GaveUp, NodeEvent, PeerOpened, TransferComplete
from p2p.adapters.bulk.node import BulkNode, MakePolicy
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.codec import pieces as codec
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import MAX_BATCH_PIECES, Batch, text_hash
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.domain.swarm import Swarm
from p2p.domain.swarm_events import Policy
from p2p.domain.swarm_topologies import chain, star, tree
from p2p.domain.tickets import Ticket, sign_ticket
from tests.bench.swarm.bound import MEGABIT
from tests.bench.swarm.lines import Message, check, hear, say

JOB = "bench"
NETWORKS = ("10.77.0.0/24",)
TREE_WIDTH = 2
TICKET_S = 3600
MEET_S = 50.0


def name_of(host: int) -> str:
    """A peer id."""
    return f"host-{host}"


def key_of(part: Message, who: str) -> Ed25519PrivateKey:
    """The key of a host, or of the coordinator."""
    return Ed25519PrivateKey.from_private_bytes(blake3(f"{part['digest']} {who}".encode()).digest())


def public_of(key: Ed25519PrivateKey) -> str:
    """The public half, hex."""
    return key.public_key().public_bytes_raw().hex()


def policy_maker(part: Message) -> MakePolicy:
    """The policy of the topology, as this host plays it."""
    members = [name_of(host) for host in range(part["hosts"])]
    me = name_of(part["host"])

    def make(_first: Batch, uplink: float, now: float) -> Policy:
        match part["topology"]:
            case "star":
                return star(members, me, now)
            case "chain":
                return chain(members, me, now)
            case "tree":
                return tree(members, me, TREE_WIDTH, now)
            case _:
                return Swarm(uplink=uplink, now=now, rng=Random(me), is_seeder=part["host"] == 0)

    return make


class Participant:
    """A bulk node and what it told."""

    def __init__(self, part: Message) -> None:
        self._part = part
        self.row: list[Piece] = []
        self._events: queue.SimpleQueue[tuple[float, NodeEvent]] = queue.SimpleQueue()
        self.store = PieceStore(Path(part["directory"]) / "pieces", files=UNSYNCED_FILES)
        settings = BulkSettings(
            peer_id=name_of(part["host"]),
            coordinator_public_key=public_of(key_of(part, "coordinator")),
            host=part["address"],
            is_seeder=part["host"] == 0,
            seeders=frozenset({name_of(0)}),
            takes_any_push=part["topology"] != "swarm",
            allowed_networks=NETWORKS,
            uplink=part["uplinks_mbit"][part["host"]] * MEGABIT,
        )
        key = key_of(part, name_of(part["host"]))
        self.node = BulkNode(settings, key, self.store, self._heard, make_policy=policy_maker(part))

    def meet(self) -> None:
        """Listen, say where, connect to everybody."""
        part = self._part
        address = self.node.start()
        assert address is not None
        say("ready", port=address.port, certificate=address.certificate_sha256)
        for host in hear("meet")["hosts"][: part["host"]]:
            self.node.dial(PeerInfo(host["address"], host["port"], host["certificate"]), self._ticket(host["host"]))
        for _ in range(part["hosts"] - 1):
            self.await_event(PeerOpened, MEET_S)
        say("met")

    def await_event(self, kind: type[NodeEvent], timeout_s: float) -> float:
        """When (time.monotonic) the next event of this kind came. Ends the process if it does not, or the node gave up."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                when, event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise SystemExit(f"no {kind.__name__} within {timeout_s:.0f} s") from None
            if isinstance(event, GaveUp):
                raise SystemExit(f"the node gave up: {event.reason}")
            if isinstance(event, kind):
                return when

    def _heard(self, event: NodeEvent) -> None:
        if isinstance(event, BatchSeen):
            self.row += event.batch.pieces
        self._events.put((time.monotonic(), event))

    def _ticket(self, server: int) -> str:
        me = name_of(self._part["host"])
        ticket = Ticket(
            id=f"{me}-to-{server}",
            fetcher=me,
            fetcher_key=public_of(key_of(self._part, me)),
            server=name_of(server),
            job_id=JOB,
            expires_at=int(time.time()) + TICKET_S,
        )
        return sign_ticket(key_of(self._part, "coordinator"), ticket)


def pieces_of(part: Message, store: PieceStore) -> list[Piece]:
    """The payload, cut and stored."""
    payload = Path(part["payload"]).read_bytes()
    pieces = []
    for start in range(0, len(payload), part["piece_bytes"]):
        data = payload[start : start + part["piece_bytes"]]
        piece = codec.name(data)
        store.put(piece, data)
        pieces.append(piece)
    return pieces


def batches_of(part: Message, pieces: list[Piece]) -> list[tuple[str, str]]:
    """The signed batches of a keyframe."""
    key = key_of(part, "coordinator")
    signed: list[tuple[str, str]] = []
    previous = ""
    starts = range(0, len(pieces), MAX_BATCH_PIECES)
    for number, start in enumerate(starts):
        cut = tuple(pieces[start : start + MAX_BATCH_PIECES])
        text = Batch(JOB, 1, "raw", None, number, previous, cut, is_last=number == len(starts) - 1).to_json()
        signed.append((text, sign_batch(key, text)))
        previous = text_hash(text)
    return signed


def seed(part: Message) -> None:
    """Publish when told to."""
    participant = Participant(part)
    pieces = pieces_of(part, participant.store)
    batches = batches_of(part, pieces)
    participant.meet()
    hear("publish")
    for text, signature in batches:
        participant.node.add_batch(text, signature)
    hear("check")
    check(digest_of(participant.store, participant.row))


def work(part: Message) -> None:
    """Take what comes."""
    participant = Participant(part)
    participant.meet()
    hear("publish")
    say("done", at=participant.await_event(TransferComplete, part["timeout_s"]))
    hear("check")
    check(digest_of(participant.store, participant.row))


def digest_of(store: PieceStore, row: list[Piece]) -> str:
    """BLAKE3 of the row, read back from disk."""
    digest = blake3()
    for piece in row:
        digest.update(store.read(piece.digest))
    return digest.hexdigest()


def main() -> None:
    """Host 0 seeds."""
    part = hear("part")
    (seed if part["host"] == 0 else work)(part)


if __name__ == "__main__":
    main()
