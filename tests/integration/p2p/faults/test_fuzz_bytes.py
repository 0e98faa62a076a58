"""An honest peer's bytes, damaged: over live TLS connections, before and after the handshake. The node ends them in words and lives on."""

from __future__ import annotations

import random
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import PeerClosed, TransferComplete
from p2p.domain import bulk_frames as frames
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import (
    LIMITS,
    Node,
    eventually,
    holds_all,
    key_of,
    make_batches,
    make_pieces,
    put_all,
    running,
    ticket,
)
from tests.integration.p2p.bulk.stranger import Gone, Stranger

PIECE = 20_000
NUMBERS = [0, 1, 2, 255, 2**16, 2**31 - 1, 2**32 - 1]
BUFFERS = 1 << 20


def conversation(data: list[bytes], batches: list[tuple[str, str]], transfer: bytes, text: str) -> bytes:
    """What a peer may say from the end of the handshake on, everything once."""
    said = [
        frames.frame(frames.KNOWS, transfer, transfer=1, a=len(batches)),
        frames.have(1, 0b0101, queue=0, uplink=1e6, serves=True),
        frames.frame(frames.ASK, transfer),
        *(frames.frame(frames.REQUEST, transfer=1, a=piece) for piece in (1, 3)),
        frames.frame(frames.CANCEL, transfer=1, a=3),
        frames.data_head(1, 0, 0, 10_000, 0) + data[0][:10_000],
        frames.data_head(1, 0, 10_000, 10_000, 0) + data[0][10_000:],
        frames.batch(1, *batches[0]),
        frames.have(1, int("01" * 300, 2) & 0xF, queue=1, uplink=1e6, serves=True),
        frames.frame(frames.PING, a=1, b=2),
        frames.frame(frames.RENEW, text.encode()),
        frames.frame(200, b"of a later version"),
        frames.frame(frames.ABSENT, transfer=1, a=2),
        frames.frame(frames.FORGET, transfer),
    ]
    return b"".join(said)


def spoil(whole: bytes, rng: random.Random) -> bytes:
    """One to five changes; heads, which are few of the bytes, as often as the rest."""
    data = bytearray(whole)
    for _ in range(rng.randint(1, 5)):
        at = rng.randrange(max(min(len(data), 200) if rng.random() < 0.5 else len(data), 1))
        match rng.randrange(6):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1:
                data[at : at + 4] = rng.choice(NUMBERS).to_bytes(4, "little")
            case 2:
                del data[at : at + rng.randint(1, 40)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 40))
            case 4:
                data[at:at] = data[at : at + rng.randint(1, 2000)]
            case _:
                del data[max(at, 1) :]
    return bytes(data)


def survives(tmp_path: Path, connections: int) -> None:
    data = make_pieces(4, PIECE)
    limits = replace(LIMITS, hello_s=2.0, silence_s=5.0, buffer_bytes=BUFFERS)
    node, honest = Node(tmp_path, "w-a", limits=limits), Node(tmp_path, "w-h")
    put_all(honest.store, data)
    put_all(node.store, data[1:2])
    batches = make_batches(data)
    with running(node, honest):
        for text, signature in batches:
            transfer = bytes.fromhex(node.node.add_batch(text, signature))
        threads = threading.active_count()
        tracemalloc.start()
        begun = time.process_time()
        for seed in range(connections):
            attack(node, data, batches, transfer, seed)
        spent, peak = time.process_time() - begun, tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert spent < 0.2 * connections + 5
        assert peak < BUFFERS + (24 << 20), f"{peak} bytes"
        assert eventually(lambda: node.node.state().links == ())
        assert eventually(lambda: threading.active_count() <= threads)
        for text, signature in batches:
            honest.node.add_batch(text, signature)
        honest.dial(node)
        node.wait_event(TransferComplete)
        assert holds_all(node.store, data)
        reasons = {one.reason for one in node.told if isinstance(one, PeerClosed)}
        assert not [reason for reason in reasons if "internal error" in reason or "\n" in reason]
        assert len(reasons) > 3, reasons


def attack(node: Node, data: list[bytes], batches: list[tuple[str, str]], transfer: bytes, seed: int) -> None:
    """One connection; a new peer each time, since whoever breaks the protocol is not let in again for a while."""
    rng, name = random.Random(seed), f"w-x{seed}"
    text = ticket(name, "w-a")
    with Stranger(node.address) as peer:
        try:
            if seed % 4 == 0:
                hello_of_bytes(peer, name, text, rng)
                return
            peer.hello(name, "w-a", text=text)
            whole = spoil(conversation(data, batches, transfer, text), rng)
            while whole:
                cut = rng.choice([1, 7, 16, 500, 20_000])
                peer.stream.sendall(whole[:cut])
                whole = whole[cut:]
            if rng.random() < 0.3:
                peer.say(wire.BYE, b"enough")
                peer.reason()
        except (Gone, OSError):
            return


def hello_of_bytes(peer: Stranger, name: str, text: str, rng: random.Random) -> None:
    """The handshake itself is damaged."""
    *_, challenge = peer.hear(wire.CHALLENGE)
    proof = key_of(name).sign(b"echo2-bulk\n" + f"{challenge.hex()}\n{peer.certificate}\nt".encode()).hex()
    body = f'{{"proof":"{proof}","ticket":"{text}"}}'.encode()
    whole = wire.HEAD.pack(wire.HELLO, 0, 0, len(body), 1, 0) + body
    spoilt = spoil(whole, rng)
    if spoilt[: len(whole)] == whole:
        return
    peer.stream.sendall(spoilt)
    peer.stream.shutdown(2)


def test_damaged_bytes_do_no_harm(tmp_path: Path) -> None:
    survives(tmp_path, 40)


@pytest.mark.long
def test_many_damaged_bytes_do_no_harm(tmp_path: Path) -> None:
    survives(tmp_path, 3000)
