"""The other processes of the bulk bench: a worker's node, and the two ends of a plain TLS copy between blocking sockets."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import NodeEvent, PeerOpened, TransferComplete
from p2p.adapters.bulk.node import BulkNode
from p2p.adapters.bulk.pipe import client_context, server_context
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.piece_store import PieceStore, UnsyncedFiles
from p2p.adapters.tls import self_signed
from p2p.domain.addresses import PeerInfo

BLOCK = 64 << 10
PIECE = 1 << 20


class TimedFiles(UnsyncedFiles):
    """Counts the CPU seconds that writing files takes, in the threads that write them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._lock = threading.Lock()

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        begun = time.thread_time()
        super().write_file(path, data)
        self._count(begun)

    def replace(self, source: Path, target: Path) -> None:
        begun = time.thread_time()
        super().replace(source, target)
        self._count(begun)

    def _count(self, begun: float) -> None:
        with self._lock:
            self.seconds += time.thread_time() - begun


def say(word: str) -> None:
    """One line to the bench."""
    print(word, flush=True)


def node(root: str) -> None:
    """Fetch one transfer from the seeder named on stdin; ends when stdin closes."""
    start = json.loads(sys.stdin.readline())
    files = TimedFiles()

    def tell(event: NodeEvent) -> None:
        if isinstance(event, PeerOpened):
            say("connected")
        if isinstance(event, TransferComplete):
            say(f"complete {files.seconds}")

    settings = BulkSettings(
        "w", start["coordinator"], listens=False, seeders=frozenset({"seeder"}), allowed_networks=("127.0.0.0/8",)
    )
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(start["key"]))
    running = BulkNode(settings, key, PieceStore(Path(root), files=files), tell)
    running.start()
    running.dial(PeerInfo(**start["address"]), start["ticket"])
    sys.stdin.read()
    running.close()


def receive(root: str) -> None:
    """Take one connection's bytes, hashed in blocks of 1 MiB, kept nowhere."""
    certificate, key, _ = self_signed(Path(root), ["bench"])
    server = socket.create_server(("127.0.0.1", 0))
    say(str(server.getsockname()[1]))
    taken, _ = server.accept()
    with server_context(str(certificate), str(key)).wrap_socket(taken, server_side=True) as stream:
        view, filled = memoryview(bytearray(PIECE)), 0
        while count := stream.recv_into(view[filled:]):
            filled += count
            if filled == PIECE:
                blake3(view).digest()
                filled = 0
    say("complete")
    sys.stdin.read()


def send(port: str, count: str) -> None:
    """Send a block `count` times."""
    block = memoryview(bytearray(BLOCK))
    with client_context().wrap_socket(socket.create_connection(("127.0.0.1", int(port)))) as stream:
        say("connected")
        sys.stdin.readline()
        for _ in range(int(count)):
            stream.sendall(block)
        stream.shutdown(socket.SHUT_WR)
    say("complete")
    sys.stdin.read()


PARTS: dict[str, Callable[..., None]] = {"node": node, "receive": receive, "send": send}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
