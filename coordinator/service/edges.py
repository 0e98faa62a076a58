"""The lineage of a job in rows: which edges a publication gets, which are kept, and the cheapest path for one worker.

The rules are `p2p.domain.lineage`. Level-triggered: what is due and what may go is read off the rows after each publication.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import structlog

from coordinator.domain.model import EdgeRow, Holding, Job, Publication, PublicationState, Worker, WorkerState
from coordinator.service import forthcoming
from coordinator.service.deps import Deps
from coordinator.service.job_ports import BaseSnapshot, Publisher, PublishFailed, PublishInterrupted, SignedHop
from coordinator.service.ports import Reader, Tx
from coordinator.service.recording import record_event, record_metrics
from p2p.domain import lineage
from p2p.domain.hops import Hop
from p2p.domain.lineage import Way
from p2p.domain.manifest import Manifest
from p2p.errors import ManifestError

log = structlog.get_logger()
GONE = ""  # the directory of a publication whose directory was removed
KNOWN = (PublicationState.PUBLISHED, PublicationState.RETIRED)  # not rolled back
ROUNDS = 2  # a cumulative edge that turns out too large asks for a new base in the second one


@dataclass(frozen=True, slots=True)
class Lineage:
    """A job's publications that can matter, oldest first, and its edges.

    Those matter that are public, that an edge begins at or leads to, or whose directory was not removed: few, however many retired.
    """

    publications: tuple[Publication, ...]
    edges: tuple[EdgeRow, ...]
    order: tuple[str, ...]  # digests of all publications that were not rolled back, by version; empty texts for those not read

    @property
    def ways(self) -> tuple[Way, ...]:
        """The edges as planning sees them."""
        return tuple(way_of(row) for row in self.edges)


async def read_lineage(reader: Reader, job_id: str) -> Lineage:
    """The rows of now."""
    edges = await reader.select(EdgeRow, job_id=job_id)
    ends = {row.version for row in edges} | {row.base_version for row in edges if row.base_version is not None}
    retired = PublicationState.RETIRED
    found = await reader.select(Publication, job_id=job_id, state=PublicationState.PUBLISHED)
    found += await reader.select(Publication, job_id=job_id, state=retired, directory__gt=GONE)
    found += await reader.select(Publication, job_id=job_id, state=retired, directory=GONE, version=sorted(ends))
    publications = sorted(found, key=lambda publication: (publication.version, publication.digest))
    order = [""] * await reader.count(Publication, job_id=job_id, state=KNOWN)
    for place, publication in zip(await _places(reader, publications, len(order)), publications, strict=True):
        order[place] = publication.digest
    return Lineage(tuple(publications), tuple(edges), tuple(order))


async def _places(reader: Reader, rows: Sequence[Publication], count: int) -> list[int]:
    """Where each of the rows stands among all `count` that were not rolled back. Rows without one between them need no look."""
    places = [-1, *(0 for _ in rows), count]  # as if one stood before the first, and one after the last
    spans = [(0, len(rows) + 1)]
    while spans:
        first, last = spans.pop()
        if places[last] - places[first] == last - first:
            places[first:last] = range(places[first], places[last])
        elif last - first > 1:
            middle = (first + last) // 2
            row = rows[middle - 1]
            places[middle] = await reader.count(Publication, job_id=row.job_id, state=KNOWN, version__lt=row.version)
            spans += [(first, middle), (middle, last)]
    return places[1:-1]


def is_there(publication: Publication) -> bool:
    """Whether its bits are on disk. Blocks."""
    return publication.directory != GONE and Path(publication.directory).is_dir()


def way_of(row: EdgeRow) -> Way:
    """The row as planning sees it."""
    return Way(row.id, row.digest, row.version, row.encoding, row.base_digest, row.base_version, row.nbytes)


def edge_row(signed: SignedHop) -> EdgeRow:
    """The row of a hop."""
    hop = Hop.from_json(signed.text)
    way = hop.way
    return EdgeRow(
        job_id=hop.job_id,
        id=way.id,
        digest=way.digest,
        version=way.version,
        encoding=way.encoding,
        base_version=way.base_version,
        base_digest=way.base_digest,
        nbytes=way.nbytes,
        document=signed.text,
        signature=signed.signature,
    )


async def base_for(reader: Reader, job_id: str, version: int, *, link: float) -> BaseSnapshot | None:
    """What to encode a version against: the publication before it whose bits are still on disk. `link`: bytes a second."""
    known = await read_lineage(reader, job_id)
    older = [publication for publication in reversed(known.publications) if publication.version < version]
    base = await asyncio.to_thread(lambda: next(filter(is_there, older), None))
    return None if base is None else _base(base, known, link)


async def held_rivals(reader: Reader, job_id: str, version: int, digest: str, *, link: float) -> list[BaseSnapshot]:
    """Versions of that number with other bits that some worker holds, which are about to be replaced by `digest`. `link`: bytes a second."""
    rivals = await reader.select(Publication, job_id=job_id, version=version, state=KNOWN)
    held = [one for one in rivals if one.digest != digest and await reader.count(Holding, job_id=job_id, digest=one.digest)]
    if not held:
        return []
    known = await read_lineage(reader, job_id)
    return [_base(one, known, link) for one in await asyncio.to_thread(lambda: list(filter(is_there, held)))]


async def extend(deps: Deps, publisher: Publisher, job: Job, version: int) -> None:
    """Give `version`, just announced, the edges that the lineage wants the newest publication to have.

    An older one, as a replay announces on its way, gets none. An edge that cannot be made is left out, and logged.
    """
    for _ in range(ROUNDS):
        async with deps.pieces:
            if not await _extend_once(deps, publisher, job, version):
                return


def newest_public(known: Lineage, version: int) -> Publication | None:
    """The newest publication, if it is that of `version` and still public."""
    newest = known.publications[-1] if known.publications else None
    if newest is None or newest.version != version or newest.state is not PublicationState.PUBLISHED:
        return None
    return newest


async def _extend_once(deps: Deps, publisher: Publisher, job: Job, version: int) -> bool:
    """Whether edges were made."""
    known = await deps.store.read(lambda r: read_lineage(r, job.id))
    newest = newest_public(known, version)
    if newest is None:
        return False
    due = lineage.due(known.order, known.ways, parameters=_parameters(newest))
    link = deps.presence.median_uplink()
    wanted = [publication for publication in known.publications if publication.digest in due.bases]
    bases = await asyncio.to_thread(lambda: [base for one in wanted if (base := _base_or_path(one, known, link)) is not None])
    if not bases and not due.keyframe:
        return False
    return await add_edges(deps, publisher, newest, bases=bases, keyframe=due.keyframe)


async def add_edges(
    deps: Deps, publisher: Publisher, newest: Publication, *, bases: Sequence[BaseSnapshot], keyframe: bool = False
) -> bool:
    """Make edges to the newest version and save their rows; whether there are any. One that cannot be made is left out, and logged."""
    try:
        hops = await publisher.add_edges(Path(newest.directory), manifest=newest.manifest, bases=bases, keyframe=keyframe)
    except (PublishFailed, PublishInterrupted) as error:
        log.warning("edges_not_made", job=newest.job_id, version=newest.version, reason=str(error))
        return False
    finally:
        forthcoming.close(deps, newest.job_id)
    rows = [edge_row(hop) for hop in hops]
    left_out = {base.digest for base in bases} - {row.base_digest for row in rows}
    if left_out:
        words = "their bits are not what they should be, or cannot be made again"
        log.warning("edges_left_out", job=newest.job_id, version=newest.version, bases=sorted(left_out), reason=words)
    deps.reach("publish.edges_written")
    await deps.store.write(lambda tx: _save_edges(tx, newest, rows, now=deps.clock.now()))
    return bool(rows)


async def _save_edges(tx: Tx, newest: Publication, rows: Sequence[EdgeRow], *, now: float) -> None:
    row = await tx.get(Publication, newest.job_id, newest.version, newest.digest)
    if row is None or row.state is PublicationState.ROLLED_BACK or not rows:
        return
    await tx.put(*rows)
    if any(one.base_digest is None for one in rows):
        await record_event(tx, newest.job_id, "base_declared", {"version": newest.version, "digest": newest.digest}, now=now)
    await record_metrics(
        tx, newest.job_id, newest.version, {"publish/bytes_more_edges": float(sum(one.nbytes for one in rows))}, now=now
    )


async def drop_unneeded(tx: Tx, job_id: str, *, in_use: frozenset[str]) -> list[EdgeRow]:
    """Delete the edges that no path needs: neither the newest of their kind, nor on the way of a live worker. The deleted ones."""
    known = await read_lineage(tx, job_id)
    holdings = await tx.select(Holding, job_id=job_id)
    ids = sorted({holding.worker_id for holding in holdings})
    gone = {worker.id for worker in await tx.select(Worker, id=ids, state=WorkerState.GONE)} if ids else set()
    held = frozenset(holding.digest for holding in holdings if holding.worker_id not in gone)
    kept = lineage.retained(known.order, known.ways, held=held, in_use=in_use)
    doomed = [row for row in known.edges if row.id not in kept]
    for row in doomed:
        await tx.delete(EdgeRow, job_id=job_id, id=row.id)
    return doomed


def needed_directories(known: Lineage) -> frozenset[str]:
    """Directories whose bits edges to come are made against."""
    digests = lineage.anchors(known.order, known.ways)
    return frozenset(p.directory for p in known.publications if p.digest in digests and p.directory != GONE)


def path_for(known: Sequence[EdgeRow], target: str, *, held: frozenset[str], doubted: frozenset[str]) -> tuple[EdgeRow, ...]:
    """The edges by which a worker comes to `target` for the fewest bytes. Raises ManifestError if none do."""
    rows = {row.id: row for row in known}
    route = lineage.path([way_of(row) for row in known], target, held=held, doubted=doubted)
    return tuple(rows[way.id] for way in route)


def _base_or_path(publication: Publication, known: Lineage, link: float) -> BaseSnapshot | None:
    """With its directory, or with the edges by which its bits can be made again; None where neither is left. Blocks."""
    base = _base(publication, known, link)
    if is_there(publication):
        return base
    try:
        route = path_for(known.edges, publication.digest, held=frozenset(), doubted=frozenset())
    except ManifestError:
        return None
    return replace(base, path=tuple(row.document for row in route))


def _parameters(publication: Publication) -> int:
    return Manifest.from_json(publication.manifest).elements


def _base(publication: Publication, known: Lineage, link: float) -> BaseSnapshot:
    """With what its delta may take: about what the newest delta did."""
    deltas = [row for row in known.edges if row.encoding == lineage.DELTA]
    expected = max(deltas, key=lambda row: row.version).nbytes if deltas else 0
    return BaseSnapshot(publication.version, publication.digest, publication.directory, expected, link)
