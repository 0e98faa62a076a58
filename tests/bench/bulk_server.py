"""The other processes of the bulk bench: a worker's node, and the two ends of a plain TLS copy between blocking sockets."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import NodeEvent, PeerOpened, PieceStored, TransferComplete
from p2p.adapters.bulk.node import BulkNode
from p2p.adapters.bulk.pipe import client_context, server_context
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.durable import FileLayer
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore, UnsyncedFiles
from p2p.adapters.tls import self_signed
from p2p.domain.addresses import PeerInfo

BLOCK = 64 << 10
PIECE = 1 << 20


class NoFiles(UnsyncedFiles):
    """Keeps nothing: for what a transfer costs without writing files."""

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        """Nothing."""

    def make_dir(self, path: Path) -> None:
        """Nothing."""

    def replace(self, source: Path, target: Path) -> None:
        """Nothing."""


STORES: dict[str, FileLayer] = {"nowhere": NoFiles(), "files": UNSYNCED_FILES}


def say(word: str) -> None:
    """One line to the bench."""
    print(word, flush=True)


def node(root: str, kept: str) -> None:
    """Fetch one transfer from the seeder named on stdin; ends when stdin closes. At the end it says which pieces were verified and kept."""
    start = json.loads(sys.stdin.readline())
    digests: list[str] = []

    def tell(event: NodeEvent) -> None:
        if isinstance(event, PeerOpened):
            say("connected")
        if isinstance(event, PieceStored):
            digests.append(event.piece.digest)
        if isinstance(event, TransferComplete):
            say(f"complete {digest_of(digests)}")

    settings = BulkSettings(
        "w", start["coordinator"], listens=False, seeders=frozenset({"seeder"}), allowed_networks=("127.0.0.0/8",)
    )
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(start["key"]))
    running = BulkNode(settings, key, PieceStore(Path(root), files=STORES[kept]), tell)
    running.start()
    running.dial(PeerInfo(**start["address"]), start["ticket"])
    sys.stdin.read()
    running.close()


def digest_of(digests: Iterable[str]) -> str:
    """One digest of a set of pieces."""
    return blake3(" ".join(sorted(digests)).encode()).hexdigest()


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
