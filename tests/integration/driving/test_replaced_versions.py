"""Versions that a replay replaces, public or retired; what is kept and removed of versions; encoders that die."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from coordinator.domain.model import (
    CheckpointRow,
    EdgeRow,
    Group,
    GroupState,
    Holding,
    JobState,
    Lease,
    LeaseState,
    Publication,
    PublicationState,
    Rollout,
    RolloutState,
)
from coordinator.service import announcing
from coordinator.service.deps import Deps
from coordinator.service.driving import JobDriver, Tools
from coordinator.service.job_ports import BaseSnapshot, PublishInterrupted, SignedHop, SignedManifest
from coordinator.service.publishing import announce, retire, roll_back
from coordinator.service.tidying import needed_blobs, tidy, tidy_job
from coordinator.wire.learner_link import Snapshotted
from p2p.domain.hops import pieces_named
from tests.integration.driving.pretend import SHARED, PretendLearners, PretendPlane, PretendPublisher, pretend_workers
from tests.integration.driving.scene import STEPS, check, config, drive, row, submit


class Pieces(PretendPublisher):
    """Knows which pieces are in its store."""

    def __init__(self) -> None:
        super().__init__()
        self.stored: set[str] = set()
        self.interruptions = 0

    async def publish(
        self, directory: Path, *, job_id: str, version: int, canary_ids: Sequence[int], base: BaseSnapshot | None = None
    ) -> SignedManifest:
        if self.interruptions:
            self.interruptions -= 1
            raise PublishInterrupted("the encoder process ended without an answer")
        signed = await super().publish(directory, job_id=job_id, version=version, canary_ids=canary_ids, base=base)
        self.stored |= named([signed.text])
        return signed

    async def add_edges(
        self, directory: Path, *, manifest: str, bases: Sequence[BaseSnapshot], keyframe: bool
    ) -> tuple[SignedHop, ...]:
        hops = await super().add_edges(directory, manifest=manifest, bases=bases, keyframe=keyframe)
        self.stored |= named([hop.text for hop in hops])
        return hops

    async def remove_pieces(self, texts: Sequence[str], *, kept: Sequence[str]) -> int:
        doomed = named(texts) - named(kept)
        self.stored -= doomed
        return len(doomed)

    async def keep_pieces(self, kept: Sequence[str]) -> int:
        before = len(self.stored)
        self.stored &= named(kept)
        return before - len(self.stored)


def named(texts: Sequence[str]) -> set[str]:
    """Digests of the pieces that manifests and hops name."""
    return {piece.digest for text in texts for piece in pieces_named(text)}


def shot(deps: Deps, version: int, weights: str, name: str = "") -> Snapshotted:
    """A snapshot on disk."""
    folder = deps.settings.data_dir / "snapshots" / "j1" / (name or f"v{version:08d}-{weights}")
    folder.mkdir(parents=True)
    (folder / "weights").write_text(weights)
    return Snapshotted(fence=1, version=version, directory=str(folder), canary_logprobs=(-1.0,), seconds=0.0)


async def running(deps: Deps, job_id: str = "j1"):
    """A running job."""
    await submit(deps, config())
    job = replace(await row(deps, "j1"), id=job_id, state=JobState.RUNNING)
    await deps.store.write(lambda tx: tx.put(job))
    return job


async def public(deps: Deps, **filters) -> list[Publication]:
    return await deps.store.read(lambda r: r.select(Publication, order_by="version", **filters))


async def test_a_retired_version_with_other_bits_stains_what_carries_it(deps: Deps) -> None:
    """Version 6 is retired while a ready group still carries it; the replay of step 5 gives it other bits."""
    job_id = await submit(deps, config(staleness={"max": 4, "publish_every": 1}))

    async def retired() -> None:
        version = (await public(deps, version=6))[0]
        group = Group("j1/g900", "j1", 900, 0, (2,), 2, GroupState.ISSUED, 0.0, oldest_version=6)
        slots = [
            Rollout(group.id, 0, "j1", 900, RolloutState.SCORED, digests={"6": version.digest}, oldest_version=6, reward=1.0),
            Rollout(group.id, 1, "j1", 900, RolloutState.OPEN),
        ]
        await deps.store.write(lambda tx: tx.put(replace(version, state=PublicationState.RETIRED), group, *slots))

    learners = PretendLearners(salts=["", "other"], lose_at={"train:8"}, hooks={"train:8": retired})
    await drive(deps, job_id, learners)
    group = await deps.store.read(lambda r: r.get(Group, "j1/g900"))
    assert group is not None
    assert group.reason.startswith("policy_rolled_back")
    states = {p.state for p in await public(deps, version=6)}
    assert PublicationState.ROLLED_BACK in states


async def test_two_roll_backs_of_one_version(deps: Deps) -> None:
    """The second replay brings the first bits back: they are public again, and the others are not."""
    job, pieces = await running(deps), Pieces()
    for weights, name in (("a", "1"), ("b", "2"), ("a", "3")):
        await announce(deps, pieces, job, shot(deps, 3, weights, name), (1, 2))
        await retire(deps, pieces, job)
    rows = await public(deps, version=3)
    assert sorted(p.state for p in rows) == [PublicationState.PUBLISHED, PublicationState.ROLLED_BACK]
    kept = next(p for p in rows if p.state is PublicationState.PUBLISHED)
    assert Path(kept.directory).name == "3"
    assert [path.name for path in Path(kept.directory).parent.iterdir()] == ["3"], "directories of lost bits are gone"
    assert pieces.stored == {SHARED, kept.digest}, "and so are their pieces"


async def test_a_roll_back_opens_the_slots_of_dead_leases(deps: Deps) -> None:
    """Slots under a lease of the lost digest are open in the same transaction, whenever the sweep comes."""
    job, pieces = await running(deps), Pieces()
    await announce(deps, pieces, job, shot(deps, 0, "a"), (1, 2))
    lost = (await public(deps))[0]
    lease = Lease("l", "j1", "j1/g0", "w", 1, (0,), 0, lost.digest, 9, 9e9, 1, LeaseState.LIVE, 0.0)
    group = Group("j1/g0", "j1", 0, 0, (2,), 1, GroupState.ISSUED, 0.0)
    slot = Rollout(group.id, 0, "j1", 0, RolloutState.LEASED, lease_id="l", worker_id="w")
    await deps.store.write(lambda tx: tx.put(lease, group, slot))
    await deps.store.write(lambda tx: roll_back(tx, lost, now=1.0))
    found = await deps.store.read(lambda r: r.get(Rollout, group.id, 0))
    assert found is not None
    assert (found.state, found.lease_id) == (RolloutState.OPEN, None)


async def test_a_group_that_a_roll_back_rejects_has_no_leased_slot_left(deps: Deps) -> None:
    """One slot carries the lost bits; the other one is leased for another version, and nobody needs it any more."""
    job, pieces = await running(deps), Pieces()
    await announce(deps, pieces, job, shot(deps, 0, "a"), (1, 2))
    lost = (await public(deps))[0]
    lease = Lease("l", "j1", "j1/g0", "w", 1, (1,), 1, "another", 9, 9e9, 1, LeaseState.LIVE, 0.0)
    group = Group("j1/g0", "j1", 0, 0, (2,), 2, GroupState.ISSUED, 0.0)
    done = Rollout(group.id, 0, "j1", 0, RolloutState.SCORED, lease_id="k", worker_id="v", digests={"0": lost.digest}, reward=1.0)
    slot = Rollout(group.id, 1, "j1", 0, RolloutState.LEASED, lease_id="l", worker_id="w")
    await deps.store.write(lambda tx: tx.put(lease, group, done, slot))
    await deps.store.write(lambda tx: roll_back(tx, lost, now=1.0))
    found = await deps.store.read(lambda r: r.get(Rollout, group.id, 1))
    ended = await deps.store.read(lambda r: r.get(Lease, "l"))
    rejected = await deps.store.read(lambda r: r.get(Group, group.id))
    assert found is not None
    assert ended is not None
    assert rejected is not None
    assert (rejected.state, found.state, ended.state) == (GroupState.REJECTED, RolloutState.OPEN, LeaseState.DEAD)
    assert ended.reason.startswith("policy_rolled_back")


async def test_pieces_shared_between_jobs_stay(deps: Deps) -> None:
    """Job 1 retires its versions; job 2 serves the same first bits."""
    one, two, pieces = await running(deps), await running(deps, "j2"), Pieces()
    await announce(deps, pieces, two, shot(deps, 0, "base", "other"), (1, 2))
    for version, weights in enumerate(("base", "x", "y", "z")):
        await announce(deps, pieces, one, shot(deps, version, weights), (1, 2))
    await retire(deps, pieces, one)
    states = {p.version: p.state for p in await public(deps, job_id="j1")}
    assert states[0] is PublicationState.RETIRED
    edges = await deps.store.read(lambda r: r.select(EdgeRow, job_id="j1"))
    assert [(row.version, row.base_version) for row in sorted(edges, key=lambda row: row.version)] == [
        (0, None),
        (1, 0),
        (2, 1),
        (3, 2),
    ]
    assert pieces.stored == {SHARED, *named([row.document for row in edges])}, "a retired version lives on as lineage"
    first = (await public(deps, job_id="j2"))[0].digest
    await deps.store.write(lambda tx: tx.put(replace(one, state=JobState.CANCELLED, state_since=0.0)))
    await tidy(deps, pieces)
    assert pieces.stored == {SHARED, first}


async def test_a_version_stays_while_it_is_fetched(deps: Deps) -> None:
    """A slow worker finishes its fetch although three newer versions came out meanwhile; a silent one keeps nothing."""
    job, pieces = await running(deps), Pieces()
    for version in range(5):
        await announce(deps, pieces, job, shot(deps, version, f"w{version}"), (1, 2))
    now = deps.clock.now()
    deps.presence.fetches("slow", "j1", 1, at=now)
    deps.presence.fetches("silent", "j1", 0, at=now - 2000)
    await retire(deps, pieces, job)
    assert [p.version for p in await public(deps, state=PublicationState.PUBLISHED)] == [1, 3, 4]
    deps.presence.has_fetched("slow", "j1", 1)
    await retire(deps, pieces, job)
    assert [p.version for p in await public(deps, state=PublicationState.PUBLISHED)] == [3, 4]


async def test_nothing_is_announced_of_an_ended_job(deps: Deps) -> None:
    """A cancel while the encoder works: neither row, nor directory, nor piece stays."""
    job, pieces = await running(deps), Pieces()
    await deps.store.write(lambda tx: tx.put(replace(job, state=JobState.CANCELLED)))
    made = shot(deps, 0, "a")
    await announce(deps, pieces, job, made, (1, 2))
    assert (await public(deps), Path(made.directory).exists(), pieces.stored) == ([], False, set())


async def test_an_encoder_that_dies_is_started_again(deps: Deps, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice is no verdict on the snapshot."""
    monkeypatch.setattr(announcing, "PAUSE_S", 0.0)
    pieces = Pieces()
    pieces.interruptions = 2
    job_id = await submit(deps, config(budget={"steps": 1}, checkpoints={"eval_prompts": 0}))

    workers = asyncio.create_task(pretend_workers(deps, job_id))
    async with asyncio.timeout(8):
        await JobDriver(deps, Tools(PretendLearners(), pieces, PretendPlane()), job_id).run()
    workers.cancel()
    assert (await row(deps, job_id)).state is JobState.COMPLETED


async def test_what_killed_processes_left_is_removed(deps: Deps) -> None:
    """Snapshots and checkpoints without a row, and halves of them, go; what a row names stays, and other stores' files too."""
    job, pieces, home = await running(deps), Pieces(), deps.settings.data_dir
    await announce(deps, pieces, job, shot(deps, 0, "a"), (1, 2))
    pieces.stored.add("orphan")
    keep = home / "checkpoints" / "j1" / "step00000005-1"
    await deps.store.write(lambda tx: tx.put(CheckpointRow("j1", 5, f"/moved/since/{keep.name}", 0.0)))
    left = ["checkpoints/j1/step00000010-2", "checkpoints/j1/.step00000015-2.partial", "snapshots/j1/v00000007-1"]
    for name in (*left, f"checkpoints/j1/{keep.name}", "snapshots/unknown/v1"):
        (home / name).mkdir(parents=True)
    await tidy_job(deps, job)
    await tidy(deps, pieces)
    assert [name for name in left if (home / name).exists()] == []
    assert keep.is_dir()
    assert (home / "snapshots/unknown/v1").is_dir()
    assert [p.name for p in (home / "snapshots/j1").iterdir()] == ["v00000000-a"]
    assert "orphan" not in pieces.stored


async def test_token_arrays_of_old_steps_go_and_the_job_can_be_resumed(deps: Deps) -> None:
    """Two steps are kept; texts and rewards stay in the rows."""
    job = await drive(deps, await submit(deps, config(checkpoints={"keep_rollout_steps": 2})), PretendLearners())
    rows = await deps.store.read(lambda r: r.select(Rollout, job_id=job.id))
    groups = await deps.store.read(lambda r: r.select(Group, job_id=job.id))
    step = {group.id: group.step for group in groups}
    needed = await needed_blobs(deps)
    assert {r.blob for r in rows if step[r.group_id] in (STEPS - 1, STEPS - 2)} <= needed
    assert len(needed) < len({r.blob for r in rows})
    swept = await deps.blobs.sweep(needed, before=deps.clock.now() + 10)
    assert swept.files == len({r.blob for r in rows} - needed)
    assert all(r.reward is not None for r in await deps.store.read(lambda r: r.select(Rollout, state=RolloutState.SCORED)))
    await check(deps, job)


async def test_a_paused_job_gives_back_its_place_and_goes_on_later(deps: Deps) -> None:
    """Its learner ends after a while; resumed, a new driver replays and ends the job."""
    quick = replace(deps, settings=replace(deps.settings, paused_learner_s=0.0))
    job_id = await submit(quick, config())

    async def pause() -> None:
        job = await row(quick, job_id)
        paused = replace(job, state=JobState.PAUSED, resume_state=job.state, state_since=quick.clock.now())
        await quick.store.write(lambda tx: tx.put(paused))

    learners = PretendLearners(hooks={"train:7": pause})
    job = await drive(quick, job_id, learners)
    assert (job.state, job.committed_steps) == (JobState.PAUSED, 8), "the step under way was committed"
    await quick.store.write(lambda tx: tx.put(replace(job, state=JobState.RUNNING, resume_state=None)))
    job = await drive(quick, job_id, learners)
    assert (job.state, job.committed_steps) == (JobState.COMPLETED, STEPS)
    assert learners.trained[-1] == list(range(5, STEPS))
    await check(quick, job)


async def test_holdings_of_lost_bits_go(deps: Deps) -> None:
    """A worker must prove its weights again."""
    job, pieces = await running(deps), Pieces()
    await announce(deps, pieces, job, shot(deps, 2, "a", "1"), (1, 2))
    digest = (await public(deps))[0].digest
    await deps.store.write(lambda tx: tx.put(Holding("w", "j1", 2, digest, (), 0.0)))
    await announce(deps, pieces, job, shot(deps, 2, "b", "2"), (1, 2))
    assert await deps.store.read(lambda r: r.count(Holding)) == 0


async def test_weights_of_forgotten_checkpoints_go(deps: Deps) -> None:
    """A retired version's directory stays for its checkpoint and while edges are made from it: version 0 is the base of all."""
    job_id = await submit(deps, config(checkpoints={"every_steps": 2, "keep": 2}))
    job = await drive(deps, job_id, PretendLearners())
    retired = {p.version for p in await public(deps, state=PublicationState.RETIRED)}
    served = {p.version for p in await public(deps, state=PublicationState.PUBLISHED)}
    assert {2, 4, 6} <= retired
    left = {int(path.name[1:9]) for path in (deps.settings.data_dir / "snapshots" / job.id).iterdir()}
    assert left == served | {STEPS - 2, STEPS, 0}
