"""A worker's `Peers` with real bulk nodes on loopback: what it takes part in, how long it waits, and what it counts."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from p2p.adapters.bulk.events import BatchSeen, PeerClosed
from p2p.adapters.piece_store import PieceStore, UnsyncedFiles
from p2p.adapters.tls import self_signed
from p2p.codec.pieces import name
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch
from tests.integration.p2p.bulk.nodes import Node, holds_all, make_pieces, running, ticket
from tests.integration.worker_node.peers_here import HERE, met, offer, peers_here, transfer_of
from worker_node.adapters.peers import Peers
from worker_node.config import LinkSettings
from worker_node.domain import patience
from worker_node.errors import ConfigError

Until = Callable[..., Any]
BASE = "b" * 64
SIZE = 20_000


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For those who are given up: less waiting. Whoever brings something has the true patience."""
    for which, seconds in (("ASKED_S", 0.3), ("DIALLED_S", 1.0), ("SIGN_S", 0.6), ("STALL_S", 1.0)):
        monkeypatch.setattr(patience, which, seconds)


async def bring(peers: Peers, transfers: dict[str, int], told: list[int] | None = None) -> bool:
    return await asyncio.wait_for(peers.bring("job", transfers, on_bytes=(told if told is not None else []).append), 20)


def known(peers: Peers) -> set[str]:
    return {one.transfer for one in peers.state().transfers}


async def test_a_wanted_transfer_comes_from_a_peer_and_each_byte_counts_once(tmp_path: Path) -> None:
    """A piece that stands in the row twice travels once."""
    data = make_pieces(6, SIZE)
    transfer, batches = transfer_of([*data, data[2]], version=1)
    node, told = Node(tmp_path, "w-b"), list[int]()
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, store):
            met(peers, node)
            assert await bring(peers, {transfer: 1}, told)
            assert holds_all(store, data)
            assert sum(told) == 6 * SIZE
            assert peers.pieces == {name(one).digest for one in data}
            assert peers.take_bytes({transfer}) == {"w-b": 6 * SIZE}
            assert peers.take_bytes({transfer}) == {}
            assert await bring(peers, {transfer: 1}), "it is complete already"


@pytest.mark.usefixtures("short_waits")
async def test_nobody_to_ask_costs_no_wait(tmp_path: Path) -> None:
    async with peers_here(tmp_path) as (peers, _):
        begun = time.monotonic()
        assert not await bring(peers, {"a" * 64: 1})
        assert 0.3 <= time.monotonic() - begun < 1.0, "the coordinator might still name somebody"
        peers.meet_nobody_new("job")
        begun = time.monotonic()
        assert not await bring(peers, {"a" * 64: 1})
        assert time.monotonic() - begun < 0.2


@pytest.mark.usefixtures("short_waits")
async def test_a_peer_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    node = Node(tmp_path, "seeder", is_seeder=True)
    node.node.close()
    async with peers_here(tmp_path) as (peers, _):
        met(peers, node)
        begun = time.monotonic()
        assert not await bring(peers, {"a" * 64: 1})
        assert 0.5 < time.monotonic() - begun < 2.0
        met(peers, node)  # named again: no news
        begun = time.monotonic()
        assert not await bring(peers, {"a" * 64: 1})
        assert time.monotonic() - begun < 0.2


@pytest.mark.usefixtures("short_waits")
async def test_connected_peers_that_bring_nothing_are_given_up(tmp_path: Path, until: Until) -> None:
    """One that knows nothing of the transfer, and one that knows its row and holds no piece."""
    transfer, _ = transfer_of(make_pieces(3, SIZE), version=1)
    ignorant, empty = Node(tmp_path, "w-b"), Node(tmp_path, "w-c")
    with running(ignorant, empty):
        async with peers_here(tmp_path) as (peers, _):
            met(peers, ignorant)
            await until(lambda: peers.is_connected("job"), "a connection")
            begun = time.monotonic()
            assert not await bring(peers, {transfer: 1})
            assert 0.5 < time.monotonic() - begun < 1.5
            other, batches = transfer_of(make_pieces(3, SIZE, 1), version=2)
            offer(empty, batches)
            met(peers, ignorant, empty)
            await until(lambda: len(peers.state().links) == 2, "two connections")
            begun = time.monotonic()
            assert not await bring(peers, {other: 2})
            assert 0.9 < time.monotonic() - begun < 4.0, "the row came: that is progress"


async def test_only_deltas_on_held_versions_are_taken_unasked(tmp_path: Path, until: Until) -> None:
    """And before they are announced."""
    data = [make_pieces(3, SIZE, seed) for seed in range(3)]
    mine, batches = transfer_of(data[0], version=2, base=BASE)
    node = Node(tmp_path, "seeder", is_seeder=True)
    with running(node):
        offer(node, batches, data[0])
        for number, base in ((1, None), (2, "c" * 64)):
            offer(node, transfer_of(data[number], version=2, base=base)[1], data[number])
        async with peers_here(tmp_path) as (peers, store):
            peers.hold([BASE])
            met(peers, node)
            await until(lambda: holds_all(store, data[0]), "the delta")
            assert known(peers) == {mine}
            assert not holds_all(store, data[1][:1])
            assert not holds_all(store, data[2][:1])
            assert await bring(peers, {mine: 2})
            assert peers.take_bytes({mine}) == {"seeder": 3 * SIZE}, "what came ahead counts too"


async def test_of_two_transfers_to_a_version_the_first_is_taken_unasked(tmp_path: Path, until: Until) -> None:
    """The other one is for those who hold another base; asked for by name, it comes."""
    data = [make_pieces(3, SIZE, seed) for seed in range(2)]
    made = [transfer_of(data[0], version=2, base=BASE), transfer_of(data[1], version=2, base="d" * 64)]
    node = Node(tmp_path, "seeder", is_seeder=True)
    with running(node):
        offer(node, made[0][1], data[0])
        async with peers_here(tmp_path) as (peers, store):
            peers.hold([BASE, "d" * 64])
            met(peers, node)
            await until(lambda: holds_all(store, data[0]), "the first")
            offer(node, made[1][1], data[1])
            later, batches = transfer_of(make_pieces(1, SIZE, 9), version=3, base=BASE)
            offer(node, batches, make_pieces(1, SIZE, 9))
            await until(lambda: later in known(peers), "what was told after the second")
            assert known(peers) == {made[0][0], later}
            assert await bring(peers, {made[1][0]: 2})
            assert holds_all(store, data[1])


async def test_old_transfers_are_let_go_by_job(tmp_path: Path, until: Until) -> None:
    """A high number of one job says nothing about another's; a transfer that is being brought stays."""
    rows = {(job, version): make_pieces(2, 1000, version) for job, version in (("job", 4), ("job", 5), ("job", 9))}
    made = {place: transfer_of(data, version=place[1], base=BASE) for place, data in rows.items()}
    node = Node(tmp_path, "w-b")
    with running(node):
        for place, (_, batches) in made.items():
            offer(node, batches, rows[place])
        async with peers_here(tmp_path) as (peers, store):
            peers.hold([BASE])
            met(peers, node)
            await until(lambda: len(known(peers)) == 3 and all(holds_all(store, data) for data in rows.values()), "three transfers")
            peers.let_go({"job": 5, "other": 100})
            await until(lambda: len(known(peers)) == 2, "one is let go")
            assert peers.pieces == {name(one).digest for data in (rows["job", 5], rows["job", 9]) for one in data}
            waiting = asyncio.create_task(bring(peers, {"e" * 64: 1}))
            await asyncio.sleep(0.05)
            peers.let_go({"other": 100})
            assert known(peers) == set()
            assert not await waiting, "nobody has it"
            assert await bring(peers, {made["job", 4][0]: 4}), "asked for by name, it is taken part in again"


async def test_an_abandoned_transfer_takes_no_more_of_the_link(tmp_path: Path, until: Until) -> None:
    data = make_pieces(40, 10_000)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b", up=50_000.0)
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, store):
            met(peers, node)
            told: list[int] = []
            task = asyncio.create_task(bring(peers, {transfer: 1}, told))
            await until(lambda: len(told) >= 2, "two pieces")
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            peers.abandon([transfer])
            await asyncio.sleep(0.3)
            had = sum(1 for _ in store.digests())
            await asyncio.sleep(0.7)
            assert sum(1 for _ in store.digests()) == had < 40
            assert peers.pieces == frozenset()


async def test_a_disk_that_takes_nothing_ends_the_wait_and_a_later_try_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = make_pieces(3, SIZE)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b")

    class FullDisk(UnsyncedFiles):
        def write_file(self, path: Path, data: bytes | memoryview) -> None:
            raise OSError(28, "No space left on device")

    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, store):
            monkeypatch.setattr(patience, "STALL_S", 30.0)
            with monkeypatch.context() as patched:
                patched.setattr(store, "_files", FullDisk())
                met(peers, node)
                assert not await bring(peers, {transfer: 1})
            assert await bring(peers, {transfer: 1})
            assert holds_all(store, data)


@pytest.mark.usefixtures("short_waits")
async def test_who_does_not_listen_uploads_all_the_same(tmp_path: Path, until: Until) -> None:
    """Its pieces came from elsewhere; the peer that it dialled gets them over that connection."""
    data = make_pieces(5, SIZE)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b")
    with running(node):
        offer(node, batches)
        async with peers_here(tmp_path) as (peers, store):
            met(peers, node)
            assert not await bring(peers, {transfer: 1}), "the peer has nothing"
            assert peers.uplink == 0.0
            for one in data:
                store.put(name(one), one)
                peers.found([transfer, "d" * 64], name(one).digest)
            await until(lambda: holds_all(node.store, data), "the upload")
            assert await bring(peers, {transfer: 1})
            assert peers.uplink > 0
            assert peers.take_bytes({transfer}) == {}, "no peer brought a byte"
            assert node.node.state().links[0].peer == HERE


async def test_tls_below_1_3_is_refused(tmp_path: Path, unused_port: int) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    async with peers_here(tmp_path, listens=unused_port):
        context.maximum_version = ssl.TLSVersion.TLSv1_3
        _, writer = await asyncio.open_connection("127.0.0.1", unused_port, ssl=context)
        writer.close()
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", unused_port, ssl=context)


async def test_a_port_that_is_taken_is_told_with_the_option_to_change(tmp_path: Path, unused_port: int) -> None:
    async with peers_here(tmp_path / "one", listens=unused_port):
        with pytest.raises(ConfigError, match=f"--peer-port {unused_port} cannot be served"):
            async with peers_here(tmp_path / "two", listens=unused_port):
                pass


async def test_another_job_means_other_peers(tmp_path: Path, until: Until) -> None:
    one, two = Node(tmp_path, "w-b"), Node(tmp_path, "w-c")
    with running(one, two):
        async with peers_here(tmp_path) as (peers, _):
            met(peers, one)
            await until(lambda: peers.is_connected("job"), "the first job's connection")
            met(peers, two, job="other")
            await until(lambda: peers.is_connected("other") and not peers.is_connected("job"), "the second job's")
            peers.meet_nobody_new("other")
            assert peers.is_connected("other"), "one failed question ends no connection"


async def test_a_limit_for_peers_holds(tmp_path: Path) -> None:
    data = make_pieces(40, SIZE)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b")
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path, link=LinkSettings(down_bytes_per_s=1e9)) as (peers, _):
            peers.limit_down(400_000.0)
            met(peers, node)
            begun = time.monotonic()
            assert await bring(peers, {transfer: 1})
            assert time.monotonic() - begun > 1.0, "800 kB, less what goes at once, at 400 kB/s"


async def test_pieces_that_were_swept_are_not_there_because_they_were_complete(tmp_path: Path) -> None:
    """`bring` is about the transfer; whoever needs the pieces looks for them."""
    data = make_pieces(3, SIZE)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b")
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, store):
            met(peers, node)
            assert await bring(peers, {transfer: 1})
            PieceStore(store.root).remove(name(data[1]).digest)
            assert await bring(peers, {transfer: 1})
            assert not holds_all(store, data)


async def test_a_peer_that_is_left_out_is_let_go_once_nothing_is_under_way(tmp_path: Path, until: Until) -> None:
    """Neighbours that flap cut no transfer off: the link that carries pieces stays, an idle one ends."""
    data = make_pieces(40, 10_000)
    transfer, batches = transfer_of(data, version=1)
    busy, idle = Node(tmp_path, "w-b", up=100_000.0), Node(tmp_path, "w-c", wants=lambda first: False)
    with running(busy, idle):
        offer(busy, batches, data)
        async with peers_here(tmp_path) as (peers, _):
            met(peers, busy, idle)
            told: list[int] = []
            task = asyncio.create_task(bring(peers, {transfer: 1}, told))
            await until(lambda: told and len(peers.state().links) == 2, "two links, one at work")
            first = next(link.bytes_down for link in peers.state().links if link.peer == "w-b")
            met(peers)
            await until(lambda: len(peers.state().links) == 1, "the idle link ends")
            assert await task
            (link,) = peers.state().links
            assert (link.peer, link.bytes_down) == ("w-b", 400_000)
            assert 0 < first < 400_000
            met(peers)
            met(peers)
            await until(lambda: not peers.state().links, "the other one, when it is idle")


async def test_a_link_that_the_peer_dialled_is_the_peers_to_end(tmp_path: Path, until: Until, unused_port: int) -> None:
    node = Node(tmp_path, "w-b")
    with running(node):
        async with peers_here(tmp_path, listens=unused_port) as (peers, store):
            _, _, certificate = self_signed(store.root / "tls", ("127.0.0.1", HERE))
            node.node.dial(PeerInfo("127.0.0.1", unused_port, certificate), ticket("w-b", HERE))
            await until(lambda: peers.is_connected("job"), "the peer's link")
            met(peers, node)
            met(peers)
            peers.meet_nobody()
            await asyncio.sleep(0.3)
            assert [link.dialled for link in peers.state().links] == [False]
            assert not any(isinstance(event, PeerClosed) for event in node.told), "not ended and dialled again"


async def test_after_the_last_job_nothing_is_left(tmp_path: Path, until: Until) -> None:
    data = make_pieces(3, SIZE)
    transfer, batches = transfer_of(data, version=1)
    node = Node(tmp_path, "w-b")
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, _):
            met(peers, node)
            assert await bring(peers, {transfer: 1})
            peers.meet_nobody()
            await until(lambda: not peers.state().links, "the link ends")
            assert (known(peers), peers.pieces) == (set(), frozenset())
            met(peers, node)
            assert await bring(peers, {transfer: 1}), "brought again, it is taken part in again"


async def test_what_is_let_go_stays_so_until_it_is_asked_for(tmp_path: Path, until: Until) -> None:
    """Complete or not, taken unasked or not; and what the node told of it before, but is heard late, brings nothing back."""
    data = make_pieces(3, SIZE)
    transfer, batches = transfer_of(data, version=2, base=BASE)
    node = Node(tmp_path, "w-b")
    with running(node):
        offer(node, batches, data)
        async with peers_here(tmp_path) as (peers, store):
            peers.hold([BASE])
            met(peers, node)
            await until(lambda: holds_all(store, data) and len(peers.pieces) == 3, "the delta")
            peers.forget([transfer])
            first = Batch.from_json(batches[0][0])
            peers._heard(BatchSeen(transfer, first, *batches[0], "w-b"))
            peers.take_batch(*batches[0])
            assert (known(peers), peers.pieces) == (set(), frozenset())
            assert await bring(peers, {transfer: 2})
            assert len(peers.pieces) == 3
