"""From a directory to pieces and back: publishing, batches, and fetches that are cut off, cancelled, or meet a slow source."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.fetch import assemble, fetch
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.batches import Chain, text_hash
from p2p.domain.batching import edge_batches
from p2p.domain.manifest import Edge, Manifest, Piece
from p2p.domain.signing import sign_batch
from p2p.errors import FetchFailed
from tests.factories_p2p import by, publish

COORDINATOR = Ed25519PrivateKey.from_private_bytes(b"\x01" * 32)
PUBLIC = COORDINATOR.public_key().public_bytes_raw().hex()


@pytest.fixture
def origin(made: ModuleType, tmp_path: Path) -> tuple[Manifest, PieceStore]:
    """A version of 3 MB in twelve raw pieces, with its store."""
    model = made.write_model(tmp_path / "model", {"w": made.weights((1500, 1024)), "n": made.bits("F32", (9,))})
    return publish(model, tmp_path / "origin", job_id="job", version=1, canary_ids=()), PieceStore(tmp_path / "origin")


def told_as(texts: list[str], edge: Edge) -> bool:
    """Whether these are the edge's batches, as anybody accepts them."""
    chain = Chain(edge.transfer or "", PUBLIC)
    for text in texts:
        chain.accept(text, sign_batch(COORDINATOR, text))
    return chain.is_complete and chain.pieces == edge.pieces


def test_an_edge_names_the_transfer_that_was_told_and_can_be_told_again(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    """Of keyframes, of a delta, and of edges made later; the coordinator tells the same batches again from its rows."""
    _, store = origin
    encoder, told = Encoder(store.root), list[str]()
    first = encoder.publish(tmp_path / "model", job_id="job", version=1, canary_ids=(), on_batch=told.append)
    changed = made.weights((1500, 1024))
    other = made.write_model(tmp_path / "other", {"w": (*changed[:2], changed[2][:-2] + b"\0\0"), "n": made.bits("F32", (9,))})
    base = Base(1, first.digest, tmp_path / "model")
    second = encoder.publish(other, job_id="job", version=2, canary_ids=(), base=base, on_batch=told.append)
    (late,) = encoder.add_edges(other, second, keyframe=True, on_batch=told.append)[:1]
    made_edges = [(1, edge) for edge in first.edges] + [(2, edge) for edge in second.edges] + [(2, late.edge)]
    assert [edge.encoding for _, edge in made_edges] == ["raw", "planes", "delta", "raw"]
    for version, edge in made_edges:
        begin = next(place for place, text in enumerate(told) if text_hash(text) == edge.transfer)
        again = [batch.to_json() for batch in edge_batches("job", version, edge)]
        assert told[begin : begin + len(again)] == again
        assert told_as(again, edge)


def child(*arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(publish.__code__.co_filename).parents[2])}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )


def test_publishing_in_a_child_process_gives_the_same_manifest(origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    arguments = [
        "-m",
        "p2p.adapters.publish",
        str(tmp_path / "model"),
        str(tmp_path / "child"),
        "--job-id",
        "job",
        "--version",
        "1",
    ]
    process = child(*arguments)
    out, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert Manifest.from_json(out.strip()) == manifest
    assert set(PieceStore(tmp_path / "child").digests()) == set(store.digests())


FETCHING = """
import asyncio, sys, time
from pathlib import Path
from p2p.adapters.fetch import fetch
from p2p.adapters.piece_store import PieceStore
from p2p.domain.manifest import Manifest

class Slow:
    name = "slow"
    store = PieceStore(Path(sys.argv[2]))
    async def read(self, piece):
        await asyncio.sleep(0.3)
        return self.store.read(piece.digest)

manifest = Manifest.from_json(Path(sys.argv[1]).read_text())
tell = lambda here, total: print(here, flush=True)
asyncio.run(fetch(manifest.pieces([manifest.edges[0]]), [Slow()], PieceStore(Path(sys.argv[3])), on_progress=tell))
"""


async def test_a_fetch_that_was_killed_resumes(made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path) -> None:
    manifest, store = origin
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    process = child("-c", FETCHING, str(tmp_path / "manifest.json"), str(store.root), str(tmp_path / "mine"))
    assert process.stdout is not None
    assert process.stderr is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    mine = PieceStore(tmp_path / "mine")
    mine.sweep()
    had = {digest: len(mine.read(digest)) for digest in mine.digests()}
    assert 2 <= len(had) < len(manifest.pieces([manifest.edges[0]]))
    report = await fetch(manifest.pieces([manifest.edges[0]]), [made.StoreSource("origin", store)], mine, no_progress_s=10)
    assert sum(report.bytes_by_source.values()) + sum(had.values()) == sum(
        piece.size for piece in manifest.pieces([manifest.edges[0]])
    )
    assemble(manifest, by(manifest, manifest.edges[0]), mine, tmp_path / "out")


async def test_a_cancelled_fetch_leaves_no_request_and_resumes(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    manifest, store = origin
    needed = manifest.pieces([manifest.edges[0]])
    slow, mine = made.StoreSource("slow", store), PieceStore(tmp_path / "mine")
    read, arrived = slow.read, list[Piece]()

    async def paced(piece: Piece) -> bytes:
        await asyncio.sleep(0.05)
        data: bytes = await read(piece)
        return data

    slow.read = paced
    running = asyncio.create_task(fetch(needed, [slow], mine, no_progress_s=10, on_piece=arrived.append))
    while len(arrived) < 3:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(asyncio.all_tasks()) == 1
    assert {piece.digest for piece in arrived} <= set(mine.digests())
    report = await fetch(needed, [made.StoreSource("origin", store)], mine, no_progress_s=10)
    assert 0 < sum(report.bytes_by_source.values()) < manifest.edges[0].size


async def test_a_source_that_never_answers_is_left_for_another(
    made: ModuleType, origin: tuple[Manifest, PieceStore], tmp_path: Path
) -> None:
    manifest, store = origin
    silent = made.StoreSource("silent", store)

    async def never(_: Piece) -> bytes:
        await asyncio.sleep(60)
        return b""

    silent.read = never
    mine = PieceStore(tmp_path / "mine", files=UNSYNCED_FILES)
    edge = manifest.edges[0]
    report = await fetch(manifest.pieces([edge]), [silent, made.StoreSource("other", store)], mine, no_progress_s=3)
    assert report.bytes_by_source.keys() == {"other"}
    assemble(manifest, by(manifest, edge), mine, tmp_path / "out")
    assert digest_of(tmp_path / "out") == manifest.digest
    with pytest.raises(FetchFailed, match=r"no piece arrived for 1 s.*silent: no answer"):
        await fetch(manifest.pieces([edge]), [silent], PieceStore(tmp_path / "none"), no_progress_s=1)
