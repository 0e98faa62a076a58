"""Random frames from holders of tickets: the node answers, skips or ends the connection in words, and serves honest peers afterwards."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from p2p.adapters.bulk.events import PeerClosed, TransferComplete
from tests.integration.p2p.bulk import stranger as wire
from tests.integration.p2p.bulk.nodes import LIMITS, Node, holds_all, make_batches, make_pieces, put_all, running
from tests.integration.p2p.bulk.stranger import Gone, Stranger

KINDS = (*range(wire.KNOWS, wire.BYE), wire.HELLO, wire.RENEW, wire.BYE, 0, 99, 128, 255)


def talk(peer: Stranger, rng: random.Random, transfer: bytes, frames: int) -> None:
    """Frames that are right in a random number of ways."""
    known = [transfer, rng.randbytes(32)]
    peer.say(wire.KNOWS, transfer, transfer=1, a=rng.choice([0, 1, 5]))
    for _ in range(frames):
        kind = rng.choice(KINDS)
        payload = {
            wire.KNOWS: rng.choice(known),
            wire.ASK: rng.choice(known),
            wire.FORGET: rng.choice(known),
            wire.HAVE: rng.choice([b"", bytes([rng.randrange(3)]) + rng.randbytes(rng.choice([4, 8, 16, 40]))]),
            wire.DATA: rng.randbytes(rng.choice([1, 1000, 20_000])),
            wire.BATCH: rng.randbytes(64) + b"{}" * rng.randrange(1, 50),
            wire.RENEW: b"x.y",
            wire.HELLO: b"{}",
            wire.BYE: b"",
        }.get(kind, b"")
        if rng.random() < 0.03:
            payload = rng.randbytes(rng.randrange(100))
        small = rng.choice([0, 1, 2, 3, 2**32 - 1])
        peer.say(kind, payload, flag=rng.randrange(-2, 3), transfer=rng.choice([1, 1, 1, 2]), a=small, b=rng.choice([0, 0, 1000]))


def survives(tmp_path: Path, connections: int, frames: int) -> None:
    data = make_pieces(4, 20_000)
    node, honest = Node(tmp_path, "w-a", limits=replace(LIMITS, hello_s=5.0)), Node(tmp_path, "w-h")
    put_all(honest.store, data)
    batches = make_batches(data)
    with running(node, honest):
        for text, signature in batches:
            transfer = bytes.fromhex(node.node.add_batch(text, signature))
        for seed in range(connections):
            with Stranger(node.address) as peer:
                peer.hello(f"w-x{seed}", "w-a")
                try:
                    talk(peer, random.Random(seed), transfer, frames)
                except Gone:
                    continue
        for text, signature in batches:
            honest.node.add_batch(text, signature)
        honest.dial(node)
        node.wait_event(TransferComplete)
        assert holds_all(node.store, data)
        reasons = {one.reason for one in node.told if isinstance(one, PeerClosed)}
        assert not [reason for reason in reasons if "internal error" in reason]
        assert len(reasons) > 3
        assert node.node._hub.buffers_left == LIMITS.buffer_bytes


def test_random_frames_do_no_harm(tmp_path: Path) -> None:
    survives(tmp_path, connections=60, frames=20)


@pytest.mark.long
def test_many_random_frames_do_no_harm(tmp_path: Path) -> None:
    survives(tmp_path, connections=2000, frames=60)
