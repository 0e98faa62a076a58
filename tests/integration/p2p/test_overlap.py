"""Encoding and transfer overlap: the real encoder child, the real seeder process and a peer on loopback, with a model of several shards."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from coordinator.adapters.clock import SystemClock
from coordinator.adapters.publisher import ProcessPublisher
from coordinator.adapters.seeder_process import SeederProcess, SeederSettings
from coordinator.service.job_ports import BaseSnapshot, SignedManifest
from p2p.adapters.bulk.events import PeerOpened, PieceStored, TransferComplete
from p2p.adapters.snapshot_dir import digest_of
from p2p.codec.layout import SHARD_ELEMENTS
from p2p.domain.addresses import PeerInfo
from p2p.domain.batches import Batch
from p2p.domain.manifest import Manifest
from tests.factories_p2p import write_model
from tests.integration.p2p.bulk.nodes import COORDINATOR, JOB, LOOPBACK, Node, public, ticket

SHARDS = 4
CHANGED = 0.2


def make_versions(root: Path) -> tuple[Path, Path]:
    """Two versions of four full shards of bf16; one weight in five differs in its last place."""
    rng = np.random.default_rng(0)
    shard = (rng.standard_normal(SHARD_ELEMENTS, np.float32).view("<u4") >> 16).astype("<u2")
    changed = rng.random(SHARD_ELEMENTS, np.float32) < CHANGED
    names = [f"layer.{number}" for number in range(SHARDS)]
    rows = {name: np.roll(shard, number) for number, name in enumerate(names)}
    made = []
    for version in range(2):
        bits = {name: (row ^ (changed * np.uint16(version))).astype("<u2") for name, row in rows.items()}
        tensors = {name: ("BF16", row.shape, row.tobytes()) for name, row in bits.items()}
        made.append(write_model(root / f"v{version}", tensors))
    return made[0], made[1]


class Told:
    """Batches in order of their telling, with the time (Unix seconds)."""

    def __init__(self, seeder: SeederProcess) -> None:
        self.batches: list[tuple[float, Batch]] = []
        self._seeder = seeder

    def __call__(self, text: str, signature: str) -> None:
        self.batches.append((time.time(), Batch.from_json(text)))
        self._seeder.batch(text, signature)


@contextmanager
def peer_at(root: Path, seeder: SeederProcess) -> Iterator[Node]:
    """A connected receiver."""
    assert seeder.address is not None
    place = PeerInfo(seeder.address.host, seeder.address.port, seeder.address.certificate_sha256)
    peer = Node(root, "w-a")
    try:
        peer.node.dial(place, ticket("w-a", "seeder"))
        yield peer
    finally:
        peer.node.close()


async def eventually(condition: object, within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.mark.long
async def test_the_first_piece_leaves_before_the_last_shard_is_encoded(tmp_path: Path) -> None:
    base, new = make_versions(tmp_path)
    key_file = tmp_path / "seeder.key"
    seeder = SeederProcess(SeederSettings(tmp_path / "pieces", key_file, public(COORDINATOR), "127.0.0.1", 0, LOOPBACK))
    told = Told(seeder)
    publisher = ProcessPublisher(tmp_path / "pieces", COORDINATOR, SystemClock(), on_batch=told)
    life = asyncio.create_task(seeder.run())
    try:
        await eventually(lambda: seeder.address is not None)
        with peer_at(tmp_path, seeder) as peer:
            await asyncio.to_thread(peer.wait_event, PeerOpened)
            signed, encoded_at = await publish(publisher, base, new)
            await asyncio.to_thread(peer.wait_event, TransferComplete, within_s=60)
            await eventually(lambda: seeder.first_sent)
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life
        await publisher.close()
    (edge,) = Manifest.from_json(signed.text).edges
    (at,) = seeder.first_sent.values()
    assert list(seeder.first_sent) == [edge.transfer]
    last_shard_at = told.batches[-1][0]
    assert told.batches[-1][1].is_last
    assert told.batches[0][0] <= at < last_shard_at <= encoded_at
    unsent = sum(piece.size for when, batch in told.batches if when > at for piece in batch.pieces)
    assert unsent > edge.size / 2, "most of the edge was still to be encoded"
    assert 0 < signed.first_piece_s < signed.encode_s
    got = [one for one in peer.told if isinstance(one, PieceStored)]
    assert sum(one.piece.size for one in got) == edge.size


async def publish(publisher: ProcessPublisher, base: Path, new: Path) -> tuple[SignedManifest, float]:
    """The delta's manifest, and when the encoder was done."""
    held = BaseSnapshot(0, digest_of(base), str(base))
    signed = await publisher.publish(new, job_id=JOB, version=1, canary_ids=(), base=held)
    return signed, time.time()
