"""Manifests and pieces for workers: the way to a version, and which pieces a worker may read."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from coordinator.domain.model import EdgeRow, Invite, Job, Publication, PublicationState, Worker, WorkerState
from coordinator.service.deps import Deps
from coordinator.service.edges import path_for
from coordinator.service.forthcoming import topic
from coordinator.service.lowrank import first_version
from coordinator.service.piece_names import PieceNames, name_of
from coordinator.service.ports import Reader
from coordinator.service.transfers import Transfer
from coordinator.service.worker_places import may_serve
from coordinator.service.worker_refusals import ProtocolRefusal
from coordinator.wire.messages import BaseVersion, BatchesReply, ManifestReply, SignedBatch, SignedHop
from p2p.errors import ManifestError

BATCH_WAIT_S = 5.0
FRESH_S = 0.5
BATCHES_MOST = 64  # of one reply


@dataclass(frozen=True, slots=True)
class Wanted:
    """A version that a worker wants, the digests it holds whole, and what it doubts after a failure (edges' ids and digests)."""

    job_id: str
    version: int
    digest: str
    held: frozenset[str] = frozenset()
    doubted: frozenset[str] = frozenset()


class KnownEdges:
    """A job's edges, read at most every FRESH_S: a keyframe's row is large. One that came since is in the newest manifest itself."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[float, list[EdgeRow]]] = {}

    async def of(self, reader: Reader, job_id: str, *, now: float) -> list[EdgeRow]:
        """The edges, at most FRESH_S old."""
        read_at, rows = self._known.get(job_id, (-inf, []))
        if not 0 <= now - read_at < FRESH_S:
            rows = await reader.select(EdgeRow, job_id=job_id)
            self._known = {job: known for job, known in self._known.items() if now - known[0] < FRESH_S}
            self._known[job_id] = (now, rows)
        return rows


async def manifest(deps: Deps, known: KnownEdges, worker: Worker, wanted: Wanted) -> ManifestReply:
    """The signed manifest of a published version, and the cheapest path to it. Raises ProtocolRefusal."""
    job_id, version, digest = wanted.job_id, wanted.version, wanted.digest

    async def read(reader: Reader) -> tuple[Publication, list[EdgeRow], Publication | None]:
        job = await _check_allowed(reader, worker, job_id)
        publication = await reader.get(Publication, job_id, version, digest)
        if publication is None or publication.state is not PublicationState.PUBLISHED:
            raise await _not_published(reader, job_id, version, digest, publication)
        return publication, await known.of(reader, job_id, now=deps.clock.now()), await first_version(reader, job)

    publication, edges, first = await deps.store.read(read)
    route = _route(edges, wanted)
    deps.presence.fetches(worker.id, job_id, version, at=deps.clock.now(), edges=frozenset(row.id for row in route))
    hops = tuple(SignedHop(text=row.document, signature=row.signature) for row in route)
    base = None if first is None else BaseVersion(version=first.version, digest=first.digest)
    return ManifestReply(manifest=publication.manifest, signature=publication.signature, hops=hops, base=base)


def _route(edges: list[EdgeRow], wanted: Wanted) -> tuple[EdgeRow, ...]:
    """The cheapest path; none when no edge leads there from what the worker holds: then the manifest's own have to do."""
    try:
        return path_for(edges, wanted.digest, held=wanted.held, doubted=wanted.doubted)
    except ManifestError:
        return ()


async def _check_allowed(reader: Reader, worker: Worker, job_id: str) -> Job:
    job, invite = await reader.get(Job, job_id), await reader.get(Invite, worker.invite_id)
    if job is None:
        words = f"job {job_id[:80]} does not exist"
        raise ProtocolRefusal(404, "unknown_job", words, field="job", fix="fetch what your next heartbeat names")
    allowed, words = may_serve(job, worker, invite.jobs if invite is not None else ())
    if not allowed or worker.state is WorkerState.QUARANTINED:
        words = words if not allowed else f"quarantined: {worker.reason}"
        raise ProtocolRefusal(403, "not_allowed", words, field="job", fix="serve the jobs that your heartbeats name")
    return job


async def _not_published(
    reader: Reader, job_id: str, version: int, digest: str, publication: Publication | None
) -> ProtocolRefusal:
    newest = await reader.highest(Publication, "version", job_id=job_id, state=PublicationState.PUBLISHED)
    state = "unknown" if publication is None else publication.state.value
    words = f"version {version} with digest {digest[:12]} is {state}; the newest version is {newest}"
    return ProtocolRefusal(404, "not_published", words, field="version", fix="fetch the version that your next heartbeat names")


async def batches(deps: Deps, worker: Worker, job_id: str, transfer: str, *, since: int) -> BatchesReply:
    """Batches of an edge that is being encoded, from number `since` on; waits a little for the next one. Raises ProtocolRefusal."""
    await deps.store.read(lambda reader: _check_allowed(reader, worker, job_id))
    with deps.wake.watch(topic(transfer)) as watch:
        found = _open_transfer(deps, job_id, transfer)
        if len(found.documents) <= since and not found.is_complete:
            await watch.wait(BATCH_WAIT_S)
    found = _open_transfer(deps, job_id, transfer)
    told = found.documents[since : since + BATCHES_MOST]
    return BatchesReply(batches=tuple(SignedBatch(text=text, signature=signature) for text, signature in told))


def _open_transfer(deps: Deps, job_id: str, transfer: str) -> Transfer:
    found = deps.transfers.get(job_id, transfer)
    if found is None:
        words = f"transfer {transfer[:12]} is not under way"
        raise ProtocolRefusal(404, "unknown_transfer", words, field="transfer", fix="fetch the version when it is announced")
    return found


class PieceRights:
    """Which pieces belong to a job, so that an invite to one job does not open another's weights."""

    def __init__(self, known: KnownEdges) -> None:
        self._known = known
        self._names = PieceNames[tuple[str, str]]()  # by job, and digest of a version or id of an edge

    async def check(self, deps: Deps, worker: Worker, job_id: str, digest: str) -> None:
        """Raises ProtocolRefusal when the worker may not read that piece."""
        name = name_of(digest)

        async def read(reader: Reader) -> bool:
            await _check_allowed(reader, worker, job_id)
            if deps.transfers.names(job_id, digest):
                return True
            if any(key[0] == job_id and name in pieces for key, pieces in self._names.items()):
                return True
            for publication in await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED):
                if name in self._names.of((job_id, publication.digest), publication.manifest):
                    return True
            for row in await self._known.of(reader, job_id, now=deps.clock.now()):
                if name in self._names.of((job_id, row.id), row.document):
                    return True
            return False

        if not await deps.store.read(read):
            words = f"piece {digest[:80]} is in no published version of job {job_id[:80]}"
            raise ProtocolRefusal(404, "unknown_piece", words, field="digest", fix="fetch the manifest again; versions retire")
        deps.presence.goes_on_fetching(worker.id, at=deps.clock.now())
