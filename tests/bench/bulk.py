"""CPU and memory of the bulk plane: seeder process to worker process on loopback, beside a plain TLS copy in the same run.

`python -m tests.bench bulk [--mib 1024] [--runs 5] [--folder DIR] [--json]`. Every `cpu_s_gb` is user and system time of both processes (`send` and
`receive`: of one) in seconds per GB, 1e9 bytes of pieces, from the first byte to the last, start-up left out; medians of the runs.
`plain`: TLS 1.3 between blocking sockets, 64 KiB a write, BLAKE3 at the receiver, nothing read or stored: what the rest is to be compared with.
`node`: a transfer without file writing: TLS, frames, policy; at the sender files are read and verified (BLAKE3), at the receiver pieces are verified.
`files`: the same with the receiver's files written, not synced. What it costs more depends on the file system, and on whether the machine
has its memory already or gets it page by page: it may be more than all the rest, and differs from run to run. Work of the kernel's own
threads (writing back) is in none of them.
"""

from __future__ import annotations

import json as json_module
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.codec.pieces import name
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch, text_hash
from p2p.domain.manifest import Piece
from p2p.domain.signing import sign_batch
from p2p.domain.tickets import Ticket, sign_ticket
from tests.bench.bulk_server import BLOCK, PIECE, digest_of

COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
WORKER = Ed25519PrivateKey.from_private_bytes(b"\x02" * 32)
PER_BATCH = 256
TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """A process of the bench: lines in and out, CPU time, memory."""

    def __init__(self, arguments: Sequence[str]) -> None:
        self.process = subprocess.Popen([sys.executable, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.most_rss = 0

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self, word: str) -> str:
        """The next line that holds `word`; others are passed over."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if word in line:
                return line.strip()
        raise RuntimeError(f"{self.process.args!r} ended without saying {word!r}")

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def rss(self) -> int:
        """Private and shared memory in use, bytes."""
        pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        self.most_rss = max(self.most_rss, pages * os.sysconf("SC_PAGE_SIZE"))
        return self.most_rss

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(20)
        self.process.stdout.close()


def watched(children: Sequence[Child], last: Child, word: str) -> tuple[str, float, list[float], list[int]]:
    """Until `last` says `word`: its line, seconds, CPU seconds of each, memory that each grew by."""
    begun, cpu, rss = time.perf_counter(), [child.cpu_s() for child in children], [child.rss() for child in children]
    heard, lines = threading.Event(), []

    def listen() -> None:
        lines.append(last.hear(word))
        heard.set()

    thread = threading.Thread(target=listen)
    thread.start()
    while not heard.wait(0.02):
        for child in children:
            child.rss()
    spent = time.perf_counter() - begun
    thread.join()
    return (
        lines[0],
        spent,
        [child.cpu_s() - before for child, before in zip(children, cpu, strict=True)],
        [child.most_rss - before for child, before in zip(children, rss, strict=True)],
    )


def fill(store: PieceStore, count: int) -> list[Piece]:
    """Distinct pieces of 1 MiB."""
    block = bytearray(os.urandom(PIECE))
    pieces = []
    for index in range(count):
        block[:8] = index.to_bytes(8, "little")
        pieces.append(name(block))
        store.put(pieces[-1], block)
    return pieces


def batches(pieces: Sequence[Piece]) -> list[dict[str, str]]:
    """The row as the seeder's commands."""
    texts: list[str] = []
    for begin in range(0, len(pieces), PER_BATCH):
        previous = text_hash(texts[-1]) if texts else ""
        is_last = begin + PER_BATCH >= len(pieces)
        batch = Batch("job", 1, "raw", None, len(texts), previous, tuple(pieces[begin : begin + PER_BATCH]), is_last)
        texts.append(batch.to_json())
    return [{"batch": text, "signature": sign_batch(COORDINATOR, text)} for text in texts]


def public(key: Ed25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def measure_node(root: Path, mib: int, kept: str = "files") -> dict[str, float]:
    """Seeder to worker, which keeps the pieces in `files` or `nowhere`. Raises AssertionError unless every piece came and was verified."""
    origin = root / "origin"
    pieces = fill(PieceStore(origin, files=UNSYNCED_FILES), mib)
    (root / "key").write_text("03" * 32)
    seeder = Child(["-m", "p2p.adapters.bulk.seeder"])
    start = {
        "peer_id": "seeder",
        "coordinator_public_key": public(COORDINATOR),
        "store": str(origin),
        "key_file": str(root / "key"),
        "host": "127.0.0.1",
    }
    seeder.say(json_module.dumps({"start": start}))
    address = PeerInfo(**json_module.loads(seeder.hear("listening"))["listening"])
    worker = Child(["-m", "tests.bench.bulk_server", "node", str(root / "worker"), kept])
    ticket = sign_ticket(COORDINATOR, Ticket("t", "w", public(WORKER), "seeder", "job", 2**40))
    join = {"address": asdict(address), "ticket": ticket, "key": "02" * 32, "coordinator": public(COORDINATOR)}
    worker.say(json_module.dumps(join))
    worker.hear("connected")
    time.sleep(0.3)
    for command in batches(pieces):
        seeder.say(json_module.dumps(command))
    line, spent, cpu, grown = watched([seeder, worker], worker, "complete")
    for child in (worker, seeder):
        child.close()
    if line.split()[1] != digest_of(piece.digest for piece in pieces):
        raise AssertionError("pieces are missing")
    if kept == "files" and not all(PieceStore(root / "worker").has(piece.digest) for piece in pieces):
        raise AssertionError("pieces were not stored")
    return in_words("files" if kept == "files" else "node", mib * PIECE, spent, cpu, grown)


def measure_plain(root: Path, mib: int) -> dict[str, float]:
    """The plain copy."""
    receiver = Child(["-m", "tests.bench.bulk_server", "receive", str(root / "tls")])
    port = receiver.hear("")
    sender = Child(["-m", "tests.bench.bulk_server", "send", port, str(mib * PIECE // BLOCK)])
    sender.hear("connected")
    time.sleep(0.3)
    sender.say("go")
    _, spent, cpu, grown = watched([sender, receiver], receiver, "complete")
    for child in (sender, receiver):
        child.close()
    return in_words("plain", mib * PIECE, spent, cpu, grown)


def in_words(which: str, size: int, seconds: float, cpu: Sequence[float], grown: Sequence[int]) -> dict[str, float]:
    """Figures by name."""
    gigabytes = size / 1e9
    return {
        f"{which}_mb_s": size / 1e6 / seconds,
        f"{which}_send_cpu_s_gb": cpu[0] / gigabytes,
        f"{which}_receive_cpu_s_gb": cpu[1] / gigabytes,
        f"{which}_cpu_s_gb": sum(cpu) / gigabytes,
        f"{which}_send_grew_mb": grown[0] / 1e6,
        f"{which}_receive_grew_mb": grown[1] / 1e6,
    }


def measure(mib: int, folder: str | None) -> dict[str, float]:
    """Every figure, once."""
    found: dict[str, float] = {}
    for part in (measure_plain, partial(measure_node, kept="nowhere"), measure_node):
        with tempfile.TemporaryDirectory(prefix="echo2-bulk-", dir=folder) as made:
            found |= part(Path(made), mib)
    return found


def main(json: bool = False, mib: int = 1024, runs: int = 5, folder: str = "") -> dict[str, float]:
    """Print the medians, as one JSON object or in lines; returns them."""
    measured = [measure(mib, folder or None) for _ in range(runs)]
    figures = {"mib": float(mib), "runs": float(runs)}
    figures |= {key: median(one[key] for one in measured) for key in measured[0]}
    if json:
        print(json_module.dumps(figures))
        return figures
    for key, value in figures.items():
        print(f"{key:26} {value:9.2f}")
    return figures
