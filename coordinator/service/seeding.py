"""Which edges the seeder offers to the swarm, and the word that gets them there.

Level-triggered: what the rows and the fetches of now ask for is compared with what is seeded. Batches of an edge that is still being encoded
go to the seeder directly (`Seeder.batch`), before there is a row; the next look finds them there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from coordinator.domain.model import EdgeRow, Job, JobState, Publication, PublicationState
from coordinator.domain.states import TERMINAL
from coordinator.service.deps import VERSIONS, Deps
from coordinator.service.ports import Reader
from coordinator.service.worker_presence import FETCH_PATIENCE_S
from coordinator.wire.messages import PeerAddress
from p2p.domain.batches import text_hash
from p2p.domain.batching import edge_batches
from p2p.domain.hops import Hop
from p2p.domain.signing import sign_batch

log = structlog.get_logger()
NEWEST = 2  # versions whose edges are always offered
LOOK_S = 2.0
REREAD_S = 60.0  # figures of rows may stay although the rows change
ABANDONED_S = 60.0  # between an encoding and its row, or its next try, lies less


class Seeder(Protocol):
    """The bulk node beside the coordinator."""

    @property
    def address(self) -> PeerAddress | None:
        """Where it listens; None while it does not run."""
        ...

    @property
    def uplink(self) -> float:
        """Its measured upload rate, bytes a second; 0 when not known."""
        ...

    def seeded(self) -> Mapping[str, bool]:
        """Transfers of which batches came, and whether the last one did."""
        ...

    def batch(self, text: str, signature: str) -> None:
        """The next batch of a transfer; its pieces are in the store."""
        ...

    def retire(self, transfer: str) -> None:
        """Offer it no more."""
        ...


@dataclass(frozen=True, slots=True)
class NoSeeder:
    """Where none runs: workers fetch over HTTPS."""

    address: None = None
    uplink: float = 0.0

    def seeded(self) -> Mapping[str, bool]:
        return {}

    def batch(self, text: str, signature: str) -> None:
        """Nobody takes it."""

    def retire(self, transfer: str) -> None:
        """Nothing is offered."""


async def keep_seeding(deps: Deps, seeder: Seeder) -> None:
    """Look at the rows now and then, and at once when a job changed."""
    documents = Documents()
    with deps.wake.watch("jobs") as watch, deps.wake.watch(VERSIONS) as published:
        while True:
            if published.take():
                documents.forget()
            try:
                await seed(deps, seeder, documents)
            except ConnectionError:
                raise  # the store has ended
            except Exception:
                log.exception("seeding_failed")
            await watch.wait(LOOK_S)


@dataclass(frozen=True, slots=True)
class Known:
    """An edge without its document, which is large."""

    job_id: str
    id: str
    version: int
    transfer: str | None  # that carries it; None: none does, or its batches cannot be told again


@dataclass(frozen=True, slots=True)
class _Reading:
    """The edges of a job, and the ids of those to its newest versions, as `figures` of its rows were."""

    figures: tuple[int | None, ...]
    at: float
    edges: tuple[Known, ...]
    newest: frozenset[str]


class Documents:
    """What was learned of edges and transfers in earlier looks: an edge's document is parsed once."""

    def __init__(self) -> None:
        self._readings: dict[str, _Reading] = {}  # by job
        self._transfers: dict[tuple[str, str], str | None] = {}
        self._unknown_since: dict[str, float] = {}

    def forget(self) -> None:
        """The rows changed: read them again."""
        self._readings.clear()

    async def of(self, reader: Reader, job_id: str, *, now: float) -> _Reading:
        """The job's edges. Their rows are read only if figures of them changed, or after REREAD_S."""
        figures = await _figures(reader, job_id)
        known = self._readings.get(job_id)
        if known is None or known.figures != figures or not 0 <= now - known.at < REREAD_S:
            rows = await reader.select(EdgeRow, job_id=job_id)
            await self._parse([row for row in rows if (job_id, row.id) not in self._transfers])
            edges = tuple(Known(job_id, row.id, row.version, self._transfers[job_id, row.id]) for row in rows)
            known = self._readings[job_id] = _Reading(figures, now, edges, await _newest(reader, job_id, rows))
        return known

    async def _parse(self, rows: Sequence[EdgeRow]) -> None:
        found = await asyncio.to_thread(lambda: [Hop.from_json(row.document).edge.transfer for row in rows])
        self._transfers |= {(row.job_id, row.id): transfer for row, transfer in zip(rows, found, strict=True)}

    def unfit(self, edge: Known) -> None:
        """The edge's batches cannot be told again: no transfer carries it."""
        self._transfers[edge.job_id, edge.id] = None
        self._readings.pop(edge.job_id, None)

    def keep(self, edges: Sequence[Known]) -> None:
        """Forget edges and jobs that are not among these."""
        keys, jobs = {(edge.job_id, edge.id) for edge in edges}, {edge.job_id for edge in edges}
        self._transfers = {key: transfer for key, transfer in self._transfers.items() if key in keys}
        self._readings = {job: known for job, known in self._readings.items() if job in jobs}

    def abandoned(self, unknown: Collection[str], *, now: float) -> list[str]:
        """Those of the transfers that nobody knew for ABANDONED_S: their edge is gone, or was never made whole."""
        self._unknown_since = {transfer: self._unknown_since.get(transfer, now) for transfer in unknown}
        return [transfer for transfer, since in self._unknown_since.items() if now - since >= ABANDONED_S]


async def seed(deps: Deps, seeder: Seeder, documents: Documents) -> None:
    """One look: offer what is wanted and not offered whole, retire what is offered and not wanted."""
    edges, wanted = await deps.store.read(lambda reader: _edges(reader, deps, documents))
    documents.keep(edges)
    named = {edge.transfer: edge for edge in edges if edge.transfer is not None}
    for transfer, edge in list(named.items()):
        if edge.id in wanted and not seeder.seeded().get(transfer) and not await _offer(deps, seeder, transfer, edge):
            log.warning("transfer_not_reproduced", job=edge.job_id, version=edge.version, transfer=transfer[:16])
            documents.unfit(edge)
    seeded = seeder.seeded()
    stale = [transfer for transfer in seeded if transfer in named and named[transfer].id not in wanted]
    unknown = [transfer for transfer in seeded if transfer not in named and not deps.transfers.is_open(transfer)]
    for transfer in [*stale, *documents.abandoned(unknown, now=deps.clock.now())]:
        seeder.retire(transfer)


async def _offer(deps: Deps, seeder: Seeder, transfer: str, edge: Known) -> bool:
    """Tell the edge's batches anew, as the encoder told them; False if they come out otherwise."""
    row = await deps.store.read(lambda reader: reader.get(EdgeRow, edge.job_id, edge.id))
    if row is None:
        return True  # gone meanwhile: the next look sees it
    told = await asyncio.to_thread(_batches, deps, row.document)
    if text_hash(told[0][0]) != transfer:
        return False
    for text, signature in told:
        seeder.batch(text, signature)
    return bool(seeder.seeded().get(transfer))


def _batches(deps: Deps, document: str) -> list[tuple[str, str]]:
    """Texts and signatures."""
    hop = Hop.from_json(document)
    texts = [batch.to_json() for batch in edge_batches(hop.job_id, hop.version, hop.edge)]
    return [(text, sign_batch(deps.key, text)) for text in texts]


async def _edges(reader: Reader, deps: Deps, documents: Documents) -> tuple[list[Known], set[str]]:
    """Edges of live jobs, and the ids of those to offer: to the newest versions, and those by which workers fetch now."""
    jobs = await reader.select(Job, state=[state for state in JobState if state not in TERMINAL[JobState]])
    edges: list[Known] = []
    wanted: set[str] = set()
    now = deps.clock.now()
    for job in jobs:
        known = await documents.of(reader, job.id, now=now)
        wanted |= known.newest | deps.presence.edges_in_use(job.id, since=now - FETCH_PATIENCE_S)
        edges += known.edges
    return edges, wanted


async def _figures(reader: Reader, job_id: str) -> tuple[int | None, ...]:
    """What changes when edges or public versions come and go, for a few aggregates."""
    public = PublicationState.PUBLISHED
    return (
        await reader.count(EdgeRow, job_id=job_id),
        await reader.total(EdgeRow, "nbytes", job_id=job_id),
        await reader.total(EdgeRow, "version", job_id=job_id),
        await reader.count(Publication, job_id=job_id, state=public),
        await reader.highest(Publication, "version", job_id=job_id, state=public),
    )


async def _newest(reader: Reader, job_id: str, rows: Sequence[EdgeRow]) -> frozenset[str]:
    """Ids of the edges that lead to the newest versions."""
    public = await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED, order_by="-version", limit=NEWEST)
    digests = {publication.digest for publication in public}
    return frozenset(row.id for row in rows if row.digest in digests and row.encoding != "raw")
