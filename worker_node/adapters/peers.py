"""This worker's part in the swarm: its bulk node, the neighbours that it dials, and what came from whom.

Peers are a bonus: whatever they do not bring in time is fetched from the coordinator, by whoever called `bring`.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import PeerAddress
from p2p.adapters.bulk.events import BatchSeen, GaveUp, NodeEvent, PeerDropped, PieceStored, TransferComplete
from p2p.adapters.bulk.node import BulkNode, NodeState
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.piece_store import PieceStore
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch, text_hash
from p2p.domain.control_messages import Neighbour
from p2p.domain.manifest import Piece
from p2p.errors import SwarmError
from worker_node.config import LinkSettings, PeerSettings
from worker_node.domain.patience import Patience
from worker_node.errors import ConfigError

log = structlog.get_logger("peers")
SEEDER = "seeder"


@dataclass(frozen=True, slots=True)
class Myself:
    """Who this peer is."""

    worker_id: str
    key: Ed25519PrivateKey
    coordinator_key: str
    unix: Callable[[], float]  # the coordinator's time


class Peers:
    """One bulk node. Its events arrive on the event loop that `start` ran on."""

    def __init__(self, myself: Myself, store: PieceStore, settings: PeerSettings, link: LinkSettings, counter: Path) -> None:
        self._settings = settings
        self._held: frozenset[str] = frozenset()  # digests of versions that deltas may be applied to
        self._wanted: frozenset[str] = frozenset()  # transfers asked for by name
        self._complete: dict[str, None] = {}
        self._rows: dict[str, set[str]] = {}  # transfer -> digests of its pieces, as far as known
        self._versions: dict[str, int] = {}  # transfer -> the version that it leads to
        self._from: dict[str, Counter[str]] = {}  # transfer -> bytes by peer
        self._news = asyncio.Event()
        self._progress: Callable[[NodeEvent], None] = lambda _: None
        self._dialled: set[tuple[str, str]] = set()  # job, peer
        self._loop: asyncio.AbstractEventLoop | None = None
        self._node = BulkNode(
            BulkSettings(
                peer_id=myself.worker_id,
                coordinator_public_key=myself.coordinator_key,
                host=settings.bind,
                port=settings.port,
                listens=bool(settings.port),
                names=(settings.host, myself.worker_id),
                seeders=frozenset({SEEDER}),
                allowed_networks=("0.0.0.0/0", "::/0"),  # checked here, once the operator's networks are known
                up=link.up_bytes_per_s,
                down=link.down_bytes_per_s,
                cap_bytes=link.month_bytes,
                counter=counter,
                unix=myself.unix,
                wants=self._wants,
            ),
            myself.key,
            store,
            self._tell,
        )

    def start(self) -> PeerAddress | None:
        """Begin; where others find us, None if we do not listen. Raises ConfigError when the port cannot be had."""
        self._loop = asyncio.get_running_loop()
        try:
            info = self._node.start()
        except OSError as error:
            raise ConfigError(f"--peer-port {self._settings.port} cannot be served: {error}; choose another port or 0") from error
        if info is None:
            return None
        return PeerAddress(host=self._settings.host, port=info.port, certificate_sha256=info.certificate_sha256)

    async def close(self) -> None:
        """End every connection."""
        await asyncio.to_thread(self._node.close)

    def state(self) -> NodeState:
        """The figures of now."""
        return self._node.state()

    def hold(self, digests: Iterable[str]) -> None:
        """Versions that lie here whole: deltas against them are taken as they are made."""
        self._held = frozenset(digests)

    @property
    def uplink(self) -> float:
        """Measured upload rate, bytes a second; 0 before anything was sent."""
        state = self._node.state()
        return state.uplink if any(link.bytes_up for link in state.links) else 0.0

    @property
    def pieces(self) -> frozenset[str]:
        """Digests of the pieces of every transfer that this peer takes part in: they are being fetched, or passed on."""
        return frozenset(digest for row in self._rows.values() for digest in row)

    def knows(self, transfer: str) -> bool:
        """Whether this peer takes part in the transfer."""
        return transfer in self._rows

    def found(self, transfer: str | None, pieces: Iterable[Piece]) -> None:
        """Pieces came another way: peers may have them."""
        if transfer is not None and transfer not in self._complete:
            for piece in pieces:
                self._node.found(transfer, piece.digest)

    def let_go(self, *, before: int) -> None:
        """Take no part any more in transfers to versions before that one."""
        for transfer in [transfer for transfer, version in self._versions.items() if version < before]:
            self._node.retire(transfer)
            for known in (self._rows, self._versions, self._complete, self._from):
                known.pop(transfer, None)

    async def bring(self, transfers: Collection[str], *, on_bytes: Callable[[int], None]) -> bool:
        """Take part in the transfers until they are complete here; False when nothing comes any more. `on_bytes`: a piece came."""
        self._wanted |= frozenset(transfers)
        patience = Patience(time.monotonic())

        def progress(event: NodeEvent) -> None:
            if isinstance(event, BatchSeen | PieceStored) and event.transfer in transfers:
                patience.progress(time.monotonic())
            if isinstance(event, PieceStored) and event.transfer in transfers:
                on_bytes(event.piece.size)

        self._progress = progress
        try:
            for transfer in transfers:
                self._node.want(transfer)
            return await self._until_complete(transfers, patience)
        finally:
            self._progress = lambda _: None
            self._wanted -= frozenset(transfers)

    async def _until_complete(self, transfers: Collection[str], patience: Patience) -> bool:
        while not all(transfer in self._complete for transfer in transfers):
            self._news.clear()
            left_s = patience.deadline - time.monotonic()
            if left_s <= 0:
                return False
            try:
                async with asyncio.timeout(left_s):
                    await self._news.wait()
            except TimeoutError:
                continue
        return True

    def take_bytes(self, transfers: Collection[str]) -> Counter[str]:
        """Bytes by peer that the transfers brought, counted once."""
        total: Counter[str] = Counter()
        for transfer in transfers:
            total += self._from.pop(transfer, Counter())
        return total

    def meet(self, job_id: str, found: Iterable[tuple[Neighbour, tuple[str, int]]]) -> None:
        """Dial these, each at its host and port, and no others."""
        met = {(job_id, peer.worker_id) for peer, (host, port) in found if self._dial(peer, host, port)}
        for old_job, peer_id in self._dialled - met:
            self._node.hang_up(peer_id, old_job)
        self._dialled = met

    def _dial(self, peer: Neighbour, host: str, port: int) -> bool:
        try:
            self._node.dial(PeerInfo(host, port, peer.certificate_sha256), peer.ticket)
        except SwarmError as error:
            log.debug("peer not dialled", peer=peer.worker_id, reason=str(error))
            return False
        return True

    # --- the node's threads

    def _wants(self, first: Batch) -> bool:
        return first.base_digest in self._held or text_hash(first.to_json()) in self._wanted

    def _tell(self, event: NodeEvent) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(partial(self._heard, event))

    def _heard(self, event: NodeEvent) -> None:
        match event:
            case TransferComplete():
                self._complete[event.transfer] = None
            case BatchSeen():
                self._versions[event.transfer] = event.batch.version
                self._rows.setdefault(event.transfer, set()).update(piece.digest for piece in event.batch.pieces)
            case PieceStored():
                self._from.setdefault(event.transfer, Counter())[event.peer] += event.piece.size
            case GaveUp() | PeerDropped():
                log.info("swarm", kind=type(event).__name__, reason=event.reason)
        self._progress(event)
        self._news.set()
