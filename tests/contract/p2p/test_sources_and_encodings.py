"""What every source and every encoding must do, together: both encodings by both sources, through fetch and assemble."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import ModuleType

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2p.adapters.fetch import PieceSource, assemble, fetch
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.publish import Encoder
from p2p.adapters.snapshot_dir import digest_of, open_snapshot
from p2p.codec import pieces
from p2p.domain.manifest import Edge, Manifest, Piece
from p2p.errors import FetchFailed, PieceAbsent, PieceCorrupt
from tests.factories_p2p import by
from tests.integration.worker_node.conftest import SmallCoordinator
from worker_node.adapters.coordinator_client import CoordinatorClient
from worker_node.adapters.downlink import Downlink
from worker_node.adapters.origin import CoordinatorPieces

ENCODINGS = ("raw", "planes")


@pytest.fixture(params=["store", "coordinator"])
async def source(request: pytest.FixtureRequest, made: ModuleType, tmp_path: Path) -> AsyncIterator[PieceSource]:
    """A source that serves the store in `tmp_path / "origin"`."""
    if request.param == "store":
        yield made.StoreSource("origin", PieceStore(tmp_path / "origin"))
        return
    coordinator = SmallCoordinator(tmp_path)
    coordinator.check = lambda request, body: None  # type: ignore[method-assign]  # nobody joined
    await coordinator.start(tls=True)
    client = CoordinatorClient(coordinator.url, key=Ed25519PrivateKey.generate(), coordinator_key=coordinator.public)
    nothing_here = PieceStore(tmp_path / "nothing")
    yield CoordinatorPieces(client, "job", lambda: 1, nothing_here, Downlink(None, lambda _: None))
    await client.close()
    await coordinator.stop()


@pytest.fixture
def manifest(made: ModuleType, tmp_path: Path) -> Manifest:
    """A version of 1.3 MB: five raw pieces and more than one of every kind of tensor."""
    tensors = {
        "model.embed_tokens.weight": made.weights((512, 1024)),
        "model.norm.weight": made.bits("F32", (1024,)),
        "model.layer.weight": made.weights((128, 1024), 1),
        "model.steps": made.bits("I64", ()),
        "model.none": made.bits("F16", (0, 3)),
    }
    files = {"config.json": b'{"model_type": "llama"}', "tokenizer.json": b"{}" * 1000}
    model = made.write_model(tmp_path / "model", tensors, files=files)
    return Encoder(tmp_path / "origin").publish(model, job_id="job", version=3, canary_ids=(1, 2))


def edge_of(manifest: Manifest, encoding: str) -> Edge:
    return next(edge for edge in manifest.edges if edge.encoding == encoding)


def bits_of(directory: Path) -> dict[str, bytes]:
    snapshot = open_snapshot(directory)
    return {**{tensor.name: snapshot.read(tensor.name).tobytes() for tensor in snapshot.tensors}, **snapshot.files}


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_version_arrives_bit_for_bit(source: PieceSource, manifest: Manifest, tmp_path: Path, encoding: str) -> None:
    told: list[tuple[int, int]] = []
    store = PieceStore(tmp_path / "mine", files=UNSYNCED_FILES)
    edge = edge_of(manifest, encoding)
    report = await fetch(
        manifest.pieces([edge]), [source], store, no_progress_s=10, on_progress=lambda *figures: told.append(figures)
    )
    assemble(manifest, by(manifest, edge), store, tmp_path / "out")
    assert digest_of(tmp_path / "out") == manifest.digest
    assert bits_of(tmp_path / "out") == bits_of(tmp_path / "model")
    needed = sum(piece.size for piece in manifest.pieces([edge]))
    assert report.bytes_by_source == {source.name: needed}
    assert report.retries == 0
    assert told[0] == (0, needed)
    assert told[-1] == (needed, needed)
    assert told == sorted(told)


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_pieces_that_are_here_are_not_asked_for(
    source: PieceSource, manifest: Manifest, tmp_path: Path, encoding: str
) -> None:
    store = PieceStore(tmp_path / "mine")
    edge = edge_of(manifest, encoding)
    origin = PieceStore(tmp_path / "origin")
    for piece in edge.pieces[:2]:
        store.put(piece, origin.read(piece.digest))
    report = await fetch(manifest.pieces([edge]), [source], store, no_progress_s=10)
    left = sum(piece.size for piece in manifest.pieces([edge])) - sum(piece.size for piece in edge.pieces[:2])
    assert sum(report.bytes_by_source.values()) == left
    again = await fetch(manifest.pieces([edge]), [], store, no_progress_s=10)
    assert again.bytes_by_source == {}


async def test_a_source_says_when_it_does_not_hold_a_piece(source: PieceSource, manifest: Manifest) -> None:
    with pytest.raises(PieceAbsent):
        await source.read(pieces.name(b"never published"))


async def test_a_piece_of_another_size_is_refused(source: PieceSource, manifest: Manifest, tmp_path: Path) -> None:
    piece = manifest.edges[0].pieces[0]
    store = PieceStore(tmp_path / "mine")
    with pytest.raises((PieceCorrupt, FetchFailed)):
        store.put(Piece(piece.digest, 5), await source.read(Piece(piece.digest, 5)))


@pytest.mark.parametrize("encoding", ENCODINGS)
async def test_a_damaged_piece_is_fetched_elsewhere_and_blamed(
    source: PieceSource, manifest: Manifest, made: ModuleType, tmp_path: Path, encoding: str
) -> None:
    edge = edge_of(manifest, encoding)
    every = [piece.digest for piece in manifest.pieces([edge])]
    liar = made.StoreSource("liar", PieceStore(tmp_path / "origin"), bad=every)
    store = PieceStore(tmp_path / "mine")
    report = await fetch(manifest.pieces([edge]), [liar, source], store, no_progress_s=10)
    assert report.bytes_by_source.keys() == {source.name}
    assert report.retries >= 1
    assemble(manifest, by(manifest, edge), store, tmp_path / "out")


async def test_a_version_that_nobody_holds_fails_in_words(source: PieceSource, manifest: Manifest, tmp_path: Path) -> None:
    origin = PieceStore(tmp_path / "origin")
    for digest in list(origin.digests()):
        origin.remove(digest)
    with pytest.raises(FetchFailed, match=f"no piece arrived .*{source.name}: "):
        await fetch(manifest.pieces(manifest.edges[:1]), [source], PieceStore(tmp_path / "mine"), no_progress_s=0.3)


async def test_a_full_disk_ends_the_fetch_in_words(
    source: PieceSource, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    store = PieceStore(tmp_path / "mine")
    monkeypatch.setattr(store, "put", full)
    with pytest.raises(FetchFailed, match=r"cannot be stored.*No space left.*free some space"):
        await fetch(manifest.pieces(manifest.edges[:1]), [source], store, no_progress_s=5)
