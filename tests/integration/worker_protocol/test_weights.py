"""Manifests and pieces: who may have them, where else they are, and heartbeats that announce them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from coordinator.domain.model import Invite, Job, PublicationState
from coordinator.service.tokens import secret_hash
from coordinator.wire.messages import ManifestReply
from coordinator.wire.signing import public_hex
from p2p.domain.manifest import Manifest
from p2p.domain.tickets import read_ticket

PEER = {"host": "127.0.0.1", "port": 4000, "certificate_sha256": "c" * 64}


async def test_a_manifest_names_peers_that_hold_the_version_with_tickets(coordinator: Any, stranger: Any, rows: Any) -> None:
    holder, asker, unheld = stranger("holder"), stranger("asker"), stranger("unheld")
    await holder.join(peer=PEER)
    await holder.confirm(0)
    await unheld.join(peer=PEER | {"port": 4001})
    await asker.join()
    reply: ManifestReply = (await asker.fetch(f"jobs/job-1/manifests/0?digest={rows.digest(0)}")).read(ManifestReply)
    assert Manifest.from_json(reply.manifest).version == 0
    assert [s.worker_id for s in reply.sources] == [holder.id]
    key = public_hex(coordinator.key)
    ticket = read_ticket(reply.sources[0].ticket, public_key=key, server=holder.id, now=coordinator.clock.now())
    assert (ticket.fetcher, ticket.fetcher_key, ticket.job_id) == (asker.id, public_hex(asker.key), "job-1")
    own: ManifestReply = (await holder.fetch(f"jobs/job-1/manifests/0?digest={rows.digest(0)}")).read(ManifestReply)
    assert own.sources == (), "nobody fetches from itself"


async def test_a_version_of_another_digest_or_state_is_not_served(coordinator: Any, stranger: Any, rows: Any) -> None:
    worker = stranger()
    await worker.join()
    problem = (await worker.fetch("jobs/job-1/manifests/0?digest=" + "f" * 64)).problem
    assert (problem.status, problem.code) == (404, "not_published")
    assert "the newest version is 0" in problem.detail
    await coordinator.put(rows.publication(1, state=PublicationState.RETIRED))
    problem = (await worker.fetch(f"jobs/job-1/manifests/1?digest={rows.digest(1)}")).problem
    assert "retired" in problem.detail


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
    assert "does not name job toy" in beat.reason
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
