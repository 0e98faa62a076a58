"""Disks that hang or fill, pieces in memory, adverts."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

from p2p.adapters.bulk.events import GaveUp, PeerClosed, PeerOpened, PieceStored, TransferComplete
from p2p.adapters.bulk.recent import Recent
from p2p.codec.pieces import name
from p2p.domain import bulk_frames
from p2p.domain.manifest import Piece
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import LIMITS, Node, eventually, holds_all, make_batches, make_pieces, put_all, running
from tests.integration.p2p.bulk.stranger import Stranger


class Hanging:
    """A store's `keep` that waits until `go` is set."""

    def __init__(self, node: Node) -> None:
        self.go = threading.Event()
        self._keep = node.store.keep
        node.store.keep = self.keep  # type: ignore[method-assign]

    def keep(self, piece: Piece, data: bytes | bytearray) -> None:
        self.go.wait(20)
        self._keep(piece, data)


def test_of_a_retired_transfer_nothing_is_remembered(tmp_path: Path) -> None:
    """A seeder lives as long as its coordinator, and offers pieces of new names with each version."""
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    with running(seeder, peer):
        peer.dial(seeder)
        peer.wait_event(PeerOpened)
        for version in range(3):
            data = make_pieces(6, 20_000, seed=version)
            put_all(seeder.store, data)
            for text, signature in make_batches(data, version=version):
                transfer = seeder.node.add_batch(text, signature)
            peer.wait_for(lambda one, transfer=transfer: isinstance(one, TransferComplete) and one.transfer == transfer)  # type: ignore[misc]
            assert len(seeder.store._sound) == 6
            seeder.node.retire(transfer)
            assert not seeder.store._sound
            assert holds_all(seeder.store, data), "they stay in the store"


def received(node: Node) -> int:
    return sum(one.bytes_down for one in node.node.state().transfers)


def test_a_disk_that_hangs_ends_no_connection(tmp_path: Path) -> None:
    """Longer than a peer may be silent. Nothing is told as stored, or announced, before it is."""
    data = make_pieces(10, 50_000)
    limits = replace(LIMITS, ping_s=0.1, silence_s=0.6)
    seeder = Node(tmp_path, "seeder", is_seeder=True, limits=limits)
    middle, last = Node(tmp_path, "w-a", limits=limits), Node(tmp_path, "w-b", limits=limits)
    put_all(seeder.store, data)
    disk = Hanging(middle)
    with running(seeder, middle, last):
        middle.dial(seeder)
        last.dial(middle)
        for node, other in ((middle, "seeder"), (last, "w-a")):
            node.wait_for(lambda one, other=other: isinstance(one, PeerOpened) and one.peer == other)  # type: ignore[misc]
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        assert eventually(lambda: received(middle) == 500_000)
        time.sleep(1.0)
        assert list(last.store.digests()) == []
        assert list(middle.store.digests()) == []
        assert not any(isinstance(one, PieceStored | TransferComplete) for one in middle.told)
        assert middle.node.state().transfers[0].held == 0
        assert not any(isinstance(one, PeerClosed) for one in seeder.told + middle.told + last.told)
        disk.go.set()
        for node in (middle, last):
            node.wait_event(TransferComplete)
        assert holds_all(middle.store, data)
        assert holds_all(last.store, data)


def test_what_waits_for_the_disk_is_bounded(tmp_path: Path) -> None:
    data = make_pieces(24, 1 << 20)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(tmp_path, "w-a")
    put_all(seeder.store, data)
    disk = Hanging(peer)
    with running(seeder, peer):
        peer.dial(seeder)
        peer.wait_event(PeerOpened)
        for text, signature in make_batches(data):
            seeder.node.add_batch(text, signature)
        assert eventually(lambda: LIMITS.buffer_bytes - peer.node._hub.buffers_left > 8 << 20)
        time.sleep(0.5)
        assert LIMITS.buffer_bytes - peer.node._hub.buffers_left <= 10 << 20
        disk.go.set()
        peer.wait_event(TransferComplete)
        assert holds_all(peer.store, data)
        assert peer.node._hub.buffers_left == LIMITS.buffer_bytes


def test_a_piece_that_could_not_be_stored_is_offered_no_more(tmp_path: Path) -> None:
    data = make_pieces(4, 30_000)
    peer = Node(tmp_path, "w-a", takes_any_push=True)

    def full(_piece: Piece, _data: bytes | bytearray) -> None:
        raise OSError(28, "No space left on device")

    peer.store.keep = full  # type: ignore[method-assign, assignment]
    with running(peer), Stranger(peer.address) as other:
        for text, signature in make_batches(data):
            transfer = peer.node.add_batch(text, signature)
        other.hello("w-x", "w-a")
        other.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        other.say(wire.DATA, data[2], transfer=1, a=2)
        peer.wait_event(GaveUp)
        other.say(wire.REQUEST, transfer=1, a=2)
        assert other.hear(wire.ABSENT)[2] == 2
        assert peer.node.state().transfers[0].held == 0


def test_adverts_are_coalesced_and_what_the_peer_holds_waits_for_company(tmp_path: Path) -> None:
    """Pieces 0 to 7 are the peer's own: news of them alone is worth no frame, but rides with piece 9."""
    data = make_pieces(40, 1_000)
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address, timeout=3.0) as peer:
        for text, signature in make_batches(data):
            transfer = node.node.add_batch(text, signature)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        assert peer.hear(wire.HAVE)[4] == b""
        peer.stream.sendall(bulk_frames.have(1, 0xFF, queue=0, uplink=1e6, serves=False))
        peer.say(wire.PING, a=1)
        peer.hear(wire.PONG)
        for one in data[:8]:
            node.store.put(name(one), one)
            node.node.found(transfer, name(one).digest)
        time.sleep(0.1)
        node.store.put(name(data[9]), data[9])
        node.node.found(transfer, name(data[9]).digest)
        masks = [bulk_frames.unpack_mask(peer.hear(wire.HAVE)[4])]
        assert masks == [0x2FF]
        begun = time.monotonic()
        for one in data[10:]:
            node.store.put(name(one), one)
            node.node.found(transfer, name(one).digest)
        found = 0
        while found != ((1 << 30) - 1) << 10:
            found |= bulk_frames.unpack_mask(peer.hear(wire.HAVE)[4])
            masks.append(found)
        assert len(masks) - 1 <= 2 + (time.monotonic() - begun) / 0.02


def test_memory_is_used_again_but_not_while_an_upload_reads_it() -> None:
    recent = Recent(most_bytes=300)
    first, second = recent.take(100), recent.take(100)
    recent.add("a", first, is_written=True)
    recent.add("b", second, is_written=False)
    lent = recent.lend("a")
    assert lent is not None
    recent.add("c", recent.take(200), is_written=True)
    assert recent.lend("a") is None  # the oldest that is written went, but its memory is still read
    assert recent.take(100) is not first
    assert recent.lend("b") is not None  # not before it is written
    assert recent.lend("missing") is None
    recent.drop("c")
    assert recent.lend("c") is None
