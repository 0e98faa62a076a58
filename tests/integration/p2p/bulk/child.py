"""A worker's bulk node in a process of its own, so that it can be killed: `python -m tests.integration.p2p.bulk.child ROOT PEER`.

JSON lines on stdin: {"dial": {...}, "ticket": text}. On stdout: its address, then the names of what the node tells. Ends with stdin.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

from p2p.adapters.bulk.events import NodeEvent
from p2p.adapters.bulk.node import BulkNode
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.domain.addresses import PeerInfo
from tests.integration.p2p.bulk.nodes import key_of, settings


def main(root: str, peer: str, up: str) -> None:
    def tell(event: NodeEvent) -> None:
        print(json.dumps({"told": type(event).__name__}), flush=True)

    store = PieceStore(Path(root) / peer, files=UNSYNCED_FILES)
    node = BulkNode(settings(peer, up=float(up)), key_of(peer), store, tell)
    address = node.start()
    assert address is not None
    print(json.dumps({"listening": asdict(address)}), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        node.dial(PeerInfo(**command["dial"]), command["ticket"])
    node.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
