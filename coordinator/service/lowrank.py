"""Low-rank edges of jobs with adapters: which edge a version is announced with, and which one follows (`p2p.domain.lowrank`).

They begin at the job's first version, which therefore stays public, whoever serves it: its bits, its manifest and its keyframe.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

from coordinator.domain.model import Job, Publication, PublicationState
from coordinator.service import edges
from coordinator.service.deps import Deps
from coordinator.service.edges import Lineage, read_lineage
from coordinator.service.job_ports import BaseSnapshot, Publisher
from coordinator.service.ports import Reader
from p2p.domain import lowrank as rules
from p2p.domain.lineage import LOWRANK
from p2p.domain.lowrank import Adapters
from p2p.domain.manifest import Manifest

FIRST = 0  # the version that adapters are added to: they are zero there


def adapters_of(job: Job) -> Adapters | None:
    """What the job's adapters are; None where all weights learn."""
    lora = job.config.lora
    return None if lora is None else Adapters(lora.rank, lora.targets)


def kept_versions(job: Job) -> frozenset[int]:
    """Versions that never retire while the job lives."""
    return frozenset() if adapters_of(job) is None else frozenset({FIRST})


async def first_version(reader: Reader, job: Job) -> Publication | None:
    """The version that the job's low-rank edges begin at; None without adapters, or before it is public."""
    if adapters_of(job) is None:
        return None
    found = await reader.select(Publication, job_id=job.id, version=FIRST, state=PublicationState.PUBLISHED)
    return found[0] if found else None


async def base_for(reader: Reader, job: Job, version: int, *, link: float) -> BaseSnapshot | None:
    """What to encode a version against before it is announced: the first one where that costs fewer bytes than the one before."""
    single = await edges.base_for(reader, job.id, version, link=link)
    known = await read_lineage(reader, job.id)
    lowrank = await _lowrank_base(known, job, await first_version(reader, job), link)
    if single is None or lowrank is None or not rules.goes_first(known.order, known.ways, nbytes=lowrank.expected_bytes):
        return single
    return replace(lowrank, instead=single)


async def extend(deps: Deps, publisher: Publisher, job: Job, version: int) -> None:
    """Give `version`, just announced, its low-rank edge where that is worth it, or the delta that the low-rank edge went before."""
    if adapters_of(job) is None:
        return
    async with deps.pieces:
        known = await deps.store.read(lambda r: read_lineage(r, job.id))
        newest = edges.newest_public(known, version)
        if newest is None:
            return
        link = deps.presence.median_uplink()
        first = await deps.store.read(lambda r: first_version(r, job))
        lowrank = await _lowrank_base(known, job, first, link)
        bases: list[BaseSnapshot] = []
        if lowrank is not None and rules.is_due(known.order, known.ways, base=lowrank.digest, nbytes=lowrank.expected_bytes):
            bases.append(lowrank)
        if rules.lacks_single(known.order, known.ways):
            single = await deps.store.read(lambda r: edges.base_for(r, job.id, version, link=link))
            bases += [] if single is None else [single]
        if bases:
            await edges.add_edges(deps, publisher, newest, bases=bases)


async def _lowrank_base(known: Lineage, job: Job, first: Publication | None, link: float) -> BaseSnapshot | None:
    """The first version, if its bits are on disk and an edge can carry the adapters, with what one may take."""
    adapters = adapters_of(job)
    if adapters is None or first is None or not await asyncio.to_thread(edges.is_there, first):
        return None
    most = rules.factor_bytes((await asyncio.to_thread(Manifest.from_json, first.manifest)).tensors, adapters)
    if most is None:
        return None
    expected = rules.expected_bytes(known.ways, most=most)
    return BaseSnapshot(first.version, first.digest, first.directory, expected, link, LOWRANK)
