"""Manifests and pieces: who may have them, and heartbeats that announce them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from blake3 import blake3

from coordinator.domain.model import EdgeRow, Event, Holding, Invite, Job, Lease, LeaseState, Metric, PublicationState
from coordinator.service.forthcoming import close, hear
from coordinator.service.tokens import secret_hash
from coordinator.wire.job import LoraConfig
from coordinator.wire.messages import BaseVersion, BatchesReply, ManifestReply
from coordinator.wire.signing import public_hex
from p2p.domain.batches import Batch, text_hash
from p2p.domain.hops import Hop
from p2p.domain.manifest import Edge, Piece
from p2p.domain.signing import check_batch, sign_batch


async def test_a_version_of_another_digest_or_state_is_not_served(coordinator: Any, stranger: Any, rows: Any) -> None:
    worker = stranger()
    await worker.join()
    problem = (await worker.fetch("jobs/job-1/manifests/0?digest=" + "f" * 64)).problem
    assert (problem.status, problem.code) == (404, "not_published")
    assert "the newest version is 0" in problem.detail
    await coordinator.put(rows.publication(1, state=PublicationState.RETIRED))
    problem = (await worker.fetch(f"jobs/job-1/manifests/1?digest={rows.digest(1)}")).problem
    assert "retired" in problem.detail


def edge_row(base: int | None, version: int, rows: Any, nbytes: int = 10) -> EdgeRow:
    """An edge that some piece of its own makes up."""
    piece = Piece(blake3(f"{base} {version}".encode()).hexdigest(), nbytes)
    base_digest = None if base is None else rows.digest(base)
    hop = Hop(
        "job-1", version, rows.digest(version), "e" * 64, Edge("planes" if base is None else "delta", base, base_digest, (piece,))
    )
    way = hop.way
    return EdgeRow("job-1", way.id, way.digest, version, way.encoding, base, base_digest, nbytes, hop.to_json(), "ab" * 64)


async def test_a_manifest_comes_with_the_cheapest_path_from_what_the_worker_holds(
    coordinator: Any, stranger: Any, rows: Any
) -> None:
    single = [edge_row(number, number + 1, rows) for number in range(3)]
    squashed, keyframe = edge_row(0, 3, rows, nbytes=25), edge_row(None, 3, rows, nbytes=900)
    await coordinator.put(rows.publication(3), *single, squashed, keyframe)
    worker = stranger()
    await worker.join()

    async def path(query: str) -> list[str]:
        reply: ManifestReply = (await worker.fetch(f"jobs/job-1/manifests/3?digest={rows.digest(3)}{query}")).read(ManifestReply)
        return [hop.text for hop in reply.hops]

    held = f"&held={rows.digest(0)}"
    assert await path(held) == [squashed.document]
    assert await path(f"&held={rows.digest(1)},{rows.digest(0)}") == [single[1].document, single[2].document]
    assert await path("") == [keyframe.document]
    assert await path(f"{held}&doubted={squashed.id}") == [row.document for row in single]
    assert await path(f"{held}&doubted={squashed.id},{rows.digest(0)}") == [keyframe.document]
    in_use = coordinator.deps.presence.edges_in_use("job-1", since=0.0)
    assert in_use == {keyframe.id}, "what a worker was told to fetch stays"
    many = ",".join(["a" * 64] * 33)
    problem = (await worker.fetch(f"jobs/job-1/manifests/3?digest={rows.digest(3)}&held={many}")).problem
    assert (problem.status, problem.fix) == (422, "name at most 32")
    problem = (await worker.fetch(f"jobs/job-1/manifests/3?digest={rows.digest(3)}&held=../x")).problem
    assert problem.code == "invalid_message"


async def test_a_manifest_of_a_job_with_adapters_names_the_version_worth_keeping(
    coordinator: Any, stranger: Any, rows: Any
) -> None:
    """The first one, while it is public; a job that trains all weights names none."""
    await coordinator.put(rows.publication(3))
    worker = stranger()
    await worker.join()

    async def base() -> Any:
        reply: ManifestReply = (await worker.fetch(f"jobs/job-1/manifests/3?digest={rows.digest(3)}")).read(ManifestReply)
        return reply.base

    assert await base() is None
    job = await coordinator.deps.store.read(lambda r: r.get(Job, "job-1"))
    await coordinator.put(replace(job, config=job.config.model_copy(update={"lora": LoraConfig()})))
    assert await base() == BaseVersion(version=0, digest=rows.digest(0))
    await coordinator.put(rows.publication(0, state=PublicationState.RETIRED))
    assert await base() is None


async def test_pieces_of_a_retired_version_are_served_while_an_edge_names_them(coordinator: Any, stranger: Any, rows: Any) -> None:
    worker = stranger()
    await worker.join()
    row = edge_row(0, 1, rows)
    (piece,) = Hop.from_json(row.document).edge.pieces
    assert (await worker.fetch(f"pieces/{piece.digest}?job=job-1")).problem.detail.endswith("in no published version of job job-1")
    await coordinator.put(rows.publication(1, state=PublicationState.RETIRED), row)
    coordinator.clock.added += 1  # rows are read twice a second
    problem = (await worker.fetch(f"pieces/{piece.digest}?job=job-1")).problem
    assert problem.detail.endswith("is not on the coordinator's disk"), "it may be read; this test's disk has none"


async def test_a_confirmation_becomes_figures_of_the_version(coordinator: Any, stranger: Any, rows: Any) -> None:
    """The slowest receiver so far counts; bytes are summed over those that fetched; a repeated confirmation adds nothing."""

    async def figures() -> dict[str, float]:
        found = await coordinator.deps.store.read(lambda r: r.select(Metric, job_id="job-1", step=0))
        return {metric.name: metric.value for metric in found}

    await coordinator.put(Metric("job-1", "publish/bytes_full", 0, 0.0, 1000.0))
    one, two = stranger("one"), stranger("two")
    await one.join()
    await one.confirm(0, fetched_bytes=100, fetch_s=2.0, assemble_s=0.5, apply_s=0.25, skipped=3)
    await two.join()
    for _ in range(2):
        await two.confirm(0, fetched_bytes=150, fetch_s=1.0, apply_s=1.0)
    told = await figures()
    assert (told["publish/transfer_s"], told["publish/apply_s"]) == (2.0, 1.0)
    assert (told["publish/bytes_fetched"], told["publish/bytes_saved"]) == (250.0, 1750.0)
    assert told["publish/to_last_worker_s"] > 0
    (event,) = await coordinator.deps.store.read(lambda r: r.select(Event, job_id="job-1", kind="versions_skipped"))
    assert event.data == {"worker": one.id, "version": 0, "count": 3}


async def test_batches_of_an_edge_are_told_while_it_is_encoded(coordinator: Any, stranger: Any, rows: Any) -> None:
    """News ride on the beats; the batches come in order, at once when there is one, and end when the version is public."""
    deps = coordinator.deps
    worker = await stranger().ready()
    first = Batch("job-1", 1, "delta", rows.digest(0), 0, "", (Piece("c" * 64, 5),), False).to_json()
    transfer = text_hash(first)
    last = Batch("job-1", 1, "delta", rows.digest(0), 1, transfer, (Piece("d" * 64, 5),), True).to_json()
    route = f"jobs/job-1/transfers/{transfer}"
    assert (await worker.fetch(route)).problem.code == "unknown_transfer"
    hear(deps, first, sign_batch(coordinator.key, first))
    (news,) = (await worker.beat()).forthcoming
    assert (news.job_id, news.version, news.base_digest, news.transfer) == ("job-1", 1, rows.digest(0), transfer)
    reply = (await worker.fetch(route)).read(BatchesReply)
    assert [batch.text for batch in reply.batches] == [first]
    waiting = asyncio.create_task(worker.fetch(f"{route}?since=1"))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    hear(deps, last, sign_batch(coordinator.key, last))
    reply = (await waiting).read(BatchesReply)
    check_batch(public_hex(coordinator.key), reply.batches[0].text, reply.batches[0].signature)
    assert [batch.text for batch in reply.batches] == [last]
    for digest in ("c" * 64, "d" * 64):
        assert "not on the coordinator's disk" in (await worker.fetch(f"pieces/{digest}?job=job-1")).problem.detail
    close(deps, "job-1")
    assert (await worker.fetch(f"{route}?since=2")).problem.code == "unknown_transfer"
    assert (await worker.beat()).forthcoming == ()
    assert (await worker.fetch(f"{route}?since=x")).problem.field == "since"


async def test_a_piece_is_streamed_to_those_whose_invite_allows_the_job(coordinator: Any, stranger: Any) -> None:
    digest = coordinator.store_piece()
    worker = stranger()
    await worker.join()
    reply = await worker.fetch(f"pieces/{digest}?job=job-1")
    assert (reply.status, reply.body) == (200, b"the weights of a toy")
    now = coordinator.clock.now()
    await coordinator.put(Invite("i-2", secret_hash("q" * 43), "anna", 5, now, now + 99, jobs=("another",)))
    other = stranger("other")
    await other.join(invite_code=coordinator.invite_code("q" * 43))
    assert (await other.fetch(f"pieces/{digest}?job=job-1")).problem.code == "not_allowed"
    assert (await other.fetch(f"pieces/{digest}?job=another")).problem.code == "unknown_job"
    beat = await other.beat()
    assert beat.versions == ()
    assert "job toy takes workers whose invite names it or names no job" in beat.reason
    async with coordinator.session.get(f"{coordinator.base}/worker/v1/pieces/{digest}?job=job-1") as response:
        assert response.status == 401


async def test_a_piece_of_a_retired_version_is_no_longer_served(coordinator: Any, stranger: Any, rows: Any) -> None:
    digest = coordinator.store_piece()
    worker = stranger()
    await worker.join()
    await coordinator.put(rows.publication(0, state=PublicationState.RETIRED))
    assert (await worker.fetch(f"pieces/{digest}?job=job-1")).problem.code == "unknown_piece"


async def test_beats_announce_the_newest_version_and_the_step(coordinator: Any, stranger: Any, rows: Any) -> None:
    worker = await stranger().ready()
    await coordinator.put(rows.publication(1), replace(await coordinator.get(Job, "job-1"), committed_steps=1))
    coordinator.clock.added += 1
    notice = (await worker.beat(0)).versions[0]
    assert (notice.version, notice.digest, notice.committed_steps) == (1, rows.digest(1), 1)
    await coordinator.put(replace(await coordinator.get(Job, "job-1"), committed_steps=3))
    coordinator.clock.added += 1
    beat = await worker.beat(0)
    assert beat.state == "standby", "version 0 cannot serve step 3 with S = 2"
    assert (await worker.confirm(1)).accepted
    coordinator.clock.added += 1
    assert (await worker.beat(0, 1)).state == "active"


async def test_jobs_choose_workers_by_engine_and_name(coordinator: Any, stranger: Any) -> None:
    job = await coordinator.get(Job, "job-1")
    named = job.config.model_copy(update={"workers": job.config.workers.model_copy(update={"names": ("alice",), "trust": "named"})})
    await coordinator.put(replace(job, config=named))
    bob, alice = await stranger("bob").ready(), await stranger("alice").ready()
    assert "bob is not among them" in (await bob.ask()).reason
    assert (await alice.ask()).leases


@pytest.mark.parametrize("state", [LeaseState.LIVE, LeaseState.DEAD, LeaseState.CANCELLED])
async def test_proofs_that_tokens_may_still_name_are_kept(coordinator: Any, stranger: Any, rows: Any, state: LeaseState) -> None:
    """Work of a lease that the coordinator ended is paid until its deadline, if its versions were confirmed."""
    worker = await stranger().ready()
    row = await coordinator.get(Lease, (await worker.lease()).lease_id)
    await coordinator.put(replace(row, state=state, deadline=coordinator.clock.now() + 1000.0))

    async def kept(newest: int) -> list[int]:
        await coordinator.put(rows.publication(newest))
        assert (await worker.confirm(newest)).accepted
        return sorted(holding.version for holding in await coordinator.rows(Holding, worker_id=worker.id))

    for version in range(1, 10):
        assert await kept(version) == list(range(version + 1))
    coordinator.clock.added += 1001.0
    assert await kept(10) == list(range(3, 11)), "the newest eight"
