"""The seeder: a bulk node in a process of its own beside the coordinator. `python -m p2p.adapters.bulk.seeder`.

JSON lines on stdin. The first one says who it is; the others what to do:
    {"start": {"peer_id", "coordinator_public_key", "store", "key_file", "host", "port", ...}}   see `Start`
    {"batch": text, "signature": hex}                       a signed batch; its pieces are in the store before that
    {"retire": transfer}
    {"limits": {"up": bytes_per_s | null, "down": ..., "cap_bytes": ...}}
    {"dial": {"host", "port", "certificate_sha256"}, "ticket": text}
    {"hang_up": peer, "job_id": job}
JSON lines on stdout:
    {"listening": {"host", "port", "certificate_sha256"}}   once, first
    {"state": {...}}                                        every `report_s` seconds: NodeState, with `copies` and without `mask` per transfer
    {"first_sent": transfer, "at": unix seconds}            when the first piece of a transfer left
    {"event": name, ...}                                    PeerOpened, PeerClosed, PeerDropped, GaveUp
    {"refused": words}                                      a line that could not be done
It ends when stdin closes. A first line that cannot be used ends it with status 2 and one line on stderr.
"""

from __future__ import annotations

import json
import queue
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TextIO

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.bulk.events import GaveUp, NodeEvent, PeerClosed, PeerDropped, PeerOpened
from p2p.adapters.bulk.node import BulkNode, NodeState
from p2p.adapters.bulk.settings import FIRST_GUESS, BulkSettings
from p2p.adapters.piece_store import PieceStore
from p2p.domain.addresses import PeerInfo
from p2p.errors import SwarmError

FIRST_SENT_POLL_S = 0.2


@dataclass(frozen=True, slots=True)
class Start:
    """The first line. Rates in bytes a second; `key_file` holds the 32 raw bytes of the seeder's Ed25519 key, in hex."""

    peer_id: str
    coordinator_public_key: str
    store: str
    key_file: str
    host: str
    port: int = 0
    names: tuple[str, ...] = ()
    up: float | None = None
    down: float | None = None
    cap_bytes: int | None = None
    uplink: float = FIRST_GUESS
    congestion: str | None = None
    returns: bool = False
    allowed_networks: tuple[str, ...] = ()
    report_s: float = 3.0

    def settings(self) -> BulkSettings:
        """Of the node."""
        return BulkSettings(
            peer_id=self.peer_id,
            coordinator_public_key=self.coordinator_public_key,
            host=self.host,
            port=self.port,
            names=tuple(self.names),
            is_seeder=True,
            returns=self.returns,
            allowed_networks=tuple(self.allowed_networks),
            up=self.up,
            down=self.down,
            cap_bytes=self.cap_bytes,
            uplink=self.uplink,
            congestion=self.congestion,
            counter=Path(self.store) / "uploaded.json",
            wants=lambda _first: False,  # its owner says what it offers; peers that still hold more do not
        )


class Seeder:
    """Reads commands, writes what happens. The lines are written by one thread at a time."""

    def __init__(self, start: Start, out: TextIO) -> None:
        """Raises OSError, ValueError (the key file)."""
        self._out = out
        self._lock = threading.Lock()
        key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(Path(start.key_file).read_text().strip()))
        self._node = BulkNode(start.settings(), key, PieceStore(Path(start.store)), self._tell)
        self._report_s = start.report_s
        self._first_sent: set[str] = set()
        self._stop = threading.Event()
        self._reporter = threading.Thread(target=self._report_all, name="seeder-reports", daemon=True)

    def run(self, lines: queue.SimpleQueue[str | None]) -> None:
        """Until the lines end. Raises OSError when it cannot listen."""
        address = self._node.start()
        assert address is not None
        self._write({"listening": asdict(address)})
        self._reporter.start()
        while (line := lines.get()) is not None:
            try:
                self._do(json.loads(line))
            except (SwarmError, ValueError, KeyError, TypeError) as error:
                self._write({"refused": f"{type(error).__name__}: {error}"[:1000]})
        self._stop.set()
        self._reporter.join()
        self._node.close()

    def _do(self, command: dict[str, Any]) -> None:
        match command:
            case {"batch": text, "signature": signature}:
                self._node.add_batch(text, signature)
            case {"retire": transfer}:
                self._node.retire(transfer)
            case {"limits": limits}:
                self._node.set_limits(up=limits["up"], down=limits["down"], cap_bytes=limits["cap_bytes"])
            case {"dial": address, "ticket": ticket}:
                self._node.dial(PeerInfo(**address), ticket)
            case {"hang_up": peer, "job_id": job_id}:
                self._node.hang_up(peer, job_id)
            case _:
                raise ValueError(f"no command has the keys {sorted(command)}")

    def _report_all(self) -> None:
        """First pieces soon after they left, everything every few seconds, and once at the end."""
        waited = 0.0
        while not self._stop.wait(FIRST_SENT_POLL_S):
            waited += FIRST_SENT_POLL_S
            self._report(self._node.state(), whole=waited >= self._report_s)
            waited %= self._report_s
        self._report(self._node.state(), whole=True)

    def _report(self, state: NodeState, *, whole: bool) -> None:
        for transfer in state.transfers:
            if transfer.first_sent_at is not None and transfer.transfer not in self._first_sent:
                self._first_sent.add(transfer.transfer)
                self._write({"first_sent": transfer.transfer, "at": transfer.first_sent_at})
        self._first_sent &= {transfer.transfer for transfer in state.transfers}
        if whole:
            document = asdict(state)
            for plain, transfer in zip(document["transfers"], state.transfers, strict=True):
                plain["copies"] = transfer.copies
                del plain["mask"]  # as many bits as pieces: Python writes no integer of more than 4,300 digits
            self._write({"state": document})

    def _tell(self, event: NodeEvent) -> None:
        if isinstance(event, PeerOpened | PeerClosed | PeerDropped | GaveUp):
            self._write({"event": type(event).__name__, **asdict(event)})

    def _write(self, document: dict[str, Any]) -> None:
        """Say it, if the coordinator still listens: its end closes stdin too, which ends this process."""
        with self._lock, suppress(BrokenPipeError):
            self._out.write(json.dumps(document) + "\n")
            self._out.flush()


def read_start(line: str) -> Start:
    """The first line. Raises ValueError."""
    document = json.loads(line)
    if not isinstance(document, dict) or not isinstance(document.get("start"), dict):
        raise ValueError('the first line must be {"start": {...}}')
    known = {field.name for field in fields(Start)}
    unknown = sorted(document["start"].keys() - known)
    if unknown:
        raise ValueError(f"start has the unknown keys {unknown}; known are {sorted(known)}")
    try:
        return Start(**document["start"])
    except TypeError as error:
        raise ValueError(f"start is incomplete: {error}") from error


def main() -> int:
    """Run until stdin closes; the exit status."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    try:
        seeder = Seeder(read_start(sys.stdin.readline()), sys.stdout)
        threading.Thread(target=_read_lines, args=(lines,), name="seeder-stdin", daemon=True).start()
        seeder.run(lines)
    except BrokenPipeError:
        return 0  # the coordinator is gone
    except (OSError, ValueError) as error:
        print(f"seeder: {error}", file=sys.stderr)
        return 2
    return 0


def _read_lines(lines: queue.SimpleQueue[str | None]) -> None:
    for line in sys.stdin:
        lines.put(line)
    lines.put(None)


if __name__ == "__main__":
    sys.exit(main())
