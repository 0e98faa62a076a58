"""Bulk nodes and the seeder as processes: what a kill -9 leaves, what the seeder says, how it ends."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from p2p.adapters.bulk.events import PeerClosed, PeerOpened, TransferComplete
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.domain.addresses import PeerInfo
from tests.integration.p2p.bulk.nodes import (
    COORDINATOR,
    LOOPBACK,
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

SEEDER = ("-m", "p2p.adapters.bulk.seeder")


class Process:
    """A child that speaks JSON lines."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(json.loads(line))

    def say(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def hear(self, is_it: Callable[[dict[str, Any]], bool], within_s: float = 15) -> dict[str, Any]:
        deadline = time.monotonic() + within_s
        while True:
            line = self._lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if is_it(line):
                return line

    def address(self) -> PeerInfo:
        return PeerInfo(**self.hear(lambda line: "listening" in line)["listening"])

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)

    def close(self) -> int:
        """Close stdin; the exit status."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            self.process.stdin.close()
        status = self.process.wait(10)
        self._thread.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        return status


@contextmanager
def processes(*children: Process) -> Iterator[None]:
    try:
        yield
    finally:
        for child in children:
            child.close()


def seeder(root: Path, **changes: Any) -> Process:
    """A seeder process whose store is `root`/seeder; it was told who it is."""
    (root / "seeder.key").write_text(key_of("seeder").private_bytes_raw().hex())
    started = Process(*SEEDER)
    start = {
        "peer_id": "seeder",
        "coordinator_public_key": public(COORDINATOR),
        "store": str(root / "seeder"),
        "key_file": str(root / "seeder.key"),
        "host": "127.0.0.1",
        "allowed_networks": LOOPBACK,
        "report_s": 0.2,
    }
    started.say(start=start | changes)
    return started


def publish(child: Process, batches: list[tuple[str, str]]) -> None:
    for text, signature in batches:
        child.say(batch=text, signature=signature)


def test_a_row_of_many_pieces_is_reported(tmp_path: Path) -> None:
    """Whatever the report says must fit JSON: Python writes no integer of more than 4,300 digits, 14,283 bits."""
    data = make_pieces(1, 64) * 20_000
    put_all(PieceStore(tmp_path / "seeder", files=UNSYNCED_FILES), data[:1])
    child = seeder(tmp_path)
    with processes(child):
        publish(child, make_batches(data, per_batch=500))
        is_whole = lambda line: "state" in line and any(one["is_complete"] for one in line["state"]["transfers"])  # noqa: E731
        (transfer,) = child.hear(is_whole)["state"]["transfers"]
        assert (transfer["held"], "mask" in transfer) == (20_000, False)


def test_the_seeder_reports_and_ends_with_its_stdin(tmp_path: Path) -> None:
    data = make_pieces(10, 50_000)
    put_all(PieceStore(tmp_path / "seeder", files=UNSYNCED_FILES), data)
    child, peer = seeder(tmp_path), Node(tmp_path, "w-a")
    with running(peer):
        peer.node.dial(child.address(), ticket("w-a", "seeder"))
        assert child.hear(lambda line: line.get("event") == "PeerOpened")["peer"] == "w-a"
        begun = time.time()
        publish(child, make_batches(data))
        peer.wait_event(TransferComplete)
        first = child.hear(lambda line: "first_sent" in line)
        assert begun - 1 < first["at"] < time.time()
        state = child.hear(lambda line: "state" in line and line["state"]["transfers"][0]["bytes_up"] == 500_000)["state"]
        (transfer,) = state["transfers"]
        assert transfer["transfer"] == first["first_sent"]
        assert (transfer["copies"], transfer["is_complete"]) == (1.0, True)
        assert state["links"][0]["bytes_up"] == 500_000
        child.say(limits={"up": 1000.0, "down": None, "cap_bytes": None})
        child.say(retire=transfer["transfer"])
        child.hear(lambda line: "state" in line and line["state"]["transfers"] == [])
        child.say(nonsense=1)
        assert "nonsense" in child.hear(lambda line: "refused" in line)["refused"]
        child.say(batch="{}", signature="00")
        assert "BatchRefused" in child.hear(lambda line: "refused" in line)["refused"]
        assert child.close() == 0
        told = peer.wait_event(PeerClosed)
        assert isinstance(told, PeerClosed)
        assert "goes away" in told.reason


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("[]", 'must be {"start"'),
        ("{", "seeder: "),
        ('{"start": {"peer_id": "x"}}', "incomplete"),
        ('{"start": {"pear": 1}}', "pear"),
    ],
)
def test_a_seeder_that_cannot_start_says_why(line: str, words: str) -> None:
    done = subprocess.run([sys.executable, *SEEDER], input=line + "\n", capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 2
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_peer_killed_in_the_middle_of_a_piece_delays_the_others_only(tmp_path: Path) -> None:
    data = make_pieces(24, 200_000)
    child = Process("-m", "tests.integration.p2p.bulk.child", str(tmp_path), "w-x", "100000")  # two seconds a piece
    put_all(PieceStore(tmp_path / "seeder", files=UNSYNCED_FILES), data)
    origin = Node(tmp_path, "seeder", is_seeder=True, up=3e6)
    peers = [Node(tmp_path, f"w-{number}", up=3e6) for number in range(2)]
    with processes(child), running(origin, *peers):
        slow = child.address()
        child.say(dial=asdict(origin.address), ticket=ticket("w-x", "seeder"))
        for peer in peers:
            peer.dial(origin)
            peer.node.dial(slow, ticket(peer.peer, "w-x"))
            peer.wait_for(lambda one: isinstance(one, PeerOpened) and one.peer == "w-x")
            peer.wait_for(lambda one: isinstance(one, PeerOpened) and one.peer == "seeder")
        peers[0].dial(peers[1])
        for text, signature in make_batches(data):
            origin.node.add_batch(text, signature)
        child.hear(lambda line: line.get("told") == "PieceStored")
        assert eventually(lambda: any(link.peer == "w-x" and link.bytes_up > 0 for link in origin.node.state().links))
        time.sleep(0.3)  # it uploads by now, and is in the middle of a piece
        child.kill()
        for peer in peers:
            peer.wait_event(TransferComplete, within_s=20)
            assert holds_all(peer.store, data)


def test_a_seeder_killed_after_a_third_returns_and_all_complete(tmp_path: Path) -> None:
    data = make_pieces(40, 50_000)
    batches = make_batches(data)
    put_all(PieceStore(tmp_path / "seeder", files=UNSYNCED_FILES), data)
    first = seeder(tmp_path, up=1e6)
    peers = [Node(tmp_path, f"w-{number}") for number in range(2)]
    with running(*peers):
        address = first.address()
        peers[0].dial(peers[1])
        for peer in peers:
            peer.node.dial(address, ticket(peer.peer, "seeder"))
            peer.wait_for(lambda one: isinstance(one, PeerOpened) and one.peer == "seeder")
        publish(first, batches)
        assert eventually(lambda: sum(1 for _ in peers[0].store.digests()) >= 13)
        first.kill()
        first.close()
        for peer in peers:
            peer.wait_for(lambda one: isinstance(one, PeerClosed) and one.peer == "seeder")
            assert not holds_all(peer.store, data)
        again = seeder(tmp_path, port=address.port, returns=True, up=1e6)
        with processes(again):
            again.address()
            publish(again, batches)
            for peer in peers:
                peer.wait_event(TransferComplete, within_s=20)
                assert holds_all(peer.store, data)
            again.say(nonsense=1)  # what it reports after this line is newer than the end
            again.hear(lambda line: "refused" in line)
            (transfer,) = again.hear(lambda line: "state" in line)["state"]["transfers"]
            assert 0 < transfer["copies"] < 1  # it did not begin again
