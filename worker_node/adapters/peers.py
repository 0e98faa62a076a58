"""This worker's part in the swarm: its bulk node, the transfers that it takes part in, and what came from whom.

Peers are a bonus: whatever they do not bring in time is fetched from the coordinator, by whoever called `bring`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import structlog
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import PeerAddress
from p2p.adapters.bulk.events import BatchSeen, GaveUp, NodeEvent, PeerDropped, PeerOpened, PieceStored, TransferComplete
from p2p.adapters.bulk.node import BulkNode, NodeState
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.piece_store import PieceStore
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch, text_hash
from p2p.domain.control_messages import Neighbour
from p2p.domain.tickets import SEEDER
from p2p.errors import BatchRefused, SwarmError
from worker_node.config import LinkSettings, PeerSettings
from worker_node.domain.patience import Patience, first_wait_s
from worker_node.errors import ConfigError

log = structlog.get_logger("peers")
GONE = 1024  # transfers that were let go and are remembered


@dataclass(frozen=True, slots=True)
class Myself:
    """Who this peer is."""

    worker_id: str
    key: Ed25519PrivateKey
    coordinator_key: str
    unix: Callable[[], float]  # the coordinator's time


@dataclass(slots=True)
class _Transfer:
    """One that this peer takes part in, as far as its node told of it."""

    job_id: str
    version: int
    pieces: set[str] = field(default_factory=set)
    came: set[str] = field(default_factory=set)  # digests that peers brought: a piece may stand in a row twice, and comes once
    bytes_by_peer: Counter[str] = field(default_factory=Counter)
    is_complete: bool = False


@dataclass(slots=True)
class _Waiting:
    """The running `bring`."""

    transfers: frozenset[str]
    patience: Patience
    on_bytes: Callable[[int], None]
    counted: set[str] = field(default_factory=set)
    has_failed: bool = False  # the node sees no way, or cannot write


class Peers:
    """One bulk node. Its events arrive on the event loop that `start` ran on."""

    def __init__(self, myself: Myself, store: PieceStore, settings: PeerSettings, link: LinkSettings, counter: Path) -> None:
        self._settings = settings
        self._link = link
        self._held: frozenset[str] = frozenset()  # digests of versions that deltas may be applied to
        self._wanted: dict[str, tuple[str, int]] = {}  # transfers asked for by name -> job, version
        self._transfers: dict[str, _Transfer] = {}
        self._followed: dict[tuple[str, int], str] = {}  # job, version -> the transfer that was joined unasked
        self._waiting: _Waiting | None = None
        self._news = asyncio.Event()
        self._gone: dict[str, None] = {}  # transfers that were let go, newest last
        self._dialled: set[tuple[str, str]] = set()  # job, peer
        self._carried: dict[tuple[str, str], int] = {}  # bytes of pieces by job and peer of a link, when `_busy` was asked last
        self._met: tuple[str, float] | None = None  # the job for which peers were asked for, and since when they are these
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
                allowed_networks=("0.0.0.0/0", "::/0"),  # `Neighbourhood` checks, once the operator's networks are known
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

    @property
    def uplink(self) -> float:
        """Measured upload rate, bytes a second; 0 before anything was sent."""
        state = self._node.state()
        return state.uplink if any(link.bytes_up for link in state.links) else 0.0

    def limit_down(self, rate: float) -> None:
        """What peers may send from now on, bytes a second."""
        self._node.set_limits(up=self._link.up_bytes_per_s, down=rate, cap_bytes=self._link.month_bytes)

    # --- what it takes part in

    def hold(self, digests: Iterable[str]) -> None:
        """Versions that lie here whole: deltas against them are taken as they are made."""
        self._held = frozenset(digests)

    @property
    def pieces(self) -> frozenset[str]:
        """Digests of the pieces of every transfer that this peer takes part in: they are being fetched, or passed on."""
        return frozenset(digest for transfer in self._transfers.values() for digest in transfer.pieces)

    def found(self, transfers: Iterable[str], digest: str) -> None:
        """A piece of one of these transfers came another way: peers may have it, and none need bring it."""
        for transfer in transfers:
            self._node.found(transfer, digest)

    def forget(self, transfers: Iterable[str]) -> None:
        """Take part in these no more, complete or not, until they are brought again."""
        for transfer in transfers:
            self._forget(transfer)

    def abandon(self, transfers: Iterable[str]) -> None:
        """Bring no more of these, unless they are complete already."""
        for transfer in transfers:
            known = self._transfers.get(transfer)
            if known is None or not known.is_complete:
                self._forget(transfer)

    def let_go(self, first_kept: Mapping[str, int]) -> None:
        """Keep, of each of these jobs, the transfers to versions from that number on, and those that are being brought; no others."""
        places = {transfer: (known.job_id, known.version) for transfer, known in self._transfers.items()} | self._wanted
        running = frozenset() if self._waiting is None else self._waiting.transfers
        for transfer, (job_id, version) in places.items():
            if transfer not in running and (job_id not in first_kept or version < first_kept[job_id]):
                self._forget(transfer)
        for job_id, version in list(self._followed):
            if job_id not in first_kept or version < first_kept[job_id]:
                del self._followed[job_id, version]

    def _forget(self, transfer: str) -> None:
        self._wanted.pop(transfer, None)
        self._gone.pop(transfer, None)
        self._gone[transfer] = None
        if len(self._gone) > GONE:
            del self._gone[next(iter(self._gone))]
        self._node.retire(transfer)
        self._transfers.pop(transfer, None)

    # --- bringing

    async def bring(self, job_id: str, transfers: Mapping[str, int], *, on_bytes: Callable[[int], None]) -> bool:
        """Take part in the transfers until they are complete here; False when nothing comes any more.

        `transfers`: to which version each leads. `on_bytes` is told the size of each piece that came. They stay wanted until `abandon` or `let_go`.
        """
        now = time.monotonic()
        self._wanted |= {transfer: (job_id, version) for transfer, version in transfers.items()}
        self._waiting = _Waiting(frozenset(transfers), Patience(now, self._first_wait_s(job_id, now)), on_bytes)
        try:
            for transfer in transfers:
                self._gone.pop(transfer, None)
                self._node.want(transfer)
                self._node.resume(transfer)
            return await self._until_complete(self._waiting)
        finally:
            self._waiting = None

    async def _until_complete(self, waiting: _Waiting) -> bool:
        while not all(self._is_complete(transfer) for transfer in waiting.transfers):
            self._news.clear()
            left_s = waiting.patience.deadline - time.monotonic()
            if left_s <= 0 or waiting.has_failed:
                return False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await self._news.wait()
        return True

    def _is_complete(self, transfer: str) -> bool:
        known = self._transfers.get(transfer)
        return known is not None and known.is_complete

    def _first_wait_s(self, job_id: str, now: float) -> float:
        links = sum(link.job_id == job_id for link in self._node.state().links)
        met_s_ago = now - self._met[1] if self._met is not None and self._met[0] == job_id else None
        return first_wait_s(links=links, dialled=len(self._dialled), met_s_ago=met_s_ago)

    def take_bytes(self, transfers: Collection[str]) -> Counter[str]:
        """Bytes by peer that the transfers brought, counted once."""
        total: Counter[str] = Counter()
        for transfer in transfers:
            if transfer in self._transfers:
                total += self._transfers[transfer].bytes_by_peer
                self._transfers[transfer].bytes_by_peer = Counter()
        return total

    # --- whom it is connected to

    def is_connected(self, job_id: str) -> bool:
        """Whether a connection for this job is up."""
        return any(link.job_id == job_id for link in self._node.state().links)

    def take_batch(self, text: str, signature: str) -> None:
        """A batch that came over the control plane: taken if it begins a transfer that is wanted here, or goes on with one that is known."""
        try:
            batch = Batch.from_json(text)
            if batch.number > 0 or self._wants(batch):
                self._node.add_batch(text, signature)
        except BatchRefused as error:
            log.debug("batch not taken", reason=str(error))

    def meet(self, job_id: str, found: Iterable[tuple[Neighbour, tuple[str, int]]]) -> None:
        """Dial these, each at its host and port, and no others; a link of the job that carries pieces just now may go on meanwhile."""
        met = {(job_id, peer.worker_id) for peer, (host, port) in found if self._dial(peer, host, port)}
        if self._met is None or self._met[0] != job_id or met - self._dialled:
            self._met = (job_id, time.monotonic())
        kept = {place for place in self._busy() & self._dialled if place[0] == job_id}
        self._dial_no_more(self._dialled - met - kept)
        self._dialled = met | kept

    def meet_nobody(self) -> None:
        """There is no job: end what was dialled, and take part in nothing but what is being brought."""
        self._dial_no_more(self._dialled)
        self._dialled, self._met = set(), None
        self.let_go({})

    def meet_nobody_new(self, job_id: str) -> None:
        """Nobody could be asked for peers: who is dialled for the job stays so."""
        if self._met is None or self._met[0] != job_id:
            self.meet(job_id, ())

    def _busy(self) -> set[tuple[str, str]]:
        """Job and peer of the links that carried pieces since this was asked last: a peer that is left out once is not cut off."""
        before = self._carried
        self._carried = {(link.job_id, link.peer): link.bytes_up + link.bytes_down for link in self._node.state().links}
        return {place for place, count in self._carried.items() if count != before.get(place, 0)}

    def _dial_no_more(self, places: Iterable[tuple[str, str]]) -> None:
        for job_id, peer_id in places:
            self._node.stop_dialling(peer_id, job_id)

    def _dial(self, peer: Neighbour, host: str, port: int) -> bool:
        try:
            self._node.dial(PeerInfo(host, port, peer.certificate_sha256), peer.ticket)
        except SwarmError as error:
            log.debug("peer not dialled", peer=peer.worker_id, reason=str(error))
            return False
        return True

    # --- the node's threads

    def _wants(self, first: Batch) -> bool:
        """Whether to take part: when asked for by name, or unasked in the first transfer to a version on a base that is held.

        A version is announced with the edge that was told first; what is told of it later is for others.
        """
        transfer = text_hash(first.to_json())
        if transfer in self._wanted:
            return True
        if first.base_digest not in self._held or transfer in self._gone:
            return False
        return self._followed.setdefault((first.job_id, first.version), transfer) == transfer

    def _tell(self, event: NodeEvent) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
                self._loop.call_soon_threadsafe(partial(self._heard, event))

    # --- on the event loop again

    def _heard(self, event: NodeEvent) -> None:
        match event:
            case BatchSeen() if event.transfer not in self._gone:  # it may have been on its way when the transfer was let go
                batch = event.batch
                known = self._transfers.setdefault(event.transfer, _Transfer(batch.job_id, batch.version))
                known.pieces |= {piece.digest for piece in batch.pieces}
            case PieceStored():
                self._count(event)
            case TransferComplete() if event.transfer in self._transfers:
                self._transfers[event.transfer].is_complete = True
            case GaveUp() | PeerDropped():
                log.info("swarm", kind=type(event).__name__, reason=event.reason)
        if self._waiting is not None:
            _pass_on(event, self._waiting)
        self._news.set()

    def _count(self, event: PieceStored) -> None:
        known = self._transfers.get(event.transfer)
        if known is not None and event.piece.digest not in known.came:
            known.came.add(event.piece.digest)
            known.bytes_by_peer[event.peer] += event.piece.size


def _pass_on(event: NodeEvent, waiting: _Waiting) -> None:
    """What the running `bring` has to know."""
    now = time.monotonic()
    match event:
        case PeerOpened():
            waiting.patience.opened(now)
        case BatchSeen() if event.transfer in waiting.transfers and event.peer is not None:
            waiting.patience.progress(now)
        case PieceStored() if event.transfer in waiting.transfers:
            waiting.patience.progress(now)
            if event.piece.digest not in waiting.counted:
                waiting.counted.add(event.piece.digest)
                waiting.on_bytes(event.piece.size)
        case GaveUp() if event.transfer in waiting.transfers:
            waiting.has_failed = True
