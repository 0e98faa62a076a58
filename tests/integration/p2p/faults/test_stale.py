"""Peers with valid tickets that offer what is old, foreign, wrong, or without end: nobody is harmed, and honest ones are served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from p2p.adapters.bulk.events import PeerDropped, PieceStored, TransferComplete
from p2p.domain import bulk_frames
from p2p.domain.batches import Batch
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import LIMITS, Node, eventually, holds_all, make_batches, make_pieces, put_all, running
from tests.integration.p2p.bulk.stranger import Gone, Stranger

PIECE = 30_000


def newer_than(version: int) -> Callable[[Batch], bool]:
    """What a worker that holds that version wants."""
    return lambda first: first.version > version


def offer(peer: Stranger, batches: list[tuple[str, str]], transfer: bytes, *, number: int = 1) -> None:
    """Name a transfer, and send its batches if they are asked for."""
    peer.say(wire.KNOWS, transfer, transfer=number, a=len(batches))
    peer.hear(wire.ASK)
    for text, signature in batches:
        peer.stream.sendall(bulk_frames.batch(number, text, signature))


def transfer_of(batches: list[tuple[str, str]], tmp_path: Path) -> bytes:
    node = Node(tmp_path, "w-scratch", listens=False)
    with running(node):
        return bytes.fromhex(next(node.node.add_batch(*batch) for batch in batches))


def test_a_version_that_is_old_is_declined_though_the_coordinator_signed_it(tmp_path: Path) -> None:
    """Real batches of an earlier version: the peer hears that they are not wanted, no piece of them is asked for or taken."""
    old, new = make_pieces(4, PIECE, seed=1), make_pieces(4, PIECE, seed=2)
    stale = make_batches(old, version=3)
    node, honest = Node(tmp_path, "w-a", wants=newer_than(6)), Node(tmp_path, "w-h")
    put_all(honest.store, new)
    with running(node, honest), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        transfer = transfer_of(stale, tmp_path)
        offer(peer, stale, transfer)
        assert peer.hear(wire.FORGET)[4] == transfer
        peer.stream.sendall(bulk_frames.have(1, 0b1111, queue=0, uplink=1e7, serves=True))
        for text, signature in make_batches(new, version=7):
            honest.node.add_batch(text, signature)
        honest.dial(node)
        node.wait_event(TransferComplete)
        assert holds_all(node.store, new)
        assert {one.version for one in node.node.state().transfers} == {7}
        peer.say(wire.PING, a=5)
        assert peer.hear(wire.PONG, wire.REQUEST)[0] == wire.PONG, "it was asked for a stale piece"


def test_a_transfer_of_another_job_is_not_taken(tmp_path: Path) -> None:
    """The ticket names a job: signed batches of another one do not come in by it, nor go out, though the node takes part in both."""
    data = make_pieces(3, PIECE)
    foreign = make_batches(data, job="other")
    transfer = transfer_of(foreign, tmp_path)
    node = Node(tmp_path, "w-a")
    with running(node):
        with Stranger(node.address) as peer:
            peer.hello("w-x", "w-a")
            offer(peer, foreign, transfer)
            with suppress(Gone):
                assert peer.hear(wire.FORGET)[4] == transfer
        assert node.node.state().transfers == ()
        put_all(node.store, data)
        for text, signature in foreign:
            node.node.add_batch(text, signature)
        with Stranger(node.address) as peer:
            peer.hello("w-y", "w-a")
            peer.say(wire.KNOWS, transfer, transfer=1, a=1)
            peer.stream.sendall(bulk_frames.have(1, 0, queue=0, uplink=1e7, serves=True))
            peer.say(wire.ASK, transfer, a=0)
            peer.say(wire.REQUEST, transfer=1, a=0)
            assert peer.hear(wire.ABSENT, wire.BATCH, wire.DATA)[0] == wire.ABSENT


def test_whoever_offers_another_jobs_transfer_does_not_spoil_it_for_that_job(tmp_path: Path) -> None:
    """Offered where it does not belong, it is still taken where it does."""
    data = make_pieces(3, PIECE)
    foreign = make_batches(data, job="other")
    node, honest = Node(tmp_path, "w-a"), Node(tmp_path, "w-h")
    put_all(honest.store, data)
    with running(node, honest), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        offer(peer, foreign, transfer_of(foreign, tmp_path))
        with suppress(Gone):
            peer.hear(wire.FORGET)
        for text, signature in foreign:
            honest.node.add_batch(text, signature)
        honest.dial(node, job="other")
        node.wait_event(TransferComplete, within_s=5)
        assert holds_all(node.store, data)


def test_pieces_of_an_older_version_in_the_place_of_new_ones_are_refused(tmp_path: Path) -> None:
    """Sizes, numbers and manners are right; the bytes were right once."""
    old, new = make_pieces(4, PIECE, seed=1), make_pieces(4, PIECE, seed=2)
    node, honest = Node(tmp_path, "w-a"), Node(tmp_path, "w-h")
    put_all(honest.store, new)
    batches = make_batches(new, version=7)
    with running(node, honest), Stranger(node.address) as peer:
        for text, signature in batches:
            transfer = node.node.add_batch(text, signature)
            honest.node.add_batch(text, signature)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        peer.stream.sendall(bulk_frames.have(1, 0b1111, queue=0, uplink=1e7, serves=True))
        _, _, piece, _, _ = peer.hear(wire.REQUEST)
        peer.say(wire.DATA, old[piece], transfer=1, a=piece)
        dropped = node.wait_event(PeerDropped)
        assert isinstance(dropped, PeerDropped)
        assert (dropped.peer, "came with other bytes" in dropped.reason) == ("w-x", True)
        honest.dial(node)
        node.wait_event(TransferComplete)
        assert holds_all(node.store, new)
        assert {one.peer for one in node.told if isinstance(one, PieceStored)} == {"w-h"}


def test_a_piece_that_comes_drop_by_drop_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A byte now and then is no silence and ends nothing; the piece is taken from somebody else all the same."""
    data = make_pieces(4, PIECE)
    node, honest = Node(tmp_path, "w-a"), Node(tmp_path, "w-h")
    put_all(honest.store, data)
    batches = make_batches(data)
    stop = threading.Event()
    with running(node, honest), Stranger(node.address) as peer:
        for text, signature in batches:
            transfer = node.node.add_batch(text, signature)
            honest.node.add_batch(text, signature)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        peer.stream.sendall(bulk_frames.have(1, 0b1111, queue=0, uplink=1e9, serves=True))
        _, _, piece, _, _ = peer.hear(wire.REQUEST)

        def drip() -> None:
            for offset in range(PIECE):
                if stop.wait(0.02):
                    return
                try:
                    peer.say(wire.DATA, data[piece][offset : offset + 1], transfer=1, a=piece, b=offset)
                except Gone:
                    return

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert eventually(lambda: any(link.peer == "w-x" for link in node.node.state().links))
            honest.dial(node)
            node.wait_event(TransferComplete, within_s=10)
            assert holds_all(node.store, data)
        finally:
            stop.set()
            thread.join()


def test_data_without_end_for_what_is_over_ends_the_connection(tmp_path: Path) -> None:
    """Some of it may be on its way when a transfer is retired; more than that is a breach."""
    data = make_pieces(4, PIECE)
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, junk_bytes=200_000))
    with running(node), Stranger(node.address) as peer:
        for text, signature in make_batches(data):
            transfer = node.node.add_batch(text, signature)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        peer.stream.sendall(bulk_frames.have(1, 0b1111, queue=0, uplink=1e7, serves=True))
        peer.hear(wire.REQUEST)
        node.node.retire(transfer)
        peer.hear(wire.FORGET)
        with suppress(Gone):
            for _ in range(100):
                peer.say(wire.DATA, bytes(PIECE), transfer=1, a=0)
                time.sleep(0.01)
        node.wait_for(lambda one: "bytes came for transfers that are over" in getattr(one, "reason", ""))
        assert node.store.root.exists() is False or not list(node.store.digests())


def test_frames_that_nobody_understands_are_read_slowly_and_kept_nowhere(tmp_path: Path) -> None:
    """Kinds of a later version may be skipped, but not at the rate that a link carries."""
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, control_per_s=50.0))
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.stream.settimeout(0.2)
        frame = wire.HEAD.pack(200, 0, 0, 65_536, 0, 0) + bytes(65_536)
        sent, begun = 0, time.monotonic()
        while time.monotonic() - begun < 2.0:
            try:
                peer.stream.sendall(frame)
                sent += 1
            except OSError:
                break
        assert sent < 2.0 * 50 + 2 * 50 + 150, "a burst of two seconds, the rate, and what socket buffers hold"
