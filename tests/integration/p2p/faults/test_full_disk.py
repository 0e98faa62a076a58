"""A real file system without room: told in one line, nothing half there, and on it goes when there is room."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2p.adapters.assemble import assemble
from p2p.adapters.bulk.events import GaveUp, PeerOpened, TransferComplete
from p2p.adapters.fetch import fetch
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.snapshot_dir import digest_of
from p2p.errors import ApplyFailed, FetchFailed
from tests.factories_p2p import StoreSource, by, publish, weights, write_model
from tests.integration.p2p.bulk.nodes import Node, holds_all, make_batches, make_pieces, put_all, running

SMALL_MB = 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={SMALL_MB}m", "echo2-test", str(place)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here (not root?): {mounted.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(place: Path, *, leave: int) -> Path:
    """Something else takes the room but for `leave` bytes."""
    ballast = place / "ballast"
    free = os.statvfs(place).f_bavail * os.statvfs(place).f_frsize
    ballast.write_bytes(bytes(max(free - leave, 0)))
    return ballast


def test_a_node_halts_and_goes_on_when_there_is_room(tmp_path: Path, small_disk: Path) -> None:
    data = make_pieces(20, 50_000)
    seeder, peer = Node(tmp_path, "seeder", is_seeder=True), Node(small_disk, "w-a")
    put_all(seeder.store, data)
    ballast = fill(small_disk, leave=400_000)
    with running(seeder, peer):
        peer.dial(seeder)
        peer.wait_event(PeerOpened)
        for text, signature in make_batches(data):
            transfer = seeder.node.add_batch(text, signature)
        told = peer.wait_event(GaveUp)
        assert isinstance(told, GaveUp)
        assert told.is_final
        assert "No space left on device" in told.reason
        assert "free some space" in told.reason
        assert "\n" not in told.reason
        (state,) = peer.node.state().transfers
        assert state.halted == told.reason
        before = {digest: peer.store.read(digest) for digest in peer.store.digests()}
        assert 0 < len(before) < 20
        assert not list(peer.store.root.rglob("*.tmp")), "what could not be written is not there"
        ballast.unlink()
        peer.node.resume(transfer)
        peer.wait_event(TransferComplete)
        assert holds_all(peer.store, data)


async def test_a_fetch_fails_in_words_and_its_next_try_takes_the_rest(tmp_path: Path, small_disk: Path) -> None:
    model = write_model(tmp_path / "model", {"w": weights((1000, 256))})
    manifest = publish(model, tmp_path / "origin", job_id="job", version=1, canary_ids=())
    origin, store = PieceStore(tmp_path / "origin"), PieceStore(small_disk / "pieces", files=UNSYNCED_FILES)
    needed = manifest.pieces([manifest.edges[0]])
    ballast = fill(small_disk, leave=300_000)
    with pytest.raises(FetchFailed, match=r"^piece [0-9a-f]{64} cannot be stored in .*No space left.*free some space$"):
        await fetch(needed, [StoreSource("origin", origin)], store)
    here = set(store.digests())
    assert 0 < len(here) < len(needed)
    ballast.unlink()
    source = StoreSource("origin", origin)
    await fetch(needed, [source], store)
    assert set(source.asked).isdisjoint(here)


def test_a_version_that_has_no_room_leaves_the_old_one(tmp_path: Path, small_disk: Path) -> None:
    """An older directory of the name stays whole; nothing is left beside it; with room the new one takes its place."""
    manifests = []
    for number in (1, 2):
        model = write_model(tmp_path / str(number), {"w": weights((1000, 300), seed=number)})
        manifests.append(publish(model, tmp_path / "origin", job_id="job", version=number, canary_ids=()))
    store, out = PieceStore(tmp_path / "origin"), small_disk / "version"
    first, second = manifests
    assemble(first, by(first, first.edges[0]), store, out)
    ballast = fill(small_disk, leave=200_000)
    with pytest.raises(ApplyFailed, match=r"^version 2 of job job is not applied: .*No space left on device[^\n]*$") as refused:
        assemble(second, by(second, second.edges[0]), store, out)
    assert isinstance(refused.value.__cause__, OSError)
    assert refused.value.__cause__.errno == errno.ENOSPC, "by this a worker tells it from a bad path"
    assert digest_of(out) == first.digest
    assert sorted(path.name for path in small_disk.iterdir()) == ["ballast", "version"]
    ballast.unlink()
    assemble(second, by(second, second.edges[0]), store, out)
    assert digest_of(out) == second.digest
