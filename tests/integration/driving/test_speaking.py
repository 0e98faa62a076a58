"""What the coordinator says on the control plane, and who may take part: from real rows, onto a real board."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from blake3 import blake3

from coordinator.domain.model import Invite, JobState, Worker, WorkerState
from coordinator.service import forthcoming
from coordinator.service.control_desk import ASKED_BURST, control_desk
from coordinator.service.deps import NEWS, Deps
from coordinator.service.publishing import announce
from coordinator.service.seeding import NoSeeder
from coordinator.service.speaking import BATCH_SLOTS, Voice, admit
from coordinator.service.worker_bulletin import Bulletin
from coordinator.wire.signing import public_hex, worker_id
from p2p.adapters.control.https import REQUEST
from p2p.domain.batches import Batch, text_hash
from p2p.domain.control_board import Ask, Board
from p2p.domain.control_messages import PEERS, Announcement, HaveMap, PeersRequest, SignedBatch
from p2p.domain.control_peers import ControlAddress
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.errors import ControlRefused
from tests.integration.driving.test_replaced_versions import Pieces, public, running, shot

HOLDER = "ab" * 32


class Heard:
    """A network that writes down what it is asked to do."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, bytes]] = {}
        self.topics: dict[str, tuple[Callable[..., None], Callable[..., bool]]] = {}
        self.addresses: list[ControlAddress] = []
        self.neighbours: frozenset[str] = frozenset()
        self.members: frozenset[str] | None = None

    async def publish(self, topic: str, payload: bytes, *, slot: str = "") -> None:
        self.values.setdefault(topic, {})[slot] = payload

    async def retract(self, topic: str) -> None:
        self.values.pop(topic, None)

    def subscribe(self, topic, receive, *, validate) -> None:
        self.topics[topic] = (receive, validate)

    def unsubscribe(self, topic: str) -> None:
        del self.topics[topic]

    def know(self, address: ControlAddress) -> None:
        self.addresses.append(address)

    def set_neighbours(self, keys: frozenset[str]) -> None:
        self.neighbours = keys

    def set_members(self, keys: frozenset[str] | None) -> None:
        self.members = keys


def on(board: Board, what: str) -> list[bytes]:
    return [posted.payload for posted in board.page(frozenset({f"j1/{what}"}), 0).values]


async def test_the_newest_version_is_announced_with_a_signature(deps: Deps) -> None:
    """Once for each version; after a roll-back the digest that is public now."""
    board, net = Board(), Heard()
    voice = Voice(deps, board, net)
    job = await running(deps)
    await voice.look()
    assert (on(board, "versions"), set(net.topics)) == ([], {"j1/versions", "j1/batches", "j1/haves"})
    for version, name in ((0, "a"), (1, "b"), (1, "other")):
        await announce(deps, Pieces(), job, shot(deps, version, name), (1, 2))
        await voice.look()
        newest = next(p for p in await public(deps, version=version) if p.state.value == "published")
        (said,) = on(board, "versions")
        assert net.values["j1/versions"] == {"": said}
        announced = Announcement.from_bytes(said)
        announced.check(public_hex(deps.key))
        assert (announced.version, announced.digest) == (version, newest.digest)
        assert announced.manifest == blake3(newest.manifest.encode()).hexdigest()
        number = board.page(frozenset({"j1/versions"}), 0).after
        await voice.look()
        assert board.page(frozenset({"j1/versions"}), 0).after == number, "it is not said twice"


async def test_whoever_asks_after_an_announcement_is_told_of_the_version(deps: Deps) -> None:
    """The bulletin keeps its reading for a while, but not beyond news of a version."""
    bulletin, job = Bulletin(deps), await running(deps)
    for version in (0, 1, 2):
        with deps.wake.watch(NEWS) as watch:
            await announce(deps, Pieces(), job, shot(deps, version, f"w{version}"), (1, 2))
            assert watch.take()
            assert not watch.take()
        assert (await bulletin.news()).postings["j1"].version == version


async def test_batches_of_a_delta_are_said_while_it_is_encoded(deps: Deps) -> None:
    """The last of them stay, and all go when the edge is public or given up. Keyframes are not for holders of anything."""
    board, net = Board(), Heard()
    voice = Voice(deps, board, net)
    await running(deps)
    previous, texts = "", []
    for number in range(BATCH_SLOTS + 2):
        piece = Piece(blake3(bytes([number])).hexdigest(), 1)
        texts.append(Batch("j1", 1, "delta", "cd" * 32, number, previous, (piece,), is_last=False).to_json())
        previous = text_hash(texts[-1])
        forthcoming.hear(deps, texts[-1], sign_batch(deps.key, texts[-1]))
        await voice.look()
    keyframe = Batch("j1", 1, "planes", None, 0, "", (piece,), is_last=True).to_json()
    forthcoming.hear(deps, keyframe, sign_batch(deps.key, keyframe))
    await voice.look()
    said = [SignedBatch.from_bytes(payload) for payload in on(board, "batches")]
    assert [batch.text for batch in said] == texts[2:]
    assert set(net.values["j1/batches"].values()) == set(on(board, "batches"))
    for batch in said:
        batch.check(public_hex(deps.key))
    forthcoming.close(deps, "j1")
    await voice.look()
    assert (on(board, "batches"), "j1/batches" in net.values) == ([], False)


async def test_what_gossip_brings_stands_on_the_board_until_the_job_ends(deps: Deps) -> None:
    board, net = Board(), Heard()
    voice = Voice(deps, board, net)
    job = await running(deps)
    await voice.look()
    receive, validate = net.topics["j1/haves"]
    have = HaveMap(HOLDER, "12" * 32, 3, ((0, 2),), 5).to_bytes()
    assert validate(HOLDER, have)
    assert not validate("cd" * 32, have), "another's word on it"
    receive(HOLDER, have)
    assert on(board, "haves") == [], "it would go to everyone who polls"
    receive, _ = net.topics["j1/versions"]
    receive(HOLDER, b"signed")
    assert on(board, "versions") == [b"signed"]
    await deps.store.write(lambda tx: tx.put(replace(job, state=JobState.COMPLETED)))
    await voice.look()
    assert (on(board, "versions"), net.topics) == ([], {})


def worker(seed: int, state: WorkerState = WorkerState.ACTIVE, **peer: object) -> Worker:
    key = f"{seed:02x}" * 32
    address = {"host": "203.0.113.7", "port": 7800, "certificate_sha256": "ef" * 32, **peer} if peer else None
    return Worker(
        worker_id(key), key, f"n{seed}", "o", "i", state, "", 0.0, 0.0, 0.0, 1, {"kind": "torch"}, 0, 4, 1.0, peer=address
    )


async def test_enrolled_workers_and_nobody_else_are_members(deps: Deps) -> None:
    net = Heard()
    rows = [
        worker(1),
        worker(2, WorkerState.GONE),
        worker(3, WorkerState.QUARANTINED),
        worker(4, control_port=None),
        worker(5, WorkerState.STANDBY, control_port=7801),
    ]
    await deps.store.write(lambda tx: tx.put(Invite("i", "h" * 64, "o", 9, 0.0, 1e12), *rows))
    await admit(deps, net)
    assert net.members == {public_hex(deps.key), "01" * 32, "04" * 32, "05" * 32}
    assert (net.addresses, net.neighbours) == ([ControlAddress("05" * 32, "203.0.113.7", 7801)], {"05" * 32})


async def test_a_worker_that_asks_without_end_is_refused_in_words(deps: Deps) -> None:
    """On either way, before a row is read; the questions answered are counted by way."""
    desk = control_desk(deps, NoSeeder())
    body = Ask(PEERS, PeersRequest("j1").to_bytes()).to_bytes()
    reasons = []
    for _ in range(int(ASKED_BURST) + 5):
        try:
            await desk.post("ab" * 32, REQUEST, body)
        except ControlRefused as error:
            reasons.append(str(error))
    assert "belongs to no worker" in reasons[0]
    assert "more than 2 times a second" in reasons[-1]
    assert deps.control.asked["https"] <= ASKED_BURST + 2
