"""What a node sends at once follows what leaves it, soon, and never passes the owner's limit."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from p2p.adapters.bulk import clock, sockets
from p2p.adapters.bulk.catalogue import Catalogue
from p2p.adapters.bulk.clock import Clock
from p2p.adapters.bulk.hub import Hub
from p2p.adapters.bulk.link import Link
from p2p.adapters.bulk.settings import FIRST_GUESS
from p2p.adapters.bulk.throttle import Throttle
from p2p.adapters.piece_store import PieceStore
from p2p.domain.swarm import Swarm
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import Node, eventually, make_batches, make_pieces, put_all, running, settings
from tests.integration.p2p.bulk.stranger import Stranger

KIB = 1 << 10
SENT = 4_000_000


def make_hub() -> Hub:
    throttle = Throttle(up=None, down=None, cap_bytes=None, counter=None, unix=time.time)
    return Hub(settings("w-a"), throttle, lambda _event: None, lambda _first, uplink, now: Swarm(uplink=uplink, now=now))


def test_the_pace_is_what_was_delivered_since_the_last_look_while_the_uplink_is_a_guess(tmp_path: Path) -> None:
    hub = make_hub()
    timer = Clock(hub, Catalogue(hub, PieceStore(tmp_path)))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as out:
        taken, _ = server.accept()
        hub.links["job", "w-b"] = Link("w-b", "job", True, False, 1e6, 0.01, sock=out)
        begun = time.monotonic() + 1
        timer.tick(begun)
        assert hub.pace == FIRST_GUESS
        with taken:
            reader = threading.Thread(target=lambda: all(iter(lambda: taken.recv(1 << 20), b"")))
            reader.start()
            out.sendall(bytes(SENT))
            assert eventually(lambda: sockets.figures(out).acked >= SENT)
            timer.tick(begun + 0.125)
            assert hub.pace == pytest.approx(SENT / 0.125, rel=1e-3)
            assert hub.uplink == FIRST_GUESS, "half a second of sending makes an uplink"
            timer.tick(begun + 0.25)
            assert hub.pace == FIRST_GUESS, "nothing left since"
            out.shutdown(socket.SHUT_WR)
            reader.join()


def test_a_limit_holds_for_what_is_sent_next_whatever_the_pace_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "SAMPLE_S", 60.0)  # nothing is measured meanwhile
    node, data = Node(tmp_path, "w-a"), make_pieces(2, 300 * KIB)
    put_all(node.store, data)
    with running(node), Stranger(node.address) as peer:
        (batch,) = make_batches(data)
        transfer = node.node.add_batch(*batch)
        peer.hello("w-x", "w-a")
        peer.say(wire.KNOWS, bytes.fromhex(transfer), transfer=1, a=1)
        peer.hear(wire.HAVE)
        node.node._hub.pace = 1e9
        assert first_part(peer, 0) == 256 * KIB
        node.node.set_limits(up=1e6, down=None, cap_bytes=None)
        assert first_part(peer, 1) == 16 * KIB, "10 ms at the limit, and not at the pace"


def first_part(peer: Stranger, piece: int) -> int:
    """Ask for a piece; bytes in the first frame of it."""
    peer.say(wire.REQUEST, transfer=1, a=piece)
    while True:
        _, _, index, begin, payload = peer.hear(wire.DATA)
        if (index, begin) == (piece, 0):
            return len(payload)
