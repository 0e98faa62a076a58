"""What strangers and liars can do to a bulk node: be cut off with one clear word, and cost little."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import PeerClosed, PeerDropped, PeerOpened, PieceStored, TransferComplete
from p2p.domain import bulk_frames
from p2p.domain.addresses import PeerInfo
from p2p.domain.tickets import Ticket, sign_ticket
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import (
    COORDINATOR,
    LIMITS,
    Node,
    eventually,
    holds_all,
    key_of,
    make_batches,
    make_pieces,
    public,
    put_all,
    running,
    ticket,
)
from tests.integration.p2p.bulk.stranger import Gone, Stranger

NOW = 1000.0
PIECE = 30_000


def at(now: list[float]) -> Callable[[], float]:
    return lambda: now[0]


# --- who gets in


def forged(fetcher: str, server: str) -> str:
    return sign_ticket(key_of("nobody"), Ticket("t", fetcher, public(key_of(fetcher)), server, "job", 2**40))


@pytest.mark.parametrize(
    ("text", "key", "words"),
    [
        (forged("w-x", "w-a"), None, "not signed by this peer's coordinator"),
        (ticket("w-x", "w-b"), None, "is for peer w-b"),
        (ticket("w-x", "w-a", expires_at=999), None, "expired 1 s ago"),
        (ticket("w-x", "w-a"), key_of("thief"), "not the signature of w-x"),
    ],
    ids=["forged", "for another peer", "expired", "stolen"],
)
def test_other_tickets_are_refused_in_words(tmp_path: Path, text: str, key: Ed25519PrivateKey | None, words: str) -> None:
    node = Node(tmp_path, "w-a", unix=lambda: NOW)
    with running(node), Stranger(node.address) as peer:
        with pytest.raises(Gone, match=words):
            peer.hello("w-x", "w-a", text=text, key=key)
        assert node.node.state().links == ()


def test_a_replayed_proof_is_refused(tmp_path: Path) -> None:
    """The challenge is another each time."""
    node = Node(tmp_path, "w-a")
    with running(node):
        with Stranger(node.address) as peer:
            proof = peer.hello("w-x", "w-a")
        with Stranger(node.address) as thief, pytest.raises(Gone, match="not the signature of w-x over this challenge"):
            thief.hello("w-x", "w-a", proof=proof)


def test_a_listener_with_another_certificate_gets_no_ticket(tmp_path: Path) -> None:
    impostor, node = Node(tmp_path, "w-a"), Node(tmp_path, "w-b")
    with running(impostor, node):
        address = replace(impostor.address, certificate_sha256="ab" * 32)
        node.node.dial(address, ticket("w-b", "w-a"))
        told = node.wait_event(PeerClosed)
        assert isinstance(told, PeerClosed)
        assert "shows the certificate" in told.reason
        assert "abababab" in told.reason
        assert not any(isinstance(one, PeerOpened) for one in impostor.told)


def test_an_open_connection_ends_with_its_ticket_unless_it_is_renewed(tmp_path: Path) -> None:
    now = [NOW]
    node = Node(tmp_path, "w-a", unix=at(now), limits=replace(LIMITS, ping_s=0.05))
    with running(node), Stranger(node.address) as lapsing, Stranger(node.address) as renewed:
        lapsing.hello("w-x", "w-a", text=ticket("w-x", "w-a", expires_at=1010))
        renewed.hello("w-y", "w-a", text=ticket("w-y", "w-a", expires_at=1010))
        renewed.say(wire.RENEW, ticket("w-y", "w-a", expires_at=2000).encode())
        time.sleep(0.1)
        now[0] = 1011.0
        assert "the ticket expired" in lapsing.reason()
        renewed.say(wire.PING, a=1, b=2)
        assert renewed.hear(wire.PONG)[2:4] == (1, 2)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (ticket("w-z", "w-a"), "is not for w-x and job job"),
        (ticket("w-x", "w-a", job="other"), "is not for w-x and job job"),
        (ticket("w-x", "w-a", key=public(key_of("thief"))), "is not for w-x and job job"),
        (ticket("w-x", "w-a", expires_at=1), "expired"),
        ("é", "not ASCII"),
    ],
    ids=["of another", "for another job", "with another key", "expired", "no ticket"],
)
def test_a_connection_is_not_renewed_by_another_ticket(tmp_path: Path, text: str, words: str) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.say(wire.RENEW, text.encode())
        assert words in peer.reason()


def test_the_dialler_renews_its_connection_with_the_owners_new_ticket(tmp_path: Path) -> None:
    now = [NOW]
    one = Node(tmp_path, "w-a", unix=at(now), limits=replace(LIMITS, ping_s=0.05))
    two = Node(tmp_path, "w-b", unix=at(now))
    with running(one, two):
        two.dial(one, expires_at=1010)
        two.wait_event(PeerOpened)
        two.dial(one, expires_at=3000)
        time.sleep(0.2)
        now[0] = 1011.0
        time.sleep(0.3)
        assert not any(isinstance(told, PeerClosed) for told in one.told + two.told)


def test_a_handshake_that_does_not_end_is_ended(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, hello_s=0.4))
    with running(node):
        with socket.create_connection((node.address.host, node.address.port), timeout=5) as slow:
            begun = time.monotonic()
            assert slow.recv(1) == b""  # not even TLS began
            assert 0.2 < time.monotonic() - begun < 3
        with Stranger(node.address) as peer:
            begun = time.monotonic()
            with pytest.raises(OSError):
                drip(peer, wire.HEAD.pack(wire.HELLO, 0, 0, 100, 1, 0) + b"{" * 100)
            assert time.monotonic() - begun < 3


def drip(peer: Stranger, data: bytes) -> None:
    """A byte now and then."""
    for byte in data:
        peer.stream.sendall(bytes([byte]))
        time.sleep(0.1)


def test_strangers_are_few_per_address_and_in_all(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, strangers_per_address=4))
    with running(node):
        socks = [socket.create_connection((node.address.host, node.address.port), timeout=5) for _ in range(40)]
        try:
            assert eventually(lambda: sum(is_closed(sock) for sock in socks) == 36)
            assert sum(thread.name == "bulk-in" for thread in threading.enumerate()) == 4
        finally:
            for sock in socks:
                sock.close()
        assert eventually(lambda: gets_in(node.address))


def test_the_oldest_stranger_gives_way(tmp_path: Path) -> None:
    """So that those who only hold the door do not keep it shut."""
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, strangers=4))
    with running(node):
        socks = [socket.create_connection((node.address.host, node.address.port), timeout=5) for _ in range(4)]
        try:
            assert gets_in(node.address)
            assert eventually(lambda: is_closed(socks[0]))
        finally:
            for sock in socks:
                sock.close()


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return sock.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def gets_in(address: PeerInfo) -> bool:
    try:
        with Stranger(address) as peer:
            peer.hello("w-x", "w-a")
    except (Gone, OSError):
        return False
    return True


def test_connections_are_limited_in_all(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, connections=2))
    with running(node), Stranger(node.address) as one, Stranger(node.address) as two:
        one.hello("w-x", "w-a")
        two.hello("w-y", "w-a")
        assert not gets_in(node.address)


def test_a_peer_has_one_connection_however_often_it_dials(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as old, Stranger(node.address) as new:
        old.hello("w-x", "w-a")
        new.hello("w-x", "w-a")
        assert "a newer connection takes the place" in old.reason()
        assert eventually(lambda: len(node.node.state().links) == 1)


# --- what they say


def test_frames_that_are_none_end_the_connection_and_shut_the_door(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node):
        with Stranger(node.address) as peer:
            peer.hello("w-x", "w-a")
            peer.say(99)
            assert "frame kind 99 is unknown" in peer.reason()
        with Stranger(node.address) as again, pytest.raises(Gone, match="w-x broke the protocol before"):
            again.hello("w-x", "w-a")


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        ((wire.HAVE, b"\x07"), "form is 7"),
        ((wire.HAVE, b""), "stands for no transfer"),
        ((wire.REQUEST, b"more"), "REQUEST frame has length 4"),
        ((wire.HELLO, b"{}"), "HELLO frame came after the handshake"),
        ((wire.KNOWS, b"short"), "KNOWS frame has length 5"),
        ((wire.BATCH, b"x" * 70), "stands for no transfer"),
        ((wire.DATA, b"x"), "stands for no transfer"),
    ],
)
def test_frames_that_are_not_due_end_the_connection(tmp_path: Path, frame: tuple[int, bytes], words: str) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.say(*frame, transfer=3)
        assert words in peer.reason()


def test_frames_from_later_versions_are_skipped(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.say(130, b"news")
        peer.say(wire.PING, a=4)
        assert peer.hear(wire.PONG)[2] == 4


class Scene:
    """A node that knows a transfer of four pieces, and a peer that takes part under the number 1."""

    def __init__(self, tmp_path: Path, peer: Stranger, node: Node, count: int = 4) -> None:
        self.data = make_pieces(count, PIECE)
        self.node, self.peer = node, peer
        for text, signature in make_batches(self.data):
            self.transfer = node.node.add_batch(text, signature)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(self.transfer), transfer=1, a=1)

    def claim(self, mask: int) -> None:
        frame = bulk_frames.have(1, mask, queue=0, uplink=1e7, serves=True)
        self.peer.stream.sendall(frame)

    def send(self, piece: int, data: bytes, offset: int = 0) -> None:
        self.peer.say(wire.DATA, data, transfer=1, a=piece, b=offset)


def test_data_that_nobody_asked_for_ends_the_connection(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        scene.send(2, b"x" * 1000)
        assert "piece 2 of transfer" in (reason := peer.reason())
        assert "never asked for" in reason


def test_pieces_beyond_the_row_and_without_an_end_are_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        scene.claim(0b1111)
        _, _, piece, _, _ = peer.hear(wire.REQUEST)
        scene.send(piece, scene.data[piece][:20_000])
        scene.send(piece, b"x" * 10_001, offset=20_000)
        assert f"piece {piece} holds 30000 bytes; 30001 or more came" in peer.reason()
        assert node.node._hub.buffers_left == LIMITS.buffer_bytes


@pytest.mark.parametrize(
    ("parts", "words"),
    [([(0, 100), (200, 100)], "goes on at byte 200; 100 bytes came"), ([(100, 100)], "begins at byte 100")],
)
def test_parts_out_of_order_are_refused(tmp_path: Path, parts: list[tuple[int, int]], words: str) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        scene.claim(0b1111)
        _, _, piece, _, _ = peer.hear(wire.REQUEST)
        for offset, count in parts:
            scene.send(piece, b"x" * count, offset)
        assert words in peer.reason()


def test_a_piece_in_the_middle_of_another_is_refused(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        scene.claim(0b1111)
        _, _, piece, _, _ = peer.hear(wire.REQUEST)
        scene.send(piece, b"x" * 100)
        scene.send((piece + 1) % 4, b"x" * 100)
        assert "in the middle of piece" in peer.reason()


def test_wrong_bytes_are_not_stored_and_blamed_on_whoever_sent_them(tmp_path: Path) -> None:
    node, honest = Node(tmp_path, "w-a"), Node(tmp_path, "w-h")
    with running(node, honest), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        scene.claim(0b1111)
        _, _, piece, _, _ = peer.hear(wire.REQUEST)
        scene.send(piece, b"x" * PIECE)
        dropped = node.wait_event(PeerDropped)
        assert isinstance(dropped, PeerDropped)
        assert (dropped.peer, dropped.transfer) == ("w-x", scene.transfer)
        assert f"piece {piece} came with other bytes" in dropped.reason
        assert not any(isinstance(one, PieceStored) for one in node.told)
        assert list(node.store.digests()) == []
        put_all(honest.store, scene.data)
        for text, signature in make_batches(scene.data):
            honest.node.add_batch(text, signature)
        honest.dial(node)
        node.wait_event(TransferComplete)
        assert holds_all(node.store, scene.data)


def test_a_piece_asked_for_twice_is_a_breach(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a", up=1000.0)
    with running(node), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        put_all(node.store, scene.data)
        for one in make_pieces(4, PIECE):
            node.node.found(scene.transfer, bulk_digest(one))
        peer.hear(wire.HAVE)
        for piece in (0, 1, 2, 3, 3):
            peer.say(wire.REQUEST, transfer=1, a=piece)
        assert "was asked for twice" in peer.reason()


def bulk_digest(data: bytes) -> str:
    from p2p.codec.pieces import name

    return name(data).digest


def test_requests_for_what_is_not_here_are_refused_one_by_one(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        Scene(tmp_path, peer, node)
        for piece in (0, 3, 4, 2**32 - 1):
            peer.say(wire.REQUEST, transfer=1, a=piece)
            assert peer.hear(wire.ABSENT)[2] == piece


def test_a_flood_of_adverts_is_read_slowly_and_others_are_served(tmp_path: Path) -> None:
    limits = replace(LIMITS, control_per_s=500.0)
    node, honest = Node(tmp_path, "w-a", limits=limits), Node(tmp_path, "w-h")
    with running(node, honest), Stranger(node.address) as peer:
        scene = Scene(tmp_path, peer, node)
        frame = bulk_frames.have(1, 0, queue=0, uplink=1e6, serves=False)
        stop = threading.Event()
        sent = [0]

        def flood() -> None:
            peer.stream.settimeout(0.2)
            while not stop.is_set():
                try:
                    sent[0] += peer.stream.send(frame * 64) // len(frame)
                except OSError:
                    continue

        thread = threading.Thread(target=flood)
        thread.start()
        before = time.process_time()
        time.sleep(1.0)
        put_all(honest.store, scene.data)
        for text, signature in make_batches(scene.data):
            honest.node.add_batch(text, signature)
        honest.dial(node)
        node.wait_event(TransferComplete)
        stop.set()
        thread.join()
        assert time.process_time() - before < 5
        assert holds_all(node.store, scene.data)


def test_batches_that_were_not_asked_for_or_are_forged_end_the_connection(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    text, signature = make_batches(make_pieces(2, 100), version=7)[0]
    (other, _) = make_batches(make_pieces(2, 100), version=8)[0]
    with running(node):
        with Stranger(node.address) as peer:
            scene = Scene(tmp_path, peer, node)
            peer.stream.sendall(bulk_frames.batch(1, text, signature))
            assert f"a batch of transfer {scene.transfer[:12]} came unasked" in peer.reason()
        with Stranger(node.address) as peer:
            peer.hello("w-y", "w-a")
            peer.say(wire.KNOWS, bytes.fromhex("ab" * 32), transfer=1, a=1)
            peer.hear(wire.ASK)
            peer.stream.sendall(bulk_frames.batch(1, other, signature))
            assert "signature" in peer.reason()
        with Stranger(node.address) as peer:
            peer.hello("w-z", "w-a")
            peer.say(wire.KNOWS, bytes.fromhex("ab" * 32), transfer=1, a=1)
            peer.hear(wire.ASK)
            peer.stream.sendall(bulk_frames.batch(1, text, signature))
            assert "it is another's" in peer.reason()
        assert [one.transfer for one in node.node.state().transfers] == [scene.transfer]


def test_a_number_does_not_change_its_meaning(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a")
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, b"a" * 32, transfer=1, a=1)
        peer.say(wire.KNOWS, b"b" * 32, transfer=1, a=1)
        assert "number 1 stood for transfer" in peer.reason()


def test_a_peer_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    node = Node(tmp_path, "w-a", limits=replace(LIMITS, ping_s=0.1, silence_s=0.5))
    with running(node), Stranger(node.address) as peer:
        peer.hello("w-x", "w-a")
        peer.hear(wire.PING)
        told = node.wait_event(PeerClosed, within_s=5)
        assert isinstance(told, PeerClosed)
        assert "nothing was heard of w-x for 0.5 s" in told.reason


def test_a_coordinators_key_is_not_a_peers(tmp_path: Path) -> None:
    """A peer may not name itself as this one."""
    node = Node(tmp_path, "w-a")
    text = sign_ticket(COORDINATOR, Ticket("t", "w-a", public(key_of("w-a")), "w-a", "job", 2**40))
    with running(node), Stranger(node.address) as peer, pytest.raises(Gone, match="does not connect to itself"):
        peer.hello("w-a", "w-a", text=text)
