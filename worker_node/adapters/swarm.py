"""Policy versions on disk: manifests checked, pieces fetched from peers and coordinator, directories assembled and dropped.

A version counts as stored once its directory was verified whole and renamed into place, and its record written after it; so a
crash at any point leaves it stored or not. At a start every directory is verified whole again: a disk may have lost or changed
bits, and what is stored is served without further question. Pieces of an unfinished fetch stay until another version is fetched.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from coordinator.wire.messages import ManifestReply, PeerAddress, Source
from p2p.adapters.durable import write_durably
from p2p.adapters.fetch import FetchReport, PieceSource, assemble, fetch
from p2p.adapters.peer import PeerServer, PeerSource
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.addresses import PeerInfo
from p2p.domain.lineage import cheapest
from p2p.domain.manifest import Manifest, Piece
from p2p.domain.signing import check_manifest
from p2p.errors import FetchFailed, ManifestError, PieceAbsent, SwarmError
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.engine import Weights
from worker_node.config import PeerSettings
from worker_node.domain.events import FetchFinished
from worker_node.domain.weights import Version
from worker_node.errors import CallError, ConfigError

ORIGIN = "coordinator"
NO_PROGRESS_S = 30.0
_KEPT_OFFERS = 4
_NOT_NOW = ("unknown_piece", "http_404", "busy", "too_many_requests")  # not there, or too busy: no fault of the source


@dataclass(frozen=True, slots=True)
class _Offer:
    """A checked manifest as it came, and the peers that hold the version."""

    manifest: Manifest
    text: str
    signature: str
    sources: tuple[Source, ...] = ()


class CoordinatorPieces:
    """The coordinator as a piece source."""

    def __init__(self, client: CoordinatorClient, job_id: str, epoch: Callable[[], int]) -> None:
        """`epoch` tells the session of the moment: a fetch may outlive the one it began in."""
        self._client = client
        self._job_id = job_id
        self._epoch = epoch

    @property
    def name(self) -> str:
        return ORIGIN

    async def read(self, piece: Piece) -> bytes:
        try:
            return await self._client.piece(self._job_id, piece.digest, piece.size, epoch=self._epoch())
        except CallError as error:
            kind = PieceAbsent if error.code in _NOT_NOW else FetchFailed
            raise kind(f"{ORIGIN}: {error}") from error


class Swarm:
    """The versions of one worker, below one directory. One fetch at a time."""

    def __init__(self, root: Path, client: CoordinatorClient, key: Ed25519PrivateKey, coordinator_key: str) -> None:
        self._client = client
        self._key = key
        self._coordinator_key = coordinator_key
        self._versions = root / "versions"
        self._store = PieceStore(root / "pieces", files=UNSYNCED_FILES)
        self._stored: dict[Version, Manifest] = {}
        self._offers: dict[Version, _Offer] = {}
        self._peers: PeerServer | None = None

    def open(self) -> frozenset[Version]:
        """Read what earlier sessions stored, and remove what a crash left half done."""
        self._versions.mkdir(parents=True, exist_ok=True)
        self._store.root.mkdir(parents=True, exist_ok=True)
        self._store.sweep()
        for record in self._versions.glob("*.json"):
            manifest = self._read_record(record)
            if manifest is not None:
                self._stored[_version_of(manifest)] = manifest
        kept = {_name(version) for version in self._stored}
        for path in self._versions.iterdir():
            if path.name.removesuffix(".json") not in kept:
                _remove(path)
        return frozenset(self._stored)

    async def offer(self, version: Version, *, epoch: int) -> None:
        """Get and check the manifest. Raises CallError, ManifestError."""
        reply = await self._client.manifest(version.job_id, version.number, version.digest, epoch=epoch)
        manifest = await asyncio.to_thread(self._checked, reply, version)
        self._offers.pop(version, None)
        self._offers[version] = _Offer(manifest, reply.manifest, reply.signature, reply.sources)
        while len(self._offers) > _KEPT_OFFERS:
            del self._offers[next(iter(self._offers))]

    async def bring(
        self, version: Version, *, epoch: Callable[[], int], networks: Collection[str], on_progress: Callable[[int, int], None]
    ) -> FetchFinished:
        """Fetch the offered version's pieces and assemble it. Raises SwarmError, OSError; nothing of the version is then stored."""
        offer = self._offers[version]
        edge = cheapest(offer.manifest, held=frozenset(held.digest for held in self._stored))
        await self._make_room({piece.digest for piece in offer.manifest.pieces(edge)})
        async with AsyncExitStack() as stack:
            sources: list[PieceSource] = [CoordinatorPieces(self._client, version.job_id, epoch)]
            for source in offer.sources:
                peer = self._peer(source, networks)
                if peer is not None:
                    sources.append(await stack.enter_async_context(peer))
            report = await fetch(
                offer.manifest,
                edge,
                sources,
                self._store,
                no_progress_s=NO_PROGRESS_S,
                on_progress=on_progress,
                origins=(ORIGIN,),
            )
        held = {stored.digest: self._directory(stored) for stored in self._stored}
        await asyncio.to_thread(assemble, offer.manifest, edge, self._store, self._directory(version), held=held)
        record = json.dumps({"manifest": offer.text, "signature": offer.signature}).encode()
        await asyncio.to_thread(write_durably, self._record(version), record)
        self._stored[version] = offer.manifest
        return _finished(version, report)

    def weights(self, version: Version) -> Weights:
        """What an engine loads."""
        return Weights(self._directory(version), version.number, version.digest)

    def canary_ids(self, version: Version) -> tuple[int, ...]:
        """The manifest's canary tokens."""
        return self._stored[version].canary_ids

    async def drop(self, versions: Collection[Version]) -> None:
        """Forget versions and the pieces that no other version needs. The record goes first."""
        gone = [(version, self._stored.pop(version)) for version in versions if version in self._stored]
        kept = {piece.digest for manifest in self._stored.values() for piece in manifest.all_pieces()}
        kept |= {piece.digest for offer in self._offers.values() for piece in offer.manifest.all_pieces()}
        await asyncio.to_thread(self._remove_from_disk, gone, kept)

    async def serve_peers(self, settings: PeerSettings, worker_id: str) -> PeerAddress:
        """Serve pieces to other workers; where they find us. Raises ConfigError when the port cannot be had."""
        server = PeerServer(
            self._store,
            worker_id=worker_id,
            coordinator_public_key=self._coordinator_key,
            host=settings.bind,
            port=settings.port,
            clock=self._client.server_now,
        )
        try:
            info = await server.start()
        except OSError as error:
            raise ConfigError(f"--peer-port {settings.port} cannot be served: {error}; choose another port or 0") from error
        self._peers = server
        return PeerAddress(host=settings.host, port=info.port, certificate_sha256=info.certificate_sha256)

    async def close(self) -> None:
        """Stop serving peers."""
        if self._peers is not None:
            await self._peers.close()

    def _checked(self, reply: ManifestReply, version: Version) -> Manifest:
        check_manifest(self._coordinator_key, reply.manifest, reply.signature)
        manifest = Manifest.from_json(reply.manifest)
        if _version_of(manifest) != version:
            raise ManifestError(f"the manifest is of {_version_of(manifest)}, {version} was asked for: ask again")
        return manifest

    async def _make_room(self, wanted: set[str]) -> None:
        """Remove the pieces of fetches that were given up: a disk full of them must not stop this one."""
        needed = {piece.digest for manifest in self._stored.values() for piece in manifest.all_pieces()}
        await asyncio.to_thread(self._store.keep_only, needed | wanted)

    def _read_record(self, path: Path) -> Manifest | None:
        """The manifest of a stored version; None when the record or any bit of the directory is not what it should be."""
        try:
            record = json.loads(path.read_bytes())
            check_manifest(self._coordinator_key, record["manifest"], record["signature"])
            manifest = Manifest.from_json(record["manifest"])
            version = _version_of(manifest)
            is_whole = path == self._record(version) and digest_of(self._directory(version)) == manifest.digest
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, SwarmError):
            return None
        return manifest if is_whole else None

    def _peer(self, source: Source, networks: Collection[str]) -> PeerSource | None:
        """A peer to fetch from; None when its address or ticket is unusable (peers are a bonus)."""
        address = PeerInfo(source.address.host, source.address.port, source.address.certificate_sha256)
        try:
            return PeerSource(address, source.ticket, self._key, allowed_networks=networks, clock=self._client.server_now)
        except (SwarmError, ValueError):  # ValueError: a network of the operator's list is none
            return None

    def _remove_from_disk(self, gone: list[tuple[Version, Manifest]], kept: set[str]) -> None:
        for version, manifest in gone:
            _remove(self._record(version))
            _remove(self._directory(version))
            for piece in manifest.all_pieces():
                if piece.digest not in kept:
                    self._store.remove(piece.digest)

    def _directory(self, version: Version) -> Path:
        return self._versions / _name(version)

    def _record(self, version: Version) -> Path:
        return self._versions / f"{_name(version)}.json"


def _name(version: Version) -> str:
    """A file name of our own making: what strangers call things never becomes a path."""
    return f"{blake3(version.job_id.encode()).hexdigest()[:16]}-{version.number}-{version.digest[:32]}"


def _version_of(manifest: Manifest) -> Version:
    return Version(manifest.job_id, manifest.version, manifest.digest)


def _finished(version: Version, report: FetchReport) -> FetchFinished:
    from_peers = sum(count for source, count in report.bytes_by_source.items() if source != ORIGIN)
    return FetchFinished(version, sum(report.bytes_by_source.values()), from_peers, report.seconds)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
