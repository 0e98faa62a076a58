"""Bulk nodes on loopback: pieces both ways on one connection, swarms, restarts, limits."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import BatchSeen, GaveUp, PeerClosed, PeerDropped, PeerOpened, PieceStored, TransferComplete
from p2p.codec.pieces import name
from p2p.domain import bulk_frames
from p2p.domain.batches import Batch, text_hash
from tests.integration.p2p.bulk.nodes import (
    JOB,
    LIMITS,
    Node,
    eventually,
    holds_all,
    make_batches,
    make_pieces,
    put_all,
    running,
    ticket,
)
from tests.integration.p2p.bulk.stranger import ASK, FORGET, KNOWS, Stranger


def opened(node: Node, other: str) -> None:
    node.wait_for(lambda one: isinstance(one, PeerOpened) and one.peer == other)


def complete(node: Node, within_s: float = 20) -> None:
    node.wait_event(TransferComplete, within_s=within_s)


def received(node: Node, transfer: str) -> int:
    return next(one.bytes_down for one in node.node.state().transfers if one.transfer == transfer)


def test_pieces_flow_both_ways_on_the_one_connection_of_a_peer_that_does_not_listen(tmp_path: Path) -> None:
    data = make_pieces(24, 70_000)
    listener, dialler = Node(tmp_path, "w-a"), Node(tmp_path, "w-b", listens=False)
    put_all(listener.store, data[:12])
    put_all(dialler.store, data[12:])
    with running(listener, dialler):
        dialler.dial(listener)
        opened(listener, "w-b")
        for text, signature in make_batches(data):
            transfer = dialler.node.add_batch(text, signature)
            listener.node.add_batch(text, signature)
        complete(listener)
        complete(dialler)
        assert holds_all(listener.store, data)
        assert holds_all(dialler.store, data)
        (link,) = dialler.node.state().links
        assert (link.bytes_up, link.bytes_down, link.dialled) == (12 * 70_000, 12 * 70_000, True)
        assert received(listener, transfer) == received(dialler, transfer) == 12 * 70_000


def test_a_peer_learns_of_a_transfer_from_another_that_is_no_seeder(tmp_path: Path) -> None:
    """The batches are asked for and checked, then the pieces."""
    data = make_pieces(30, 20_000)
    batches = make_batches(data, per_batch=1)  # more than one answer holds
    first, second = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    put_all(first.store, data)
    with running(first, second):
        for text, signature in batches:
            first.node.add_batch(text, signature)
        second.dial(first)
        complete(second)
        assert holds_all(second.store, data)
        seen = [one for one in second.told if isinstance(one, BatchSeen)]
        assert [(one.batch.number, one.peer) for one in seen] == [(number, "w-a") for number in range(30)]
        assert [(one.text, one.signature) for one in seen] == batches
        stored = [one for one in second.told if isinstance(one, PieceStored)]
        assert sorted(one.index for one in stored) == list(range(30))


def test_a_swarm_of_four_and_a_seeder_ends_with_the_right_bytes(tmp_path: Path) -> None:
    data = make_pieces(60, 65_536)
    seeder = Node(tmp_path, "seeder", is_seeder=True, up=4e6)
    peers = [Node(tmp_path, f"w-{number}", up=4e6) for number in range(4)]
    put_all(seeder.store, data)
    with running(seeder, *peers):
        for number, peer in enumerate(peers):
            for other in (seeder, *peers[:number]):
                peer.dial(other)
        for peer in peers:
            for other in (seeder, *peers):
                if other is not peer:
                    opened(peer, other.peer)
        begun = time.monotonic()
        for text, signature in make_batches(data, per_batch=16):
            transfer = seeder.node.add_batch(text, signature)
        for peer in peers:
            complete(peer)
        spent = time.monotonic() - begun
        assert all(holds_all(peer.store, data) for peer in peers)
        (state,) = seeder.node.state().transfers
        assert state.first_sent_at is not None
        assert state.copies < 3  # four without the swarm
        assert spent < 4 * 60 * 65_536 / 4e6  # the time of a star
        for peer in peers:
            assert received(peer, transfer) <= 1.1 * 60 * 65_536


def test_a_batch_that_comes_later_is_fetched_too(tmp_path: Path) -> None:
    data = make_pieces(20, 30_000)
    batches = make_batches(data, per_batch=10)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        seeder.node.add_batch(*batches[0])
        assert eventually(lambda: sum(isinstance(one, PieceStored) for one in peer.told) == 10)
        assert not any(isinstance(one, TransferComplete) for one in peer.told)
        seeder.node.add_batch(*batches[1])
        complete(peer)
        assert holds_all(peer.store, data)


def test_a_late_joiner_is_served(tmp_path: Path) -> None:
    data = make_pieces(20, 30_000)
    seeder, peer, late = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    put_all(seeder.store, data)
    with running(seeder, peer, late):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        complete(peer)
        late.dial(peer)
        complete(late)
        assert holds_all(late.store, data)


def test_several_transfers_share_a_connection(tmp_path: Path) -> None:
    rows = [make_pieces(10, 50_000, seed) for seed in range(3)]
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    for row in rows:
        put_all(seeder.store, row)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for version, row in enumerate(rows):
            for text, signature in make_batches(row, version=version):
                seeder.node.add_batch(text, signature)
        assert eventually(lambda: sum(isinstance(one, TransferComplete) for one in peer.told) == 3)
        assert all(holds_all(peer.store, row) for row in rows)
        assert len(peer.node.state().links) == 1


def test_pieces_with_the_same_content_travel_once_and_count_for_each_place(tmp_path: Path) -> None:
    data = [b"z" * 40_000] * 5 + make_pieces(2, 40_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        complete(peer)
        assert holds_all(peer.store, data)


def test_a_restarted_node_fetches_only_what_is_missing(tmp_path: Path) -> None:
    data = make_pieces(20, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    put_all(peer.store, data[::2])
    peer.store.path(name(data[0]).digest).write_bytes(b"cut short")  # as a power loss may leave it
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            transfer = seeder.node.add_batch(text, signature)
        complete(peer)
    assert received(peer, transfer) == 11 * 50_000
    stored = {one.index for one in peer.told if isinstance(one, PieceStored)}
    assert stored == {0, *range(1, 20, 2)}


def test_a_piece_that_the_disk_damaged_is_not_passed_on_but_fetched_again(tmp_path: Path) -> None:
    data = make_pieces(6, 50_000)
    damaged, whole, late = Node(tmp_path, "w-a"), Node(tmp_path, "w-b"), Node(tmp_path, "w-c")
    put_all(damaged.store, data)
    put_all(whole.store, data)
    damaged.store.path(name(data[3]).digest).write_bytes(bytes(50_000))
    with running(damaged, whole, late):
        for text, signature in make_batches(data):
            damaged.node.add_batch(text, signature)
            whole.node.add_batch(text, signature)
        late.dial(damaged)
        assert eventually(lambda: len(list(late.store.digests())) == 5)
        damaged.dial(whole)
        complete(late)
        assert holds_all(late.store, data)
        assert holds_all(damaged.store, data)
        assert not any(isinstance(one, PeerDropped) for one in late.told)


def test_pieces_that_the_owner_brings_are_not_fetched(tmp_path: Path) -> None:
    data = make_pieces(10, 50_000)
    peer, other = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    with running(peer, other):
        for text, signature in make_batches(data):
            transfer = peer.node.add_batch(text, signature)
        for one in data:
            peer.store.put(name(one), one)
            peer.node.found(transfer, name(one).digest)
        peer.node.found(transfer, "0" * 64)
        peer.node.found("1" * 64, name(data[0]).digest)
        complete(peer)
        other.dial(peer)
        complete(other)


def test_both_dial_and_one_connection_stays(tmp_path: Path) -> None:
    """The one that the smaller id dialled."""
    data = make_pieces(10, 50_000)
    one, two = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    put_all(one.store, data)
    with running(one, two):
        one.dial(two)
        two.dial(one)
        opened(one, "w-b")
        opened(two, "w-a")

        def settled() -> bool:
            mine, theirs = one.node.state().links, two.node.state().links
            return [link.dialled for link in mine] == [True] and [link.dialled for link in theirs] == [False]

        assert eventually(settled)
        for text, signature in make_batches(data):
            one.node.add_batch(text, signature)
        complete(two)
        assert settled()


def test_a_lost_connection_is_dialled_again(tmp_path: Path) -> None:
    data = make_pieces(10, 50_000)
    one, two = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    put_all(one.store, data)
    with running(two):
        with running(one):
            two.dial(one)
            opened(two, "w-a")
        two.wait_event(PeerClosed)
        again = Node(tmp_path, "w-a", port=one.address.port)
        with running(again):
            for text, signature in make_batches(data):
                again.node.add_batch(text, signature)
            complete(two)


def test_the_upload_limit_holds_and_changes_live(tmp_path: Path) -> None:
    data = make_pieces(40, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True, up=1e6), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        time.sleep(0.5)
        assert seeder.node.state().transfers[0].bytes_up <= 1e6 * 0.6 + 150_000
        seeder.node.set_limits(up=None, down=None, cap_bytes=None)
        begun = time.monotonic()
        complete(peer)
        assert time.monotonic() - begun < 1.0  # 1.4 s at the old rate


def test_the_download_limit_holds(tmp_path: Path) -> None:
    data = make_pieces(40, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a", down=2e6)
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        begun = time.monotonic()
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        complete(peer)
        assert 0.8 < time.monotonic() - begun < 5  # 2 MB at 2 MB/s, less a burst


def test_uploads_stop_when_the_month_is_used_up_and_downloads_go_on(tmp_path: Path) -> None:
    data, own = make_pieces(20, 50_000), make_pieces(5, 50_000, seed=9)
    counter = tmp_path / "uploaded.json"
    one, two = Node(tmp_path, "w-a", cap_bytes=300_000, counter=counter), Node(tmp_path, "w-b")
    put_all(one.store, data)
    put_all(two.store, own)
    with running(one, two):
        two.dial(one)
        opened(two, "w-a")
        for text, signature in make_batches(data):
            one.node.add_batch(text, signature)
        for text, signature in make_batches(own, version=2):
            other = two.node.add_batch(text, signature)
        one.wait_for(lambda told: isinstance(told, TransferComplete) and told.transfer == other)
        assert holds_all(one.store, own)
        assert eventually(lambda: one.node.state().used_this_month >= 300_000)
        time.sleep(0.3)
        assert one.node.state().used_this_month <= 300_000 + 256 * 1024
        assert not holds_all(two.store, data)
    again = Node(tmp_path, "w-a", cap_bytes=300_000, counter=counter)
    with running(again):
        assert again.node.state().used_this_month >= 300_000  # a restart does not open a new month


def test_a_transfer_that_the_owner_does_not_want_is_declined_until_it_does(tmp_path: Path) -> None:
    data = make_pieces(5, 50_000)

    def wants(first: Batch) -> bool:
        return first.version != 1

    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a", wants=wants)
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            transfer = seeder.node.add_batch(text, signature)
        for text, signature in make_batches(make_pieces(1, 10), version=2):
            peer.node.add_batch(text, signature)
        time.sleep(0.3)
        assert transfer not in {one.transfer for one in peer.node.state().transfers}
        assert peer.node.state().links
        for text, signature in make_batches(data):
            peer.node.add_batch(text, signature)
        peer.wait_for(lambda one: isinstance(one, TransferComplete) and one.transfer == transfer)


def test_batches_under_way_when_the_owner_changes_its_mind_are_nobodys_fault(tmp_path: Path) -> None:
    """The first was declined; the second comes when the transfer is wanted, before the seeder has read that: it is asked from the start."""
    batches = make_batches(make_pieces(4, 100), per_batch=2)
    transfer = text_hash(batches[0][0])
    wanted: set[str] = set()
    node = Node(tmp_path, "w-a", wants=lambda first: bool(wanted))
    with running(node), Stranger(node.address) as seeder:
        seeder.hello("seeder", "w-a")
        seeder.say(KNOWS, bytes.fromhex(transfer), transfer=1, a=1, flag=bulk_frames.FOLLOWS)
        seeder.stream.sendall(bulk_frames.batch(1, *batches[0]))
        seeder.hear(FORGET)
        wanted.add(transfer)
        node.node.want(transfer)
        seeder.say(KNOWS, bytes.fromhex(transfer), transfer=1, a=2, flag=bulk_frames.FOLLOWS)
        seeder.stream.sendall(bulk_frames.batch(1, *batches[1]))
        assert seeder.hear(ASK)[2] == 0
        for text, signature in batches:
            seeder.stream.sendall(bulk_frames.batch(1, text, signature))
        node.wait_for(lambda one: isinstance(one, BatchSeen) and one.batch.is_last)
        assert [one.batch.number for one in node.told if isinstance(one, BatchSeen)] == [0, 1]
        assert node.node.state().links


def test_batches_without_a_beginning_are_let_fall_within_reason(tmp_path: Path) -> None:
    later = make_batches(make_pieces(4, 100), per_batch=2)[1]
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, junk_bytes=3 * len(later[0])))
    with running(node), Stranger(node.address) as seeder:
        seeder.hello("seeder", "w-a")
        seeder.say(KNOWS, b"a" * 32, transfer=1, a=2, flag=bulk_frames.FOLLOWS)
        for _ in range(4):
            seeder.stream.sendall(bulk_frames.batch(1, *later))
        assert "for transfers that are over or had not begun" in seeder.reason()


def test_a_retired_transfer_is_spoken_of_no_more(tmp_path: Path) -> None:
    data = make_pieces(40, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True, up=1e6), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            transfer = seeder.node.add_batch(text, signature)
        peer.wait_event(PieceStored)
        peer.node.retire(transfer)
        time.sleep(0.5)
        held = len(list(peer.store.digests()))
        time.sleep(0.3)
        assert len(list(peer.store.digests())) == held < 40
        assert peer.node.state().transfers == ()
        assert len(peer.node.state().links) == 1  # the connection lives on
        seeder.node.retire(transfer)
        other = make_pieces(3, 10_000, seed=5)
        put_all(seeder.store, other)
        for text, signature in make_batches(other, version=2):
            seeder.node.add_batch(text, signature)
        complete(peer)


def test_jobs_do_not_mix(tmp_path: Path) -> None:
    data = make_pieces(3, 10_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    with running(seeder, peer):
        peer.dial(seeder, job="other")
        opened(peer, "seeder")
        for text, signature in make_batches(data, job=JOB):
            seeder.node.add_batch(text, signature)
        time.sleep(0.3)
        assert peer.node.state().transfers == ()
        peer.dial(seeder)
        complete(peer)
        assert {link.job_id for link in peer.node.state().links} == {JOB, "other"}


def test_a_full_disk_halts_the_transfer_until_the_owner_resumes_it(tmp_path: Path) -> None:
    data = make_pieces(6, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    keep = peer.store.keep
    full = [True]

    def refusing(piece: object, content: object) -> None:
        if full[0]:
            raise OSError(28, "No space left on device")
        keep(piece, content)  # type: ignore[arg-type]

    peer.store.keep = refusing  # type: ignore[method-assign]
    with running(seeder, peer):
        peer.dial(seeder)
        opened(peer, "seeder")
        for text, signature in make_batches(data):
            transfer = seeder.node.add_batch(text, signature)
        told = peer.wait_event(GaveUp)
        assert isinstance(told, GaveUp)
        assert told.is_final
        assert "No space left" in told.reason
        assert "free some space" in told.reason
        full[0] = False
        peer.node.resume(transfer)
        complete(peer)
        assert holds_all(peer.store, data)


@pytest.mark.parametrize("host", ["10.0.0.1", "127.0.0.1"])
def test_private_addresses_are_not_dialled_unless_listed(tmp_path: Path, host: str) -> None:
    from p2p.domain.addresses import PeerInfo
    from p2p.errors import PeerLost

    node = Node(tmp_path, "w-a", allowed_networks=())
    with running(node), pytest.raises(PeerLost, match=r"not dialled: .* is not a public address"):
        node.node.dial(PeerInfo(host, 5000, "00" * 32), ticket("w-a", "w-b"))
