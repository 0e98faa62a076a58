"""Jobs with adapters: which versions get low-rank edges, which edge is announced, and that the first version stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from coordinator.domain.model import EdgeRow, Job, Publication, PublicationState
from coordinator.service import lowrank
from coordinator.service.deps import Deps
from coordinator.service.edges import GONE, extend, is_there
from coordinator.service.job_ports import BaseSnapshot, SignedHop, SignedManifest
from coordinator.service.publishing import announce, remove_directories, retire
from coordinator.service.tidying import tidy, tidy_job
from coordinator.wire.job import LoraConfig
from p2p.domain.hops import hops_of
from p2p.domain.lineage import DELTA, LOWRANK
from p2p.domain.manifest import Edge, FileEntry, Manifest, Piece, Tensor
from tests.integration.driving.pretend import SHARED
from tests.integration.driving.test_replaced_versions import Pieces, named, public, running, shot

ADAPTERS = LoraConfig(rank=1, alpha=2, targets=("q_proj",))
TARGET = Tensor("a.q_proj.weight", "BF16", (64, 96), 12288)  # raw factors: 320 bytes
Ends = tuple[str, int | None, int]


class Adapted(Pieces):
    """A delta of so many bytes, a low-rank edge of 250 unless the adapters are refused."""

    def __init__(self, *, delta_bytes: int, tensor: Tensor = TARGET) -> None:
        super().__init__()
        self.delta_bytes = delta_bytes
        self.refuses = False
        self._tensor = tensor

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        digest = blake3((directory / "weights").read_bytes()).hexdigest()
        edges = self._edges(digest, [] if base is None else [base]) or (self._keyframe(digest),)
        files = (FileEntry("config.json", (Piece(SHARED, 2),)),)
        manifest = Manifest(job_id, version, digest, (self._tensor,), {}, files, tuple(canary_ids), edges)
        self.stored |= named([manifest.to_json()])
        hops = tuple(SignedHop(hop.to_json(), "00") for hop in hops_of(manifest))
        return SignedManifest(manifest.to_json(), "00", digest, 0.0, 0.0, hops, self._tensor.nbytes)

    def _edges(self, digest: str, bases: Sequence[BaseSnapshot]) -> tuple[Edge, ...]:
        return tuple(self._delta(digest, base) for base in bases)

    def _delta(self, digest: str, base: BaseSnapshot) -> Edge:
        if base.encoding == LOWRANK and self.refuses and base.instead is not None:
            base = base.instead
        if base.encoding == DELTA:
            return super()._delta(digest, base)
        piece = Piece(blake3(f"factors of {digest}".encode()).hexdigest(), 250)
        return Edge(LOWRANK, base.version, base.digest, (piece,))


async def adapted(deps: Deps) -> Job:
    """A running job with adapters."""
    job = await running(deps)
    job = replace(job, config=job.config.model_copy(update={"lora": ADAPTERS}))
    await deps.store.write(lambda tx: tx.put(job))
    return job


async def line(deps: Deps, pieces: Pieces, job: Job, versions: range) -> None:
    """Each announced, given its other edges, and followed by a round of retiring, as the announcer does."""
    for version in versions:
        await announce(deps, pieces, job, shot(deps, version, f"w{version}"), (1, 2))
        await lowrank.extend(deps, pieces, job, version)
        await extend(deps, pieces, job, version)
        await retire(deps, pieces, job)


async def edges(deps: Deps) -> set[Ends]:
    rows = await deps.store.read(lambda r: r.select(EdgeRow, job_id="j1"))
    return {(row.encoding, row.base_version, row.version) for row in rows}


async def first_edge(deps: Deps, version: int) -> str:
    (row,) = await public(deps, job_id="j1", version=version, state=PublicationState.PUBLISHED)
    return Manifest.from_json(row.manifest).edges[0].encoding


async def test_small_deltas_go_first_and_the_low_rank_edge_follows_once_it_is_shorter(deps: Deps) -> None:
    """Deltas of 100: the raw factors, 320, are less than the chain from version 4 on; then the real 250 are, each time."""
    pieces, job = Adapted(delta_bytes=100), await adapted(deps)
    await line(deps, pieces, job, range(4))
    assert await edges(deps) == {("planes", None, 0), *((DELTA, n, n + 1) for n in range(3))}
    await line(deps, pieces, job, range(4, 7))
    assert {ends for ends in await edges(deps) if ends[0] == LOWRANK} == {(LOWRANK, 0, 5), (LOWRANK, 0, 6)}, "the newest two"
    assert {(DELTA, n, n + 1) for n in range(6)} < await edges(deps)
    assert await first_edge(deps, 6) == DELTA


async def test_where_deltas_are_dearer_versions_are_announced_by_their_adapters(deps: Deps) -> None:
    """Version 1 cannot know; from version 2 on the delta follows, for workers that did not keep version 0."""
    pieces, job = Adapted(delta_bytes=800), await adapted(deps)
    await line(deps, pieces, job, range(2))
    assert await first_edge(deps, 1) == DELTA
    assert (LOWRANK, 0, 1) in await edges(deps)
    await line(deps, pieces, job, range(2, 5))
    assert [await first_edge(deps, version) for version in (3, 4)] == [LOWRANK, LOWRANK]
    assert {(DELTA, n, n + 1) for n in range(4)} | {(LOWRANK, 0, 4), ("planes", None, 0)} <= await edges(deps)
    assert ("planes", None, 4) not in await edges(deps), "no new base, however dear deltas are"


async def test_adapters_that_do_not_make_the_version_cost_one_delta(deps: Deps) -> None:
    """The publisher makes what stands in for the low-rank edge; nothing is lacking then."""
    pieces, job = Adapted(delta_bytes=800), await adapted(deps)
    await line(deps, pieces, job, range(2))
    pieces.refuses = True
    await announce(deps, pieces, job, shot(deps, 2, "w2"), (1, 2))
    assert await first_edge(deps, 2) == DELTA
    assert (DELTA, 1, 2) in await edges(deps)


async def test_the_first_version_stays_public_with_its_bits(deps: Deps) -> None:
    """Whoever comes late begins there; tidying after a restart leaves it, too."""
    pieces, job = Adapted(delta_bytes=100), await adapted(deps)
    await line(deps, pieces, job, range(7))
    for _ in range(2):
        states = {p.version: p.state for p in await public(deps)}
        assert [v for v, state in states.items() if state is PublicationState.PUBLISHED] == [0, 5, 6]
        (first,) = await public(deps, version=0)
        assert first.manifest
        assert is_there(first)
        assert pieces.stored >= named([first.manifest])
        await tidy_job(deps, job)
        await tidy(deps, pieces)


async def test_a_first_version_that_is_gone_or_cannot_carry_factors_gives_none(deps: Deps) -> None:
    pieces, job = Adapted(delta_bytes=800), await adapted(deps)
    await line(deps, pieces, job, range(2))
    (first,) = await public(deps, version=0)
    await remove_directories([first.directory])
    await line(deps, pieces, job, range(2, 4))
    assert {ends for ends in await edges(deps) if ends[0] == LOWRANK} <= {(LOWRANK, 0, 1)}


@pytest.mark.parametrize(
    "tensor", [Tensor("a.q_proj.weight", "BF16", (1, 96), 192), Tensor("a.k_proj.weight", "BF16", (64, 96), 12288)]
)
async def test_tensors_that_can_carry_none_get_none(deps: Deps, tensor: Tensor) -> None:
    pieces, job = Adapted(delta_bytes=800, tensor=tensor), await adapted(deps)
    await line(deps, pieces, job, range(3))
    assert not any(encoding == LOWRANK for encoding, _, _ in await edges(deps))


async def test_an_older_version_of_a_replay_gets_no_edge(deps: Deps) -> None:
    pieces, job = Adapted(delta_bytes=800), await adapted(deps)
    await line(deps, pieces, job, range(3))
    before = await edges(deps)
    await lowrank.extend(deps, pieces, job, 1)
    assert await edges(deps) == before


async def test_a_job_that_trains_all_weights_is_as_ever(deps: Deps) -> None:
    pieces, job = Adapted(delta_bytes=100), await running(deps)
    await line(deps, pieces, job, range(6))
    assert not any(encoding == LOWRANK for encoding, _, _ in await edges(deps))
    assert await deps.store.read(lambda r: lowrank.first_version(r, job)) is None
    retired: Sequence[Publication] = await public(deps, version=0)
    assert [(row.state, row.directory == GONE) for row in retired] == [(PublicationState.RETIRED, False)]
