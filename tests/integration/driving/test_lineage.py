"""The lineage in rows: which edges publications get, what stays when they retire, and what a roll-back takes along."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

from coordinator.domain.model import EdgeRow, Event, Holding, Job, JobState, Publication, PublicationState
from coordinator.service.deps import Deps
from coordinator.service.edges import extend, is_there, needed_directories, read_lineage
from coordinator.service.job_ports import PublishFailed
from coordinator.service.publishing import _forget_directories, announce, remove_directories, retire
from coordinator.service.tidying import PIECES_KEPT_S, tidy, tidy_job
from coordinator.service.worker_presence import UPLINK_GUESS, Heard
from tests.integration.driving.counting import CountingStore
from tests.integration.driving.test_replaced_versions import Pieces, named, public, running, shot


async def edges(deps: Deps) -> dict[tuple[int | None, int], EdgeRow]:
    return {(row.base_version, row.version): row for row in await deps.store.read(lambda r: r.select(EdgeRow, job_id="j1"))}


async def line(deps: Deps, pieces: Pieces, last: int, *, first: int = 0) -> Job:
    """Versions `first` to `last`, each announced, extended and followed by a round of retiring, as the announcer does."""
    job = await running(deps) if first == 0 else await deps.store.read(lambda r: r.get(Job, "j1"))
    assert job is not None
    for version in range(first, last + 1):
        await announce(deps, pieces, job, shot(deps, version, f"w{version}"), (1, 2))
        await extend(deps, pieces, job, version)
        await retire(deps, pieces, job)
    return job


async def test_singles_eights_and_the_keyframe_of_the_base(deps: Deps) -> None:
    pieces = Pieces()
    await line(deps, pieces, 17)
    made = await edges(deps)
    assert set(made) == {(None, 0), *((n, n + 1) for n in range(17)), (0, 8), (8, 16)}
    assert pieces.stored == named([row.document for row in made.values()]) | named([(await public(deps))[-1].manifest])
    states = {p.version: p.state for p in await public(deps)}
    assert [v for v, state in states.items() if state is PublicationState.PUBLISHED] == [16, 17]
    left = {p.version for p in await public(deps) if is_there(p)}
    assert left == {0, 16, 17}, "the base, the last eighth one, and the public ones"
    assert all(not p.manifest for p in await public(deps, state=PublicationState.RETIRED))


async def test_a_restart_finds_the_lineage_and_keeps_it(deps: Deps) -> None:
    """Tidying at a start removes no directory and no piece that the lineage needs."""
    pieces = Pieces()
    job = await line(deps, pieces, 10)
    before = (set(pieces.stored), await edges(deps))
    await tidy_job(deps, job)
    await tidy(deps, pieces)
    assert (pieces.stored, await edges(deps)) == before
    assert {p.version for p in await public(deps) if is_there(p)} == {0, 8, 9, 10}
    await line(deps, pieces, 16, first=11)
    assert (8, 16) in await edges(deps)


async def test_an_ended_jobs_edges_go_with_its_pieces(deps: Deps) -> None:
    """An hour after the end; a worker that still fetches finds both until then."""
    pieces = Pieces()
    job = await line(deps, pieces, 3)
    for age, left in ((PIECES_KEPT_S - 60, 4), (PIECES_KEPT_S + 60, 0)):
        ended = replace(job, state=JobState.COMPLETED, state_since=deps.clock.now() - age)
        await deps.store.write(lambda tx, ended=ended: tx.put(ended))  # type: ignore[misc]
        await tidy(deps, pieces)
        assert len(await edges(deps)) == left
        assert bool(pieces.stored) == bool(left)
    assert (await public(deps))[-1].manifest, "what was published stays known"


async def test_a_rolled_back_digest_takes_its_edges_along(deps: Deps) -> None:
    """Both from it and to it; the newest version stays reachable, by a keyframe if nothing else leads there."""
    pieces = Pieces()
    job = await line(deps, pieces, 4)
    await announce(deps, pieces, job, shot(deps, 3, "other"), (1, 2))
    made = await edges(deps)
    other = next(p for p in await public(deps, version=3) if p.state is PublicationState.PUBLISHED)
    assert made[0, 3].digest == other.digest, "made against the base: the bits of version 2 are not on disk any more"
    assert (2, 3) not in made
    assert (3, 4) not in made
    await extend(deps, pieces, job, 3)
    assert (None, 4) not in await edges(deps), "a replay is on its way to version 4"
    await extend(deps, pieces, job, 4)
    assert (None, 4) in await edges(deps)
    lost = next(p for p in await public(deps, version=3) if p.state is PublicationState.ROLLED_BACK)
    assert lost.digest not in {row.base_digest for row in (await edges(deps)).values()}


async def test_a_missing_base_means_a_keyframe(deps: Deps) -> None:
    """All older directories are lost: the next version is whole by itself."""
    pieces = Pieces()
    job = await line(deps, pieces, 2)
    for publication in await public(deps):
        shutil.rmtree(publication.directory, ignore_errors=True)
    await announce(deps, pieces, job, shot(deps, 3, "w3"), (1, 2))
    assert (None, 3) in await edges(deps)


async def test_dear_deltas_declare_a_new_base(deps: Deps) -> None:
    """Keyframes cost 900: after the third delta of 400 bytes, joiners begin at version 3."""
    pieces = Pieces()
    pieces.delta_bytes = 400
    await line(deps, pieces, 5)
    assert {version for base, version in await edges(deps) if base is None} == {3}, "and the older keyframe goes"
    events = await deps.store.read(lambda r: r.select(Event, job_id="j1", kind="base_declared"))
    assert [event.data["version"] for event in events] == [3]


async def test_edges_on_a_live_workers_path_stay(deps: Deps) -> None:
    """A worker away since version 1 keeps the single that no window keeps; gone, it keeps nothing."""
    pieces = Pieces()
    job = await line(deps, pieces, 1)
    digest = (await public(deps, version=1))[0].digest
    await deps.store.write(lambda tx: tx.put(Holding("w", "j1", 1, digest, (), 0.0)))
    await line(deps, pieces, 72, first=2)
    assert (1, 2) in await edges(deps)
    await deps.store.write(lambda tx: tx.delete(Holding, worker_id="w", job_id="j1", version=1, digest=digest))
    await retire(deps, pieces, job)
    assert (1, 2) not in await edges(deps)
    left = {ends for ends in await edges(deps) if ends[0] is not None and ends[1] - ends[0] > 1}
    assert left == {(0, 64), *((n - 8, n) for n in range(16, 73, 8))}, "the cumulative edge, and eight over eight"


async def test_an_edge_that_cannot_be_made_is_left_out(deps: Deps) -> None:
    class Broken(Pieces):
        async def add_edges(self, *_args, **_named):
            raise PublishFailed("the encoder does not like it")

    job = await line(deps, Broken(), 8)
    assert (0, 8) not in await edges(deps)
    await extend(deps, Pieces(), job, 8)
    assert (0, 8) in await edges(deps), "the next look makes it"
    assert await deps.store.read(lambda r: r.count(Publication, job_id="j1")) == 9


async def test_the_cost_of_retiring_does_not_grow_with_the_versions_that_retired(deps: Deps) -> None:
    """300 retired versions that no edge names and whose directories are gone: none of them is read, and planning counts them all the same."""
    pieces = Pieces()
    job = await line(deps, pieces, 17)
    few = await rows_read(deps, pieces, job, 18)
    edges_before = await edges(deps)
    old = [
        Publication("j1", version - 300, f"{version:064x}", PublicationState.RETIRED, "", "", "", (), 0.0) for version in range(300)
    ]
    await deps.store.write(lambda tx: tx.put(*old))
    known = await deps.store.read(lambda r: read_lineage(r, "j1"))
    assert len(known.order) == 300 + 19
    digests = {publication.version: publication.digest for publication in known.publications}
    assert all(known.order[300 + version] == digest for version, digest in digests.items())
    assert not any(known.order[:300])
    many = await rows_read(deps, pieces, job, 19)
    assert many.rows[Publication] <= few.rows[Publication] + 10, "one more version in a few looks"
    assert many.statements <= few.statements + 24, "where the gap lies is found by halving"
    assert edges_before.keys() <= (await edges(deps)).keys()


async def rows_read(deps: Deps, pieces: Pieces, job: Job, version: int) -> CountingStore:
    """Announce, extend and retire; what that read."""
    counting = CountingStore(deps.store)
    counted = replace(deps, store=counting)
    await announce(counted, pieces, job, shot(deps, version, f"w{version}"), (1, 2))
    await extend(counted, pieces, job, version)
    await retire(counted, pieces, job)
    return counting


async def test_places_are_found_across_gaps(deps: Deps) -> None:
    """Versions that are not read stand before, between and after those that are."""
    await running(deps)
    read = {3, 4, 5, 40, 41, 77, 90}
    rows = [
        Publication("j1", 2 * n, f"{n:064x}", PublicationState.RETIRED, "", "", "there" if n in read else "", (), 0.0)
        for n in range(100)
    ]
    lost = Publication("j1", 7, "f" * 64, PublicationState.ROLLED_BACK, "", "", "there", (), 0.0)
    await deps.store.write(lambda tx: tx.put(*rows, lost))
    known = await deps.store.read(lambda r: read_lineage(r, "j1"))
    assert {place for place, digest in enumerate(known.order) if digest} == read
    assert all(known.order[n] == f"{n:064x}" for n in read)
    assert len(known.order) == 100


async def test_a_removed_directory_is_forgotten_and_nothing_takes_it_for_here(deps: Deps) -> None:
    """The row says that it is gone; an empty name never means the place where the coordinator runs."""
    pieces = Pieces()
    await line(deps, pieces, 5)
    rows = {p.version: p for p in await public(deps)}
    assert {version for version, row in rows.items() if row.directory} == {0, 4, 5}
    assert not is_there(rows[2])
    await remove_directories(["", ""])
    assert Path().is_dir()
    needed = needed_directories(await deps.store.read(lambda r: read_lineage(r, "j1")))
    assert "" not in needed


async def test_a_version_that_a_replay_brought_back_keeps_its_directory(deps: Deps) -> None:
    """Its row changed between the look and the forgetting."""
    job = await running(deps)
    seen = Publication("j1", 0, "a" * 64, PublicationState.RETIRED, "", "", "old", (), 0.0)
    await deps.store.write(lambda tx: tx.put(replace(seen, state=PublicationState.PUBLISHED, directory="new")))
    await deps.store.write(lambda tx: _forget_directories(tx, [seen]))
    assert [p.directory for p in await public(deps, job_id=job.id)] == ["new"]


async def test_one_claimed_rate_does_not_move_what_a_version_takes_to_spread(deps: Deps) -> None:
    assert deps.presence.median_uplink() == UPLINK_GUESS
    for number, uplink in enumerate((0.0, 2e6, 3e6, 1e12)):
        deps.presence.hear(Heard(f"w{number}", 1, 0.0, uplink=uplink))
    assert deps.presence.median_uplink() == 3e6
