"""Manifests and pieces for workers: where a version can be fetched from, and which pieces a worker may read."""

from __future__ import annotations

from random import SystemRandom
from uuid import uuid4

from coordinator.domain.model import Holding, Invite, Job, Publication, PublicationState, Worker, WorkerState
from coordinator.service.deps import Deps
from coordinator.service.ports import Reader
from coordinator.service.worker_places import may_serve
from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.wire.messages import ManifestReply, PeerAddress, Source
from p2p.domain.manifest import Manifest
from p2p.domain.tickets import Ticket, sign_ticket

SOURCES_MOST = 16
TICKET_S = 3600
PUBLICATIONS_CACHED = 64


async def manifest(deps: Deps, worker: Worker, job_id: str, version: int, digest: str) -> ManifestReply:
    """The signed manifest of a published version and peers that hold it. Raises ProtocolRefusal."""

    async def read(reader: Reader) -> tuple[Publication, list[Worker]]:
        await _check_allowed(reader, worker, job_id)
        publication = await reader.get(Publication, job_id, version, digest)
        if publication is None or publication.state is not PublicationState.PUBLISHED:
            raise await _not_published(reader, job_id, version, digest, publication)
        holdings = await reader.select(Holding, job_id=job_id, version=version, digest=digest)
        ids = sorted({holding.worker_id for holding in holdings} - {worker.id})
        peers = await reader.select(Worker, id=ids, state=[WorkerState.STANDBY, WorkerState.ACTIVE]) if ids else []
        return publication, [peer for peer in peers if peer.peer is not None]

    publication, peers = await deps.store.read(read)
    deps.presence.fetches(worker.id, job_id, version, at=deps.clock.now())
    # A random choice spreads the fetchers over the peers; nothing is decided on it.
    chosen = SystemRandom().sample(peers, min(len(peers), SOURCES_MOST))
    sources = tuple(_source(deps, worker, peer, job_id) for peer in chosen)
    return ManifestReply(manifest=publication.manifest, signature=publication.signature, sources=sources)


def _source(deps: Deps, worker: Worker, peer: Worker, job_id: str) -> Source:
    ticket = Ticket(
        id=uuid4().hex,
        fetcher=worker.id,
        fetcher_key=worker.public_key,
        server=peer.id,
        job_id=job_id,
        expires_at=int(deps.clock.now()) + TICKET_S,
    )
    return Source(worker_id=peer.id, address=PeerAddress.model_validate(peer.peer), ticket=sign_ticket(deps.key, ticket))


async def _check_allowed(reader: Reader, worker: Worker, job_id: str) -> None:
    job, invite = await reader.get(Job, job_id), await reader.get(Invite, worker.invite_id)
    if job is None:
        words = f"job {job_id[:80]} does not exist"
        raise ProtocolRefusal(404, "unknown_job", words, field="job", fix="fetch what your next heartbeat names")
    allowed, words = may_serve(job, worker, invite.jobs if invite is not None else ())
    if not allowed or worker.state is WorkerState.QUARANTINED:
        words = words if not allowed else f"quarantined: {worker.reason}"
        raise ProtocolRefusal(403, "not_allowed", words, field="job", fix="serve the jobs that your heartbeats name")


async def _not_published(
    reader: Reader, job_id: str, version: int, digest: str, publication: Publication | None
) -> ProtocolRefusal:
    newest = await reader.highest(Publication, "version", job_id=job_id, state=PublicationState.PUBLISHED)
    state = "unknown" if publication is None else publication.state.value
    words = f"version {version} with digest {digest[:12]} is {state}; the newest version is {newest}"
    return ProtocolRefusal(404, "not_published", words, field="version", fix="fetch the version that your next heartbeat names")


class PieceRights:
    """Which pieces belong to a job, so that an invite to one job does not open another's weights. Manifests are parsed once."""

    def __init__(self) -> None:
        self._pieces: dict[tuple[str, int, str], frozenset[str]] = {}

    async def check(self, deps: Deps, worker: Worker, job_id: str, digest: str) -> None:
        """Raises ProtocolRefusal when the worker may not read that piece."""

        async def read(reader: Reader) -> bool:
            await _check_allowed(reader, worker, job_id)
            if any(key[0] == job_id and digest in pieces for key, pieces in self._pieces.items()):
                return True
            for publication in await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED):
                if digest in self._pieces_of(publication):
                    return True
            return False

        if not await deps.store.read(read):
            words = f"piece {digest[:80]} is in no published version of job {job_id[:80]}"
            raise ProtocolRefusal(404, "unknown_piece", words, field="digest", fix="fetch the manifest again; versions retire")
        deps.presence.goes_on_fetching(worker.id, at=deps.clock.now())

    def _pieces_of(self, publication: Publication) -> frozenset[str]:
        key = (publication.job_id, publication.version, publication.digest)
        known = self._pieces.get(key)
        if known is None:
            known = frozenset(piece.digest for piece in Manifest.from_json(publication.manifest).all_pieces())
            while len(self._pieces) >= PUBLICATIONS_CACHED:
                self._pieces.pop(next(iter(self._pieces)))
            self._pieces[key] = known
        return known
