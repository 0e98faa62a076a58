"""The control plane over HTTPS: who is named to whom with which ticket, and what may stand on the board."""

from __future__ import annotations

import base64
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.api import worker as worker_api
from coordinator.domain.model import Holding, Invite, Job, Worker, WorkerState
from coordinator.service.control_desk import control_desk
from coordinator.service.tokens import secret_hash
from coordinator.service.worker_neighbours import ASKED_S, FRESH_S
from coordinator.wire.messages import PeerAddress
from coordinator.wire.signing import public_hex
from p2p.domain.batches import Batch, text_hash
from p2p.domain.control_board import Ask, Poll, Publication, page_from_bytes
from p2p.domain.control_frames import MAX_MESSAGE
from p2p.domain.control_messages import PEERS, HaveMap, Neighbour, PeersReply, PeersRequest, SignedBatch
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.domain.tickets import read_ticket
from p2p.errors import ControlRefused
from tests.integration.driving.counting import CountingStore
from tests.integration.p2p.bulk.nodes import Node, running
from tests.integration.p2p.bulk.stranger import Gone, Stranger

PEER = {"host": "127.0.0.1", "port": 4000, "certificate_sha256": "c" * 64}
TOPIC = "job-1/batches"
HAVES = "job-1/haves"


class SeederThere:
    """A seeder that listens; what it offers is no matter here."""

    address: PeerAddress | None = PeerAddress(host="0.0.0.0", port=7701, certificate_sha256="5" * 64)
    uplink = 2.5e6

    def seeded(self) -> dict[str, bool]:
        return {}

    def batch(self, text: str, signature: str) -> None: ...

    def retire(self, transfer: str) -> None: ...


class StoppedClock:
    def __init__(self, at: float) -> None:
        self.at = at

    def now(self) -> float:
        return self.at


@pytest.fixture(autouse=True)
def seeder(monkeypatch: pytest.MonkeyPatch) -> SeederThere:
    """The coordinator's routes answer with a seeder in view."""
    there = SeederThere()
    monkeypatch.setattr(worker_api, "NoSeeder", lambda: there)
    return there


async def ask(worker: Any, protocol: str, payload: bytes) -> Any:
    return await worker.call("control/request", Ask(protocol, payload).to_bytes())


async def peers(worker: Any, job_id: str = "job-1") -> dict[str, Neighbour]:
    reply = await ask(worker, PEERS, PeersRequest(job_id).to_bytes())
    assert reply.status == 200, reply.body
    named = PeersReply.from_bytes(reply.body).peers
    return {one.worker_id: one for one in named}


async def works(coordinator: Any, *workers: Any) -> None:
    """They ask for the job's peers, so that they work for it; the next question reads the rows anew."""
    for worker in workers:
        await peers(worker)
    coordinator.clock.added += FRESH_S


async def test_peers_are_named_with_tickets_that_their_doors_accept(coordinator: Any, stranger: Any, tmp_path: Path) -> None:
    """A real bulk node takes the ticket from its holder, and from nobody else."""
    asker, server, deaf = stranger("asker"), stranger("server"), stranger("deaf")
    await deaf.join()
    await asker.join()
    key = public_hex(coordinator.key)
    node = Node(tmp_path / "node", server.id, coordinator_public_key=key)
    with running(node):
        address = {"host": node.address.host, "port": node.address.port, "certificate_sha256": node.address.certificate_sha256}
        await server.join(peer=address)
        await server.beat(uplink_bytes_per_s=3e6)
        await works(coordinator, server, deaf)
        named = await peers(asker)
        assert list(named) == ["seeder", server.id], "the seeder first; nobody dials who does not listen, nor itself"
        found = named[server.id]
        assert (found.uplink, found.key, found.certificate_sha256) == (
            3_000_000,
            public_hex(server.key),
            node.address.certificate_sha256,
        )
        ticket = read_ticket(found.ticket, public_key=key, server=server.id, now=coordinator.clock.now())
        assert (ticket.fetcher, ticket.fetcher_key, ticket.job_id) == (asker.id, public_hex(asker.key), "job-1")
        for who, words in ((asker, None), (deaf, "not the signature")):
            with Stranger(node.address) as door:
                *_, door.challenge = door.hear(1)
                message = b"echo2-bulk\n" + f"{door.challenge.hex()}\n{door.certificate}\n{ticket.id}".encode()
                hello = json.dumps({"proof": who.key.sign(message).hex(), "ticket": found.ticket}, separators=(",", ":"))
                door.say(2, hello.encode(), a=1)
                if words is None:
                    door.hear(3)
                else:
                    with pytest.raises(Gone, match=words):
                        door.hear(3)
    seeds = named["seeder"]
    assert (seeds.bulk.host, seeds.bulk.port, seeds.uplink) == ("0.0.0.0", 7701, 2_500_000)
    assert read_ticket(seeds.ticket, public_key=key, server="seeder", now=coordinator.clock.now()).fetcher == asker.id


async def test_without_a_seeder_peers_are_named_all_the_same(coordinator: Any, stranger: Any, seeder: SeederThere) -> None:
    seeder.address = None
    one, two = stranger("one"), stranger("two")
    await one.join(peer=PEER)
    await two.join()
    await works(coordinator, one)
    assert set(await peers(two)) == {one.id}
    assert await peers(one) == {}


async def test_those_who_drain_still_serve_and_those_who_are_gone_do_not(coordinator: Any, stranger: Any) -> None:
    asker, other = stranger("asker"), stranger("other")
    await asker.join()
    await other.join(peer=PEER)
    await works(coordinator, other)
    for state, is_named in ((WorkerState.DRAINING, True), (WorkerState.QUARANTINED, False), (WorkerState.GONE, False)):
        await coordinator.put(replace(await coordinator.get(Worker, other.id), state=state))
        coordinator.clock.added += FRESH_S
        assert (other.id in await peers(asker)) == is_named, state


async def test_a_quarantined_worker_gets_no_ticket(coordinator: Any, stranger: Any) -> None:
    bad, good = stranger("bad"), stranger("good")
    await good.join(peer=PEER)
    await bad.join()
    await coordinator.put(replace(await coordinator.get(Worker, bad.id), state=WorkerState.QUARANTINED, reason="three strikes"))
    problem = (await ask(bad, PEERS, PeersRequest("job-1").to_bytes())).problem
    assert "quarantined: three strikes" in problem.detail


async def test_a_worker_is_told_only_of_jobs_that_it_may_serve(coordinator: Any, stranger: Any) -> None:
    now = coordinator.clock.now()
    await coordinator.put(Invite("i-2", secret_hash("q" * 43), "anna", 5, now, now + 99, jobs=("another",)))
    one, other = stranger("one"), stranger("other")
    await one.join(peer=PEER)
    await other.join(invite_code=coordinator.invite_code("q" * 43), peer=PEER | {"port": 4001})
    await coordinator.put(Holding(other.id, "job-1", 0, "d" * 64, (), 0.0))
    problem = (await ask(other, PEERS, PeersRequest("job-1").to_bytes())).problem
    assert (problem.status, problem.code) == (422, "control_refused")
    assert "job toy takes workers whose invite names it or names no job" in problem.detail
    assert set(await peers(one)) == {"seeder"}, "and nobody is sent to it"
    problem = (await ask(one, PEERS, PeersRequest("no-such-job").to_bytes())).problem
    assert "no-such-job does not exist" in problem.detail


async def test_in_a_large_swarm_each_has_few_neighbours_and_few_have_the_seeder(coordinator: Any, stranger: Any) -> None:
    first = stranger("first")
    await first.join(peer=PEER)
    row = await coordinator.get(Worker, first.id)
    others = []
    for number in range(60):
        key = hashlib.sha256(str(number).encode()).hexdigest()
        others.append(replace(row, id=f"w-{number}", public_key=key, name=f"n{number}"))
    await coordinator.put(*others, *(Holding(one.id, "job-1", 0, "d" * 64, (), 0.0) for one in others))
    named = set(await peers(first)) - {"seeder"}
    assert len(named) == 8


async def test_neighbours_work_for_the_job(coordinator: Any, stranger: Any) -> None:
    """They hold a version of it, fetch one, or asked for its peers lately: whoever only may serve it has no pieces of it."""
    one, other = stranger("one"), stranger("other")
    await one.join()
    await other.join(peer=PEER)

    async def named() -> set[str]:
        coordinator.clock.added += FRESH_S
        return set(await peers(one)) - {"seeder"}

    assert await named() == set(), "it is here, and does nothing for the job"
    await peers(other)
    assert await named() == {other.id}
    coordinator.clock.added += ASKED_S
    await other.beat()
    assert await named() == set(), "that was long ago"
    coordinator.deps.presence.fetches(other.id, "job-1", 1, at=coordinator.clock.now())
    assert await named() == {other.id}
    coordinator.deps.presence.fetches(other.id, "job-2", 1, at=coordinator.clock.now())
    assert await named() == set(), "it works for another one"
    await coordinator.put(Holding(other.id, "job-1", 0, "d" * 64, (), 0.0))
    assert await named() == {other.id}


async def test_one_reading_serves_the_questions_of_a_second(coordinator: Any, stranger: Any, seeder: SeederThere) -> None:
    """Each question costs its own worker's row; the others' rows are read once."""
    worker = stranger("one")
    await worker.join(peer=PEER)
    row = await coordinator.get(Worker, worker.id)
    keys = [hashlib.sha256(str(number).encode()).hexdigest() for number in range(100)]
    await coordinator.put(*(replace(row, id=f"w-{key[:8]}", public_key=key, name=key[:8]) for key in keys))
    counting = CountingStore(coordinator.deps.store)
    clock = StoppedClock(coordinator.clock.now())
    desk = control_desk(replace(coordinator.deps, store=counting, clock=clock), seeder)
    body = Ask(PEERS, PeersRequest("job-1").to_bytes()).to_bytes()
    for key in keys:
        await desk.post(key, "control/request", body)
    assert counting.rows[Worker] <= 101 + 100
    assert counting.rows[Invite] <= 1
    clock.at += FRESH_S
    before = counting.rows[Worker]
    await desk.post(keys[0], "control/request", body)
    assert counting.rows[Worker] - before == 101 + 1


async def test_what_is_said_is_judged_and_found_by_those_who_poll(coordinator: Any, stranger: Any) -> None:
    """The coordinator's signed words stand on the board; forgeries and others' have-maps do not.

    Own have-maps are taken and shown to nobody: each would go to everyone who polls.
    """
    one, two = stranger("one"), stranger("two")
    await one.join()
    await two.join()
    mine = HaveMap(public_hex(one.key), "d" * 64, 5, ((0, 2),), 1000).to_bytes()
    text = Batch("job-1", 1, "delta", "b" * 64, 0, "", (Piece("c" * 64, 5),), True).to_json()
    signed = SignedBatch(text, sign_batch(coordinator.key, text)).to_bytes()
    forged = SignedBatch(text, sign_batch(two.key, text)).to_bytes()

    async def publish(worker: Any, topic: str, payload: bytes) -> Any:
        return await worker.call("control/publish", Publication(topic, "slot", payload).to_bytes())

    assert (await publish(one, HAVES, mine)).status == 200
    assert (await publish(two, TOPIC, signed)).status == 200
    for topic, payload in ((HAVES, mine), (TOPIC, forged), (TOPIC, b"{}"), (HAVES, b"\xff" * 100)):
        problem = (await publish(two, topic, payload)).problem
        assert (problem.status, problem.code) == (422, "control_refused")
        assert "not admitted" in problem.detail
    reply = await two.call("control/poll", Poll((TOPIC, HAVES), 0).to_bytes())
    page = page_from_bytes(reply.body)
    assert [(one.author, one.payload) for one in page.values] == [(public_hex(two.key), signed)]
    again = page_from_bytes((await two.call("control/poll", Poll((TOPIC,), page.after).to_bytes())).body)
    assert again.values == ()
    assert text_hash(text)


@pytest.mark.parametrize("path", ["control/poll", "control/publish"])
async def test_the_board_is_for_those_who_may_serve_the_job(coordinator: Any, stranger: Any, path: str) -> None:
    now = coordinator.clock.now()
    await coordinator.put(Invite("i-2", secret_hash("q" * 43), "anna", 5, now, now + 99, jobs=("another",)))
    one, other = stranger("one"), stranger("other")
    await one.join()
    await other.join(invite_code=coordinator.invite_code("q" * 43))

    def body(topic: str) -> bytes:
        return Poll((topic,), 0).to_bytes() if path.endswith("poll") else Publication(topic, "", b"{}").to_bytes()

    for worker, topic, words in (
        (other, TOPIC, "job toy takes workers whose invite names it or names no job"),
        (one, "job-9/versions", "job-9 does not exist"),
        (one, "job-1/gossip", "is no topic"),
        (one, "versions", "is no topic"),
    ):
        problem = (await worker.call(path, body(topic))).problem
        assert (problem.status, problem.code) == (422, "control_refused")
        assert words in problem.detail
    await coordinator.put(replace(await coordinator.get(Worker, one.id), state=WorkerState.QUARANTINED, reason="three strikes"))
    coordinator.clock.added += FRESH_S
    assert "quarantined: three strikes" in (await one.call(path, body(TOPIC))).problem.detail
    desk = control_desk(coordinator.deps, SeederThere())
    await coordinator.put(replace(await coordinator.get(Worker, one.id), state=WorkerState.GONE))
    with pytest.raises(ControlRefused, match="belongs to no worker that is here"):
        await desk.post(public_hex(one.key), path, body(TOPIC))


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("control/request", Ask("/echo2/no-such/1", b"").to_bytes(), 422, "does not answer /echo2/no-such/1"),
        ("control/request", Ask(PEERS, b"{}").to_bytes(), 422, "refused"),
        ("control/request", b"not json", 422, "refused"),
        ("control/poll", b'{"after":-1,"topics":[]}', 422, "after"),
        ("control/no-such", b"{}", 404, ""),
        ("control/request", b" " * (200 << 10), 413, ""),
        (
            "control/publish",
            Publication(TOPIC, "s", b"x").to_bytes()[:-2] + b" " * (2 * MAX_MESSAGE) + b"}",
            422,
            "above the limit",
        ),
    ],
    ids=[
        "unknown protocol",
        "no request",
        "no JSON",
        "negative",
        "unknown path",
        "beyond the body's limit",
        "beyond the message's",
    ],
)
async def test_other_calls_are_refused_in_words(
    coordinator: Any, stranger: Any, path: str, body: bytes, status: int, words: str
) -> None:
    worker = stranger()
    await worker.join()
    reply = await worker.call(path, body)
    assert reply.status == status, reply.body
    if words:
        assert words in reply.problem.detail


async def test_a_payload_above_the_limit_is_refused(coordinator: Any, stranger: Any) -> None:
    worker = stranger()
    await worker.join()
    body = {"protocol": PEERS, "payload": base64.b64encode(bytes(MAX_MESSAGE + 1)).decode()}
    problem = (await worker.call("control/request", json.dumps(body, sort_keys=True, separators=(",", ":")).encode())).problem
    assert "above the limit" in problem.detail


async def test_nobody_speaks_without_a_signature(coordinator: Any, stranger: Any) -> None:
    await stranger().join()
    url = f"{coordinator.base}/worker/v1/control/request"
    async with coordinator.session.post(
        url, data=Ask(PEERS, b"").to_bytes(), headers={"Content-Type": "application/json"}
    ) as reply:
        assert reply.status == 401


async def test_a_key_that_has_left_is_refused_on_any_way(coordinator: Any, stranger: Any, seeder: SeederThere) -> None:
    """libp2p proves the key, not the session: the desk itself looks whether the worker is here."""
    worker = stranger()
    await worker.join()
    desk = control_desk(coordinator.deps, seeder)
    body = Ask(PEERS, PeersRequest("job-1").to_bytes()).to_bytes()
    assert PeersReply.from_bytes(await desk.post(public_hex(worker.key), "control/request", body)).peers
    await coordinator.put(replace(await coordinator.get(Worker, worker.id), state=WorkerState.GONE))
    with pytest.raises(Exception, match="belongs to no worker that is here"):
        await desk.post(public_hex(worker.key), "control/request", body)
    assert await coordinator.get(Job, "job-1") is not None
