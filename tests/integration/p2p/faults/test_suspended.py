"""Processes that stand still, and processes that die and come back, in the middle of a transfer."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import PeerOpened, PieceStored, TransferComplete
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from tests.integration.p2p.bulk.nodes import Node, eventually, holds_all, make_batches, make_pieces, put_all, running, ticket
from tests.integration.p2p.bulk.test_processes import Process, processes, publish, seeder

PEER = ("-m", "tests.integration.p2p.bulk.child")
DATA = make_pieces(40, 50_000)
STOPPED_S = 15.0  # longer than any silence is borne


def held(store: PieceStore) -> int:
    return sum(1 for _ in store.digests())


def opened(node: Node, peer: str) -> None:
    node.wait_for(lambda one: isinstance(one, PeerOpened) and one.peer == peer)


def test_a_killed_peer_comes_back_and_fetches_what_is_missing(tmp_path: Path) -> None:
    """kill -9 in the middle of a fetch: what was whole stays, what was not is not there, and nothing is fetched twice."""
    origin = Node(tmp_path, "seeder", is_seeder=True, up=1.5e6)
    put_all(origin.store, DATA)
    child = Process(*PEER, str(tmp_path), "w-x", "1000000")
    mine = PieceStore(tmp_path / "w-x", files=UNSYNCED_FILES)
    with running(origin), processes(child):
        child.address()
        child.say(dial=asdict(origin.address), ticket=ticket("w-x", "seeder"))
        opened(origin, "w-x")
        for text, signature in make_batches(DATA):
            transfer = origin.node.add_batch(text, signature)
        assert eventually(lambda: held(mine) >= 12)
        child.kill()
        before = held(mine)
        assert 12 <= before < len(DATA)
        assert all(mine.read(digest) for digest in mine.digests())
        again = Process(*PEER, str(tmp_path), "w-x", "1000000")
        with processes(again):
            again.address()
            again.say(dial=asdict(origin.address), ticket=ticket("w-x", "seeder"))
            again.hear(lambda line: line.get("told") == "TransferComplete")
            assert holds_all(mine, DATA)
            (state,) = [one for one in origin.node.state().transfers if one.transfer == transfer]
            assert state.bytes_up <= 50_000 * (len(DATA) + 8), "at most what was on its way when it died came twice"


@pytest.mark.long
def test_a_peer_that_stands_still_is_given_up_and_finishes_later(tmp_path: Path) -> None:
    """15 s are longer than silence is borne. The others do not wait for it; woken, it blames nobody and finishes."""
    origin = Node(tmp_path, "seeder", is_seeder=True, up=0.5e6)
    other = Node(tmp_path, "w-o", up=1e6)
    put_all(origin.store, DATA)
    child = Process(*PEER, str(tmp_path), "w-x", "1000000")
    mine = PieceStore(tmp_path / "w-x", files=UNSYNCED_FILES)
    with running(origin, other), processes(child):
        address = child.address()
        child.say(dial=asdict(origin.address), ticket=ticket("w-x", "seeder"))
        other.dial(origin)
        other.node.dial(address, ticket("w-o", "w-x"))
        for peer in ("w-x", "w-o"):
            opened(origin, peer)
        for text, signature in make_batches(DATA):
            origin.node.add_batch(text, signature)
        assert eventually(lambda: held(mine) >= 5)
        child.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        other.wait_event(TransferComplete)
        assert time.monotonic() - begun < STOPPED_S, "it waited for the one that stood still"
        assert held(mine) < len(DATA)
        time.sleep(max(0.0, STOPPED_S - (time.monotonic() - begun)))
        child.process.send_signal(signal.SIGCONT)
        child.hear(lambda line: line.get("told") == "TransferComplete", within_s=40)
        assert holds_all(mine, DATA)


@pytest.mark.long
def test_a_seeder_that_stands_still_goes_on_where_it_was(tmp_path: Path) -> None:
    put_all(PieceStore(tmp_path / "seeder", files=UNSYNCED_FILES), DATA)
    child = seeder(tmp_path, up=0.5e6)
    peers = [Node(tmp_path, f"w-{number}", up=1e6) for number in range(2)]
    with running(*peers), processes(child):
        address = child.address()
        peers[0].dial(peers[1])
        for peer in peers:
            peer.node.dial(address, ticket(peer.peer, "seeder"))
            opened(peer, "seeder")
        publish(child, make_batches(DATA))
        peers[0].wait_for(lambda one: isinstance(one, PieceStored) and held(peers[0].store) >= 5)
        child.process.send_signal(signal.SIGSTOP)
        time.sleep(STOPPED_S)
        stood = [held(peer.store) for peer in peers]
        assert max(stood) < len(DATA)
        child.process.send_signal(signal.SIGCONT)
        for peer in peers:
            peer.wait_event(TransferComplete, within_s=60)
            assert holds_all(peer.store, DATA)
        child.say(nonsense=1)  # what it reports after this line is newer than the end
        child.hear(lambda line: "refused" in line)
        (transfer,) = child.hear(lambda line: "state" in line)["state"]["transfers"]
        assert transfer["copies"] < 1.6, "it did not begin again"
