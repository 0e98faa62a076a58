"""Edges with bases through the real codec: encoded by the publisher, applied hop by hop, whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Base, Encoder, cut, piece_bytes
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.batches import Batch, text_hash
from p2p.domain.hops import Hop, hops_of
from p2p.domain.lineage import path
from p2p.domain.manifest import Edge, Manifest
from p2p.errors import ApplyFailed, SnapshotError
from tests.factories_p2p import Spec, weights, write_model

ROWS, COLUMNS = 64, 96


def tensors_of(version: int) -> dict[str, Spec]:
    """Each version moves one element in fifty of the one before by one ulp; a norm in fp32 changes wholly."""
    _, shape, data = weights((ROWS, COLUMNS))
    words = np.frombuffer(data, "<u2").copy()
    for number in range(1, version + 1):
        places = np.random.default_rng(number).choice(words.size, words.size // 50, replace=False)
        words[places] += 1
    norm = np.full(8, 1.0 + version, "<f4")
    return {"w": ("BF16", shape, words.tobytes()), "norm": ("F32", (8,), norm.tobytes()), "empty": ("BF16", (0, 3), b"")}


@dataclass
class Line:
    """Versions published one after another into one store; `hops` are all edges."""

    root: Path
    encoder: Encoder
    manifests: list[Manifest]
    hops: list[Hop]

    @property
    def store(self) -> PieceStore:
        return PieceStore(self.root / "pieces")

    def base(self, version: int) -> Base:
        return Base(version, self.manifests[version].digest, self.root / f"v{version}")

    def publish(self, base: int | None, told: list[str] | None = None) -> Manifest:
        version = len(self.manifests)
        directory = write_model(self.root / f"v{version}", tensors_of(version))
        manifest = self.encoder.publish(
            directory,
            job_id="job",
            version=version,
            canary_ids=(1,),
            base=None if base is None else self.base(base),
            on_batch=(told if told is not None else []).append,
        )
        self.manifests.append(manifest)
        self.hops += hops_of(manifest)
        return manifest

    def route(self, to: int, held: Sequence[int]) -> list[Hop]:
        ways = path(
            [hop.way for hop in self.hops], self.manifests[to].digest, held=frozenset(self.manifests[n].digest for n in held)
        )
        by_id = {hop.way.id: hop for hop in self.hops}
        return [by_id[way.id] for way in ways]

    def held(self, *versions: int) -> dict[str, Path]:
        return {self.manifests[version].digest: self.root / f"v{version}" for version in versions}


@pytest.fixture
def line(tmp_path: Path) -> Line:
    made = Line(tmp_path, Encoder(tmp_path / "pieces"), [], [])
    made.publish(None)
    for version in range(1, 6):
        made.publish(version - 1)
    return made


def test_each_publication_carries_its_single_delta(line: Line) -> None:
    assert [[(edge.encoding, edge.base_version) for edge in manifest.edges] for manifest in line.manifests] == [
        [("raw", None), ("planes", None)],
        *([("delta", version)] for version in range(5)),
    ]
    assert [manifest.digest for manifest in line.manifests] == [digest_of(line.root / f"v{version}") for version in range(6)]
    assert line.manifests[1].edges[0].size < line.manifests[0].nbytes / 10


@pytest.mark.parametrize(("held", "hops"), [([4], 1), ([2], 3), ([], 6)])
def test_any_path_leads_to_the_very_bits(line: Line, held: list[int], hops: int) -> None:
    route = line.route(5, held)
    assert len(route) == hops
    assemble(line.manifests[5], route, line.store, line.root / "out", held=line.held(*held))
    assert digest_of(line.root / "out") == line.manifests[5].digest


def test_squashed_edges_and_keyframes_are_added_later(line: Line) -> None:
    newest = line.manifests[5]
    hops = line.encoder.add_edges(line.root / "v5", newest, bases=[line.base(1), line.base(0)], keyframe=True)
    assert [(hop.edge.encoding, hop.edge.base_version) for hop in hops] == [
        ("delta", 1),
        ("delta", 0),
        ("raw", None),
        ("planes", None),
    ]
    for number, hop in enumerate(hops):
        assemble(newest, [hop], line.store, line.root / f"out{number}", held=line.held(0, 1))
    line.hops += hops
    assert len(line.route(5, [])) == 1
    assert len(line.route(5, [1])) == 1


def test_a_squashed_edge_whose_base_directory_is_gone_is_made_from_the_edges_that_lead_there(line: Line) -> None:
    """The very same edge as with the directory, which is not left behind."""
    newest, path = line.manifests[5], tuple(line.route(2, []))
    assert [hop.edge.base_version for hop in path] == [None, 0, 1]
    (with_bits,) = line.encoder.add_edges(line.root / "v5", newest, bases=[line.base(2)])
    gone = Base(2, line.manifests[2].digest, line.root / "gone", path=path)
    (without,) = Encoder(line.root / "pieces").add_edges(line.root / "v5", newest, bases=[gone])
    assert without == with_bits
    assert not list(line.root.glob(".*"))
    line.store.remove(path[1].edge.pieces[0].digest)
    assert Encoder(line.root / "pieces").add_edges(line.root / "v5", newest, bases=[gone]) == ()
    assert not list(line.root.glob(".*"))


def test_a_base_with_other_bits_gets_no_edge(line: Line) -> None:
    """Gone, damaged, or of other tensors: the version is published as keyframes, and no wrong edge is ever named."""
    write_model(line.root / "v6", tensors_of(6))
    damaged = write_model(line.root / "damaged", tensors_of(4))
    other = write_model(line.root / "other", {"z": weights((4,))})
    for base in (
        Base(5, line.manifests[5].digest, line.root / "gone"),
        Base(5, line.manifests[5].digest, damaged),
        Base(5, digest_of(other), other),
    ):
        manifest = Encoder(line.root / "pieces").publish(line.root / "v6", job_id="job", version=6, canary_ids=(), base=base)
        assert [edge.encoding for edge in manifest.edges] == ["raw", "planes"]
    with pytest.raises(SnapshotError, match="does not hold version 6"):
        Encoder(line.root / "pieces").add_edges(line.root / "v5", manifest, keyframe=True)


def test_a_wrong_base_is_noticed_and_leaves_what_was_there(line: Line) -> None:
    """The held directory lies about its digest: the result's digest tells."""
    out = line.root / "out"
    assemble(line.manifests[4], line.route(4, [3]), line.store, out, held=line.held(3))
    before = digest_of(out)
    lying = {line.manifests[4].digest: line.root / "v3"}
    with pytest.raises(ApplyFailed, match="has digest"):
        assemble(line.manifests[5], line.route(5, [4]), line.store, out, held=lying)
    assert digest_of(out) == before
    assert not list(line.root.glob(".*tmp"))


def test_paths_that_do_not_join_are_refused(line: Line) -> None:
    manifest, (one, two, three) = line.manifests[5], line.route(5, [2])
    for route, words in (
        ([], "the path is empty"),
        ([one, two], "does not end at"),
        ([one, three], "hop 1 starts at"),
        ([two, three], "is not held"),
    ):
        with pytest.raises(ApplyFailed, match=words):
            assemble(manifest, route, line.store, line.root / "out", held=line.held(2))
    assert not (line.root / "out").exists()


def test_a_damaged_hop_names_itself(line: Line) -> None:
    route = line.route(5, [2])
    line.store.remove(route[1].edge.pieces[0].digest)
    with pytest.raises(ApplyFailed, match=r"hop to version 4 from 3.*not in the store"):
        assemble(line.manifests[5], route, line.store, line.root / "out", held=line.held(2))


def test_the_same_bits_under_another_number_need_no_hop(line: Line) -> None:
    again = line.encoder.publish(line.root / "v5", job_id="job", version=6, canary_ids=(), base=line.base(5))
    assert again.digest == line.manifests[5].digest
    assemble(again, [], line.store, line.root / "out", held=line.held(5))
    assert digest_of(line.root / "out") == again.digest


def test_batches_tell_the_pieces_while_the_edge_is_made(tmp_path: Path) -> None:
    """Each batch comes when its pieces are in the store; together they are the manifest's edges, in order."""
    told: list[str] = []
    store = PieceStore(tmp_path / "pieces")

    def hear(text: str) -> None:
        assert all(store.has(piece.digest) for piece in Batch.from_json(text).pieces)
        told.append(text)

    big = np.random.default_rng(0).bytes(3_000_000)
    directory = write_model(tmp_path / "m", {"w": ("U8", (3_000_000,), big)})
    manifest = Encoder(tmp_path / "pieces").publish(directory, job_id="job", version=0, canary_ids=(), on_batch=hear)
    for edge in manifest.edges:
        chain = [text for text in told if Batch.from_json(text).encoding == edge.encoding]
        batches = [Batch.from_json(text) for text in chain]
        assert edge.transfer == text_hash(chain[0])
        assert [batch.number for batch in batches] == list(range(len(batches)))
        assert [batch.previous for batch in batches] == ["", *(text_hash(text) for text in chain[:-1])]
        assert [batch.is_last for batch in batches] == [*[False] * (len(batches) - 1), True]
        assert tuple(piece for batch in batches for piece in batch.pieces) == edge.pieces
        assert len(batches[0].pieces) == 1, "the first piece is told at once"


def test_piece_sizes() -> None:
    """clamp(F / 400, 64 KiB, 1 MiB)."""
    assert [piece_bytes(size) for size in (0, 61_000_000, 10**10)] == [65536, 152_500, 1 << 20]
    assert list(cut([b"abcd", b"", b"efg"], 3)) == [b"abc", b"def", b"g"]
    assert list(cut([], 3)) == []


def test_an_edge_that_is_no_delta_here_is_passed_over(tmp_path: Path) -> None:
    directory = write_model(tmp_path / "m", tensors_of(0))
    encodings = {"raw": Encoder(tmp_path)._encodings["raw"], "planes": Encoder(tmp_path)._encodings["planes"]}
    encoder = Encoder(tmp_path / "pieces", encodings=encodings)
    base = Base(0, digest_of(directory), directory)
    manifest = encoder.publish(directory, job_id="job", version=1, canary_ids=(), base=base)
    assert all(isinstance(edge, Edge) and edge.base_digest is None for edge in manifest.edges)
