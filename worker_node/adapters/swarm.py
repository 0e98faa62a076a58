"""Policy versions on disk: manifests checked, pieces fetched from peers and coordinator, directories assembled and dropped.

A version counts as stored once its directory was verified whole and renamed into place, and its record written after it; so a
crash at any point leaves it stored or not. At a start every directory is verified whole again: a disk may have lost or changed
bits, and what is stored is served without further question. Pieces of an unfinished fetch stay until another version is fetched.
"""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import structlog
from blake3 import blake3

from coordinator.wire.messages import ManifestReply
from p2p.adapters.arriving import ArrivingPieces
from p2p.adapters.durable import write_durably
from p2p.adapters.fetch import FetchReport, Progress, assemble, fetch
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain import lineage
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Manifest, Piece
from p2p.domain.signing import check_hop, check_manifest
from p2p.domain.tickets import SEEDER
from p2p.errors import ApplyFailed, FetchFailed, ManifestError, PieceCorrupt, SwarmError
from worker_node.adapters.bases import Bases
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.downlink import Downlink
from worker_node.adapters.engine import Weights
from worker_node.adapters.origin import ORIGIN, CoordinatorPieces
from worker_node.adapters.peers import Peers
from worker_node.adapters.prefetch import Prefetch
from worker_node.domain.events import FetchFinished
from worker_node.domain.weights import Forthcoming, Version
from worker_node.errors import CallError

log = structlog.get_logger("worker")
NO_PROGRESS_S = 30.0
SERVED_BACK = 2  # versions behind the newest that are still passed on to peers
DIGESTS_SENT = 32  # held versions, and doubted parts of paths, named to the coordinator
_KEPT_OFFERS = 4


@dataclass(frozen=True, slots=True)
class _Offer:
    """A checked manifest and the hops to it as they came."""

    manifest: Manifest
    reply: ManifestReply
    hops: tuple[Hop, ...] = ()


@dataclass(frozen=True, slots=True)
class _Stored:
    """A version on disk, and the pieces that it came in: peers may want them."""

    manifest: Manifest
    pieces: frozenset[Piece]


class Swarm:
    """The versions of one worker, below one directory. One fetch at a time."""

    def __init__(
        self,
        root: Path,
        client: CoordinatorClient,
        coordinator_key: str,
        peers: Peers,
        downlink: Downlink,
        *,
        reach: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`peers` works on the pieces of the same `root` (`piece_store`); `reach` is told at named commit points (crash tests)."""
        self._reach = reach
        self._client = client
        self._coordinator_key = coordinator_key
        self._versions = root / "versions"
        self._store = piece_store(root)
        self._stored: dict[Version, _Stored] = {}
        self._offers: dict[Version, _Offer] = {}
        self._bases = Bases(self._versions)
        self._peers = peers
        self._downlink = downlink
        self._doubted: dict[str, None] = {}  # edges and bases of paths that failed, newest last
        self._prefetch = Prefetch(client, self._store, coordinator_key)
        self._turn = asyncio.Lock()  # one version is brought at a time, and nothing is brought ahead meanwhile
        self._unfinished: set[str] = set()  # transfers of the newest fetch, unless it led to a version
        self._bringing: Version | None = None  # whose turn it is, or was
        self._given_up: set[Version] = set()  # of those that are being brought, or wait for their turn
        self._fetching: asyncio.Task[FetchReport] | None = None
        self._left = 0  # bytes of the running fetch

    def open(self) -> frozenset[Version]:
        """Read what earlier sessions stored, and remove what a crash left half done."""
        self._versions.mkdir(parents=True, exist_ok=True)
        self._store.root.mkdir(parents=True, exist_ok=True)
        self._store.sweep()
        for record in self._versions.glob("*.json"):
            stored = self._read_record(record)
            if stored is not None:
                self._stored[_version_of(stored.manifest)] = stored
        kept = {_name(version) for version in self._stored}
        for path in self._versions.iterdir():
            if path.name.removesuffix(".json") not in kept:
                _remove(path)
        self._bases.found(self._stored)
        self._hold()
        return frozenset(self._stored) - self._bases.aside

    async def offer(self, version: Version, *, epoch: int) -> None:
        """Get and check the manifest and the path to it. Raises CallError, ManifestError."""
        held = [stored.digest for stored in self._stored if stored.job_id == version.job_id]
        reply = await self._client.manifest(
            version.job_id, version.number, version.digest, epoch=epoch, held=held[-DIGESTS_SENT:], doubted=list(self._doubted)
        )
        offer = await asyncio.to_thread(self._checked, reply, version)
        self._bases.named(version.job_id, reply.base)
        self._offers.pop(version, None)
        self._offers[version] = offer
        while len(self._offers) > _KEPT_OFFERS:
            del self._offers[next(iter(self._offers))]

    async def bring(self, version: Version, *, epoch: Callable[[], int], on_progress: Progress) -> FetchFinished:
        """Fetch the pieces of the cheapest path to the offered version, and apply them as they come.

        Raises SwarmError, OSError; nothing of the version is then stored, and another path is preferred the next time.
        """
        offer = self._offers.get(version)  # before waiting for the turn: newer offers may displace it meanwhile
        if offer is None:
            raise FetchFailed(f"the manifest of {version} is not at hand any more: ask for it again")
        self._given_up = self._given_up - {version} if self._turn.locked() else set()
        async with self._turn:
            self._bringing = version
            offer, route = await self._planned(version, offer, epoch)
            await self._prefetch.stop()
            before = await self._bring_base(offer, route, epoch=epoch, on_progress=on_progress)
            if before is None:
                return await self._bring_by(version, offer, route, epoch=epoch, on_progress=on_progress)
            after = await self._bring_by(version, offer, self._route(offer), epoch=epoch, on_progress=on_progress)
            return after.since(before)

    async def _bring_base(
        self, offer: _Offer, route: tuple[Hop, ...], *, epoch: Callable[[], int], on_progress: Progress
    ) -> FetchFinished | None:
        """A path from nothing that goes over the job's base: the base is brought first, as a version of its own, and kept.

        None where there is nothing to keep: no base, no room, or the coordinator has it no more.
        """
        base = self._bases.of(offer.manifest.job_id)
        if base is None or len(route) == 1 or not route or route[0].digest != base.digest:
            return None
        if not self._bases.has_room(2 * offer.manifest.nbytes):
            return None
        try:
            await self.offer(base, epoch=epoch())
        except (CallError, ManifestError) as error:
            log.info("base not kept", base=str(base), reason=str(error))
            return None
        found = await self._bring_by(base, self._offers[base], route[:1], epoch=epoch, on_progress=on_progress)
        del self._offers[base]
        self._bases.set_aside(base)
        self._hold()
        return found

    async def _bring_by(
        self, version: Version, offer: _Offer, route: tuple[Hop, ...], *, epoch: Callable[[], int], on_progress: Progress
    ) -> FetchFinished:
        """Fetch and apply one path."""
        self._begin(_transfers(route))
        pieces = ArrivingPieces(self._store)
        assembling = asyncio.create_task(self._assemble(version, offer, route, pieces))
        try:
            report = await self._fetch(offer, route, assembling, epoch=epoch, on_progress=on_progress)
        except BaseException:
            pieces.abandon()
            await asyncio.gather(assembling, return_exceptions=True)
            raise
        pieces.end()
        begun = time.monotonic()
        await assembling
        await self._record_stored(version, offer)
        self._unfinished.clear()
        return self._finished(version, route, report, assemble_s=time.monotonic() - begun)

    async def _planned(self, version: Version, offer: _Offer, epoch: Callable[[], int]) -> tuple[_Offer, tuple[Hop, ...]]:
        """The offer and the cheapest path by it.

        It is asked for again where the version that the path began at was dropped while this fetch waited for its turn: with a
        new version each second that could happen every time.
        """
        try:
            return offer, self._route(offer)
        except ManifestError:
            await self.offer(version, epoch=epoch())
            offer = self._offers[version]
            return offer, self._route(offer)

    def _begin(self, transfers: Iterable[str]) -> None:
        """Let go what an earlier fetch that came to nothing left, but for what this one wants too: else the disk fills."""
        wanted = set(transfers)
        self._peers.forget(self._unfinished - wanted)
        self._unfinished = wanted

    async def _fetch(
        self,
        offer: _Offer,
        route: tuple[Hop, ...],
        assembling: asyncio.Task[None],
        *,
        epoch: Callable[[], int],
        on_progress: Progress,
    ) -> FetchReport:
        """The pieces of a path, from peers and the coordinator, until they are all here or `stop_fetch`.

        An assembly that fails before they are all here ends it at once, with its error: the rest would be fetched for nothing.
        """
        needed = offer.manifest.pieces(hop.edge for hop in route)
        await self._make_room({piece.digest for piece in needed})

        def progress(here: int, total: int) -> None:
            self._left = total - here
            on_progress(here, total)

        job_id = offer.manifest.job_id
        self._fetching = asyncio.create_task(self._bring_pieces(job_id, route, needed, epoch, progress))
        try:
            if self._bringing in self._given_up:  # while its path was planned, or while it waited for its turn
                self._fetching.cancel()
            await asyncio.wait({self._fetching, assembling}, return_when=asyncio.FIRST_COMPLETED)
            if not self._fetching.done() and assembling.exception() is not None:
                self._peers.abandon(_transfers(route))
                assembling.result()
            await asyncio.wait({self._fetching})
            if self._fetching.cancelled():
                self._peers.abandon(_transfers(route))
                raise FetchFailed("given up for a newer version that costs less than what was left")
            return self._fetching.result()
        finally:
            self._fetching.cancel()
            await asyncio.gather(self._fetching, return_exceptions=True)
            self._fetching, self._left = None, 0

    async def _bring_pieces(
        self, job_id: str, route: tuple[Hop, ...], needed: tuple[Piece, ...], epoch: Callable[[], int], progress: Progress
    ) -> FetchReport:
        """Peers first; what they do not bring in time, and the small files, from the coordinator."""
        begun = time.monotonic()
        total = sum(piece.size for piece in needed)
        here = await asyncio.to_thread(lambda: sum(piece.size for piece in needed if self._store.has(piece.digest)))

        def on_bytes(count: int) -> None:
            nonlocal here
            here = min(here + count, total)
            progress(here, total)

        progress(here, total)
        transfers = _transfers(route)
        await self._peers.bring(job_id, transfers, on_bytes=on_bytes)
        source = CoordinatorPieces(self._client, job_id, epoch, self._store, self._downlink)
        report = await fetch(
            needed,
            [source],
            self._store,
            no_progress_s=NO_PROGRESS_S + self._downlink.slack_s(max((piece.size for piece in needed), default=0)),
            on_progress=progress,
            on_piece=lambda piece: self._peers.found(transfers, piece.digest),
            origins=(ORIGIN,),
        )
        return FetchReport({ORIGIN: source.bytes}, time.monotonic() - begun, report.retries)

    def stop_fetch(self, version: Version) -> None:
        """Give up bringing the version, if pieces are still missing."""
        self._given_up.add(version)
        if self._fetching is not None and self._bringing == version:
            self._fetching.cancel()

    def weigh(self, version: Version) -> tuple[int, int]:
        """Bytes left of the running fetch, and bytes of the path to an offered version that are not here. Raises ManifestError."""
        offer = self._offers[version]
        pieces = offer.manifest.pieces(hop.edge for hop in self._route(offer))
        return self._left, sum(piece.size for piece in pieces if not self._store.has(piece.digest))

    async def prefetch(self, news: Forthcoming, *, epoch: Callable[[], int]) -> None:
        """Begin to bring pieces of a version that is still being encoded, if its base is here and no peer could bring them."""
        base = next((stored for version, stored in self._stored.items() if version.digest == news.base_digest), None)
        if base is None or self._turn.locked() or self._peers.is_connected(news.job_id):
            return
        source = CoordinatorPieces(self._client, news.job_id, epoch, self._store, self._downlink)
        async with self._turn:  # `start` removes pieces: none that a fetch found here
            await self._prefetch.start(news, source, raw_bytes=base.manifest.nbytes, epoch=epoch)

    def _route(self, offer: _Offer) -> tuple[Hop, ...]:
        """The cheapest path that is known, from what is stored here."""
        hops = {hop.way.id: hop for hop in (*offer.hops, *hops_of(offer.manifest))}
        held = frozenset(stored.digest for stored in self._stored)
        ways = lineage.path([hop.way for hop in hops.values()], offer.manifest.digest, held=held, doubted=frozenset(self._doubted))
        return tuple(hops[way.id] for way in ways)

    async def _assemble(self, version: Version, offer: _Offer, route: tuple[Hop, ...], pieces: ArrivingPieces) -> None:
        """Decode the path's pieces as they come: what is left to do once the last is here is little.

        A path that failed is doubted, unless this machine is why, or nobody waits for it any more.
        """
        held = {stored.digest: self._directory(stored) for stored in self._stored}
        self._reach("worker.assembling")
        try:
            await asyncio.to_thread(assemble, offer.manifest, route, pieces, self._directory(version), held=held)
        except SwarmError as error:
            if not (pieces.is_abandoned or is_own_fault(error) or self._has_lost_base(route)):
                self._doubt(route)
            raise

    def _has_lost_base(self, route: tuple[Hop, ...]) -> bool:
        """Whether the version that the path begins at was dropped here meanwhile."""
        start = route[0].edge.base_digest if route else None
        return start is not None and all(stored.digest != start for stored in self._stored)

    async def _record_stored(self, version: Version, offer: _Offer) -> None:
        """The version is assembled and verified: from its record on it counts as stored."""
        self._reach("worker.assembled")
        self._doubted.clear()
        hops = [{"text": hop.text, "signature": hop.signature} for hop in offer.reply.hops]
        base = None if offer.reply.base is None else offer.reply.base.model_dump()
        record = {"manifest": offer.reply.manifest, "signature": offer.reply.signature, "hops": hops, "base": base}
        try:
            await asyncio.to_thread(write_durably, self._record(version), json.dumps(record).encode())
        except OSError as error:  # without its record the directory is only in the way of the next try
            await asyncio.to_thread(_remove, self._directory(version))
            raise ApplyFailed(f"the record of {version} cannot be written: {error}; free some space") from error
        self._stored[version] = _stored(offer)
        self._bases.taken_back(version)
        self._hold()

    def _hold(self) -> None:
        """What is made against these versions is taken while it is made; against a base that is set aside only if versions are announced by it."""
        serving = sorted(self._stored.keys() - self._bases.aside, key=lambda one: one.number)
        newest = {one.job_id: self._stored[one].manifest for one in serving}
        led = {job for job, manifest in newest.items() if any(edge.encoding == lineage.LOWRANK for edge in manifest.edges)}
        self._peers.hold(one.digest for one in self._stored if one not in self._bases.aside or one.job_id in led)

    def _doubt(self, route: tuple[Hop, ...]) -> None:
        """A path failed: its base and its edges are taken again only where nothing else leads to the version."""
        start = [] if not route or route[0].edge.base_digest is None else [route[0].edge.base_digest]
        for name in (*start, *(hop.way.id for hop in route)):
            self._doubted.pop(name, None)
            self._doubted[name] = None
        while len(self._doubted) > DIGESTS_SENT:
            del self._doubted[next(iter(self._doubted))]

    def weights(self, version: Version) -> Weights:
        """What an engine loads."""
        return Weights(self._directory(version), version.number, version.digest)

    def canary_ids(self, version: Version) -> tuple[int, ...]:
        """The manifest's canary tokens."""
        return self._stored[version].manifest.canary_ids

    async def drop(self, versions: Collection[Version]) -> None:
        """Forget versions and the pieces that no other version needs. The record goes first."""
        unneeded = (frozenset(versions) | self._bases.aside) & self._stored.keys()
        nbytes = max((self._stored[version].manifest.nbytes for version in unneeded), default=0)
        bases = self._bases.dropped(unneeded, self._stored.keys() - unneeded, nbytes=nbytes)
        gone = [(version, self._stored.pop(version)) for version in unneeded - bases]
        spare = {piece.digest for base in bases for piece in self._stored[base].pieces}
        self._stored |= {base: replace(self._stored[base], pieces=frozenset()) for base in bases}
        self._hold()
        kept = self._pieces_stored()
        kept |= {piece.digest for offer in self._offers.values() for piece in _stored(offer).pieces}
        self._peers.let_go(self._first_passed_on())
        kept |= self._peers.pieces
        await asyncio.to_thread(self._remove_from_disk, gone, kept)
        await asyncio.to_thread(self._remove_pieces, spare - kept)

    def _first_passed_on(self) -> dict[str, int]:
        """For each job that is worked for, the oldest version whose pieces peers may still have from here."""
        first = {version.job_id: 0 for version in self._offers}
        for version in self._stored:
            first[version.job_id] = max(first.get(version.job_id, 0), version.number - SERVED_BACK)
        return first

    async def close(self) -> None:
        """Stop fetching ahead."""
        await self._prefetch.stop()

    def _checked(self, reply: ManifestReply, version: Version) -> _Offer:
        check_manifest(self._coordinator_key, reply.manifest, reply.signature)
        manifest = Manifest.from_json(reply.manifest)
        if _version_of(manifest) != version:
            raise ManifestError(f"the manifest is of {_version_of(manifest)}, {version} was asked for: ask again")
        hops = []
        for signed in reply.hops:
            check_hop(self._coordinator_key, signed.text, signed.signature)
            hops.append(Hop.from_json(signed.text))
            hops[-1].check_fits(manifest)
        return _Offer(manifest, reply, tuple(hops))

    async def _make_room(self, wanted: set[str]) -> None:
        """Remove the pieces of fetches that were given up: a disk full of them must not stop this one."""
        here = await asyncio.to_thread(lambda: list(self._store.digests()))
        # Looked up after the listing: what peers bring from here on is not in the list, or is kept.
        kept = self._pieces_stored() | wanted | self._prefetch.pieces | self._peers.pieces
        await asyncio.to_thread(self._remove_pieces, [digest for digest in here if digest not in kept])

    def _pieces_stored(self) -> set[str]:
        return {piece.digest for stored in self._stored.values() for piece in stored.pieces}

    def _read_record(self, place: Path) -> _Stored | None:
        """A stored version; None when the record or any bit of the directory is not what it should be."""
        try:
            reply = ManifestReply.model_validate_json(place.read_bytes())
            version = _version_of(Manifest.from_json(reply.manifest))
            offer = self._checked(reply, version)
            manifest = offer.manifest
            is_whole = place == self._record(version) and digest_of(self._directory(version)) == manifest.digest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SwarmError):
            return None
        if is_whole:
            self._bases.named(version.job_id, reply.base)
        return _stored(offer) if is_whole else None

    def _finished(self, version: Version, route: tuple[Hop, ...], report: FetchReport, *, assemble_s: float) -> FetchFinished:
        """What the version cost, with what came ahead of its announcement. The seeder is the coordinator's, not a peer."""
        transfers = frozenset(_transfers(route))
        by_peer = self._peers.take_bytes(transfers)
        from_origin = sum(report.bytes_by_source.values()) + self._prefetch.take_bytes(transfers) + by_peer.pop(SEEDER, 0)
        from_peers = by_peer.total()
        return FetchFinished(version, from_origin + from_peers, from_peers, report.seconds, assemble_s)

    def _remove_from_disk(self, gone: list[tuple[Version, _Stored]], kept: set[str]) -> None:
        for version, stored in gone:
            _remove(self._record(version))
            _remove(self._directory(version))
            self._remove_pieces([piece.digest for piece in stored.pieces if piece.digest not in kept])

    def _remove_pieces(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._store.remove(digest)

    def _directory(self, version: Version) -> Path:
        return self._versions / _name(version)

    def _record(self, version: Version) -> Path:
        return self._versions / f"{_name(version)}.json"


def blame_for(error: BaseException) -> str:
    """Whose fault a fetch is that came to nothing; empty where an assembly failed and nobody can tell."""
    if isinstance(error, OSError) or (isinstance(error, SwarmError) and isinstance(error.__cause__, OSError | PieceCorrupt)):
        return "worker"
    return "" if isinstance(error, ApplyFailed) else "network"


def is_own_fault(error: BaseException) -> bool:
    """Whether this machine's disk is why: it is full, or changed a piece that had been verified. The path is as good as it was."""
    cause = error.__cause__
    return isinstance(cause, PieceCorrupt) or (isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT))


def _name(version: Version) -> str:
    """A file name of our own making: what strangers call things never becomes a path."""
    return f"{blake3(version.job_id.encode()).hexdigest()[:16]}-{version.number}-{version.digest[:32]}"


def _version_of(manifest: Manifest) -> Version:
    return Version(manifest.job_id, manifest.version, manifest.digest)


def _transfers(route: Iterable[Hop]) -> dict[str, int]:
    """The transfers that carry a path's edges, and the versions that they lead to."""
    return {hop.edge.transfer: hop.version for hop in route if hop.edge.transfer is not None}


def _stored(offer: _Offer) -> _Stored:
    return _Stored(offer.manifest, offer.manifest.all_pieces() | {piece for hop in offer.hops for piece in hop.edge.pieces})


def piece_store(root: Path) -> PieceStore:
    """Where the pieces of a worker lie: what is lost with the power is fetched again."""
    return PieceStore(root / "pieces", files=UNSYNCED_FILES)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
