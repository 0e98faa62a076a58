"""The lineage in rows: which edges publications get, what stays when they retire, and what a roll-back takes along."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from structlog.testing import capture_logs

from coordinator.domain.model import EdgeRow, Event, Holding, Job, JobState, Metric, Publication, PublicationState
from coordinator.service.deps import Deps
from coordinator.service.edges import extend, is_there, needed_directories, path_for, read_lineage
from coordinator.service.job_ports import BaseSnapshot, PublishFailed
from coordinator.service.plan_model import model_facts
from coordinator.service.publishing import _forget_directories, announce, remove_directories, retire
from coordinator.service.tidying import PIECES_KEPT_S, tidy, tidy_job
from coordinator.service.worker_presence import UPLINK_GUESS, Heard
from coordinator.wire.job import LoraConfig
from p2p.domain.hops import Hop
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


async def path_from(deps: Deps, held: str | None, target: str) -> list[tuple[int | None, int]]:
    """The ends of the edges by which a worker that holds that digest, or nothing, comes to the target. Raises ManifestError."""
    rows = list(await deps.store.read(lambda r: r.select(EdgeRow, job_id="j1")))
    route = path_for(rows, target, held=frozenset() if held is None else frozenset({held}), doubted=frozenset())
    return [(row.base_version, row.version) for row in route]


async def replay(deps: Deps, pieces: Pieces, job: Job, version: int) -> str:
    """A replay gives the version other bits; the announcer's round. Its digest."""
    await announce(deps, pieces, job, shot(deps, version, f"other{version}"), (1, 2))
    await extend(deps, pieces, job, version)
    await retire(deps, pieces, job)
    (row,) = await public(deps, version=version, state=[PublicationState.PUBLISHED, PublicationState.RETIRED])
    return row.digest


async def test_workers_find_a_path_at_every_moment_of_a_replay(deps: Deps) -> None:
    """Versions 4 to 6 come out otherwise, one after the other. Until 6 is replaced it is what workers want, by edges over lost bits."""
    pieces = Pieces()
    job = await line(deps, pieces, 3)
    lags = (await public(deps, version=3))[0].digest
    await deps.store.write(lambda tx: tx.put(Holding("lags", "j1", 3, lags, (), 0.0)))
    for version in (4, 5, 6):
        await line(deps, pieces, version, first=version)
        digest = (await public(deps, version=version))[0].digest
        await deps.store.write(lambda tx, v=version, d=digest: tx.put(Holding("leads", "j1", v, d, (), 0.0)))  # type: ignore[misc]
    old = {p.version: p.digest for p in await public(deps)}
    for version in (4, 5):
        await replay(deps, pieces, job, version)
        assert await path_from(deps, lags, old[6]) == [(3, 4), (4, 5), (5, 6)]
        assert (await path_from(deps, None, old[6]))[0] == (None, 0)
        assert (None, 6) not in await edges(deps), "no keyframe is needed for it"
        assert pieces.stored >= named([row.document for row in (await edges(deps)).values()])
    newest = await replay(deps, pieces, job, 6)
    assert await path_from(deps, lags, newest) == [(3, 5), (5, 6)], "the bits of 4 went as soon as they came: 5 and 6 are newer"
    assert await path_from(deps, old[6], newest) == [(6, 6)], "who holds what was replaced loads no snapshot anew"
    lost = {p.digest for p in await public(deps, state=PublicationState.ROLLED_BACK)}
    left = await deps.store.read(lambda r: r.select(EdgeRow, job_id="j1"))
    assert not lost & {row.digest for row in left}, "nothing leads to lost bits any more"
    kept = await public(deps, state=PublicationState.PUBLISHED)
    assert pieces.stored == named([row.document for row in left]) | named([p.manifest for p in kept])


async def test_a_replay_makes_no_edge_from_bits_that_nobody_holds(deps: Deps) -> None:
    pieces = Pieces()
    job = await line(deps, pieces, 4)
    await replay(deps, pieces, job, 4)
    assert (4, 4) not in await edges(deps)


async def test_a_replaced_version_is_announced_although_no_edge_to_it_can_be_made(deps: Deps) -> None:
    class Broken(Pieces):
        async def add_edges(self, *_args, **_named):
            raise PublishFailed("the encoder does not like it")

    job = await line(deps, Broken(), 4)
    digest = (await public(deps, version=4))[0].digest
    await deps.store.write(lambda tx: tx.put(Holding("w", "j1", 4, digest, (), 0.0)))
    assert await replay(deps, Broken(), job, 4) != digest
    assert (4, 4) not in await edges(deps)


async def test_a_missing_base_means_a_keyframe(deps: Deps) -> None:
    """All older directories are lost: the next version is whole by itself."""
    pieces = Pieces()
    job = await line(deps, pieces, 2)
    for publication in await public(deps):
        shutil.rmtree(publication.directory, ignore_errors=True)
    await announce(deps, pieces, job, shot(deps, 3, "w3"), (1, 2))
    assert (None, 3) in await edges(deps)


async def test_a_version_that_goes_out_whole_says_what_the_next_one_will_weigh(deps: Deps) -> None:
    """The planning formula on the published bits; a version that is a delta is measured."""
    job, pieces = await running(deps), Pieces()
    for version in (0, 1):
        made = shot(deps, version, f"w{version}")
        values = np.random.default_rng(0).normal(0, 0.02, (64, 128)).astype(np.float16)
        save_file({"w": values}, Path(made.directory) / "model.safetensors")
        await announce(deps, pieces, job, made, (1, 2))
    told = await deps.store.read(lambda r: r.select(Metric, job_id="j1", name="publish/bytes_forecast"))
    directory = Path((await public(deps, version=0))[0].directory)
    expected = model_facts(directory, job.config.algorithm.learning_rate)["delta_bytes"].value
    assert [(one.step, one.value) for one in told] == [(0, expected)]
    assert 1.0 < expected < values.nbytes


async def test_adapters_are_not_forecast_by_the_weights_formula(deps: Deps) -> None:
    job, pieces = await running(deps), Pieces()
    made = shot(deps, 0, "w0")
    save_file({"w": np.ones((64, 128), np.float16)}, Path(made.directory) / "model.safetensors")
    await announce(deps, pieces, replace(job, config=job.config.model_copy(update={"lora": LoraConfig()})), made, (1, 2))
    assert await deps.store.read(lambda r: r.count(Metric, job_id="j1", name="publish/bytes_forecast")) == 0


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


async def test_an_edge_over_eight_is_made_although_its_base_directory_is_gone(deps: Deps) -> None:
    """Its bits can be made again from a keyframe and what leads on from there; without a keyframe the edge is left out."""

    class Asked(Pieces):
        bases: Sequence[BaseSnapshot] = ()

        async def add_edges(self, *args, bases, **named):
            self.bases = bases
            return await super().add_edges(*args, bases=bases, **named)

    pieces = Asked()
    await line(deps, pieces, 15)
    shutil.rmtree((await public(deps, version=8))[0].directory)
    await line(deps, pieces, 16, first=16)
    assert (8, 16) in await edges(deps)
    (asked,) = pieces.bases
    told = [Hop.from_json(text) for text in asked.path]
    assert [(hop.edge.base_version, hop.version) for hop in told] == [(None, 0), (0, 8)]
    shutil.rmtree((await public(deps, version=16))[0].directory)
    keyframe = (await edges(deps))[None, 0]
    await line(deps, pieces, 23, first=17)
    await deps.store.write(lambda tx: tx.delete(EdgeRow, job_id="j1", id=keyframe.id))
    await line(deps, pieces, 24, first=24)
    assert (16, 24) not in await edges(deps)


async def test_a_base_that_cannot_be_made_again_is_left_out_in_words(deps: Deps) -> None:
    class Picky(Pieces):
        async def add_edges(self, *_args, **_named):
            return ()

    with capture_logs() as logs:
        await line(deps, Picky(), 8)
    assert any(one["event"] == "edges_left_out" and one["version"] == 8 for one in logs)
    assert (0, 8) not in await edges(deps)


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
