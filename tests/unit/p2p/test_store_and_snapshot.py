"""Pieces on disk, directories read as snapshots, publishing and assembling, certificates."""

from __future__ import annotations

import errno
import json
import ssl
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from p2p.adapters import publish as publish_module
from p2p.adapters.assemble import assemble
from p2p.adapters.durable import RealFiles
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.snapshot_dir import digest_of, open_snapshot
from p2p.adapters.tls import certificate_sha256, pinned_client, self_signed, server_context
from p2p.codec import pieces
from p2p.codec.encodings import ENCODINGS, Base
from p2p.codec.layout import Bytes, Chunk, Shard
from p2p.domain.dtypes import BITS
from p2p.domain.manifest import Edge, FileEntry, Manifest
from p2p.errors import ApplyFailed, ManifestError, PieceCorrupt, SnapshotError
from tests.factories_p2p import by, publish


def test_a_piece_is_stored_verified_and_read_back(tmp_path: Path) -> None:
    store = PieceStore(tmp_path)
    piece = pieces.name(b"hello")
    assert not store.has(piece.digest)
    with pytest.raises(KeyError):
        store.read(piece.digest)
    with pytest.raises(PieceCorrupt):
        store.put(piece, b"hellO")
    assert list(store.digests()) == []
    store.put(piece, b"hello")
    store.put(piece, b"hello")
    assert store.has(piece.digest)
    assert PieceStore(tmp_path).read(piece.digest) == b"hello"
    assert list(store.digests()) == [piece.digest]
    store.remove(piece.digest)
    store.remove(piece.digest)
    assert not store.has(piece.digest)


def test_a_piece_damaged_on_disk_is_told_and_removed(tmp_path: Path) -> None:
    store = PieceStore(tmp_path, files=UNSYNCED_FILES)
    piece = pieces.name(b"hello")
    store.put(piece, b"hello")
    store.path(piece.digest).write_bytes(b"hell")
    with pytest.raises(PieceCorrupt, match="fetch it again"):
        store.read(piece.digest)
    assert not store.has(piece.digest)


@pytest.mark.parametrize("name", ["", "../../etc/passwd", "A" * 64, "a" * 63, "a" * 64 + "\n", "a" * 65])
def test_only_digests_become_paths(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="not a BLAKE3 digest"):
        PieceStore(tmp_path).path(name)


def test_what_killed_writes_left_is_swept_and_pieces_not_kept_go(tmp_path: Path) -> None:
    store = PieceStore(tmp_path)
    some = [pieces.name(data) for data in (b"a", b"b", b"c")]
    for piece, data in zip(some, (b"a", b"b", b"c"), strict=True):
        store.put(piece, data)
    (store.path(some[0].digest).parent / f".{some[0].digest}.0123.tmp").write_bytes(b"half")
    assert store.sweep() == 1
    assert store.sweep() == 0
    assert store.keep_only({some[1].digest}) == 2
    assert list(store.digests()) == [some[1].digest]


MODEL = {"weight": (64, 32), "norm": (32,)}


def model(made: ModuleType, directory: Path, seed: int = 0, **options: object) -> Path:
    tensors = {
        "layer.weight": made.weights((64, 32), seed),
        "layer.norm": made.bits("F32", (32,), seed),
        "empty": made.bits("BF16", (0, 4)),
    }
    written: Path = made.write_model(directory, tensors, **options)
    return written


def published(made: ModuleType, tmp_path: Path) -> tuple[Manifest, PieceStore]:
    manifest = publish(model(made, tmp_path / "model"), tmp_path / "store", job_id="job", version=1, canary_ids=(5, 6))
    return manifest, PieceStore(tmp_path / "store")


def test_publishing_the_result_again_gives_the_same_version(made: ModuleType, tmp_path: Path) -> None:
    manifest, store = published(made, tmp_path)
    for edge in manifest.edges:
        assemble(manifest, by(manifest, edge), store, tmp_path / edge.encoding)
        assert digest_of(tmp_path / edge.encoding) == manifest.digest
    assert publish(tmp_path / "raw", tmp_path / "again", job_id="job", version=1, canary_ids=(5, 6)) == manifest


def test_numpy_reads_what_was_assembled(made: ModuleType, tmp_path: Path) -> None:
    values = np.arange(6, dtype=np.float32).reshape(2, 3)
    made.write_model(tmp_path / "model", {"x": ("F32", (2, 3), values.tobytes()), "s": ("I64", (), b"\7" + bytes(7))})
    manifest = publish(tmp_path / "model", tmp_path / "store", job_id="job", version=1, canary_ids=())
    assemble(manifest, by(manifest, manifest.edges[1]), PieceStore(tmp_path / "store"), tmp_path / "out")
    loaded = load_file(tmp_path / "out" / "model.safetensors")
    assert np.array_equal(loaded["x"], values)
    assert loaded["s"] == 7


specs = st.dictionaries(
    st.from_regex(r"[a-z]{1,4}(\.[a-z]{1,4})?", fullmatch=True),
    st.tuples(
        st.sampled_from(sorted(BITS)),
        st.sampled_from([(8,), (2, 8), (0, 3), (1, 1, 16), (4, 0)]),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1,
    max_size=6,
)


@given(specs)
@settings(deadline=None, max_examples=40)
def test_any_dtype_shape_and_bits_arrive_unchanged(
    made: ModuleType, tmp_path_factory: pytest.TempPathFactory, some: dict[str, tuple[str, tuple[int, ...], int]]
) -> None:
    tmp_path = tmp_path_factory.mktemp("any")
    tensors = {name: made.bits(*spec) for name, spec in some.items()}
    made.write_model(tmp_path / "model", tensors)
    manifest = publish(tmp_path / "model", tmp_path / "store", job_id="job", version=0, canary_ids=())
    for edge in manifest.edges:
        assemble(manifest, by(manifest, edge), PieceStore(tmp_path / "store", files=UNSYNCED_FILES), tmp_path / "out")
        result = open_snapshot(tmp_path / "out")
        assert {t.name: (t.dtype, t.shape, result.read(t.name).tobytes()) for t in result.tensors} == tensors


def test_the_digest_depends_on_bits_names_and_files_only(made: ModuleType, tmp_path: Path) -> None:
    tensors = {"a": made.weights((8, 8)), "b": made.weights((8,), 1)}
    one = digest_of(made.write_model(tmp_path / "one", tensors, files={"config.json": b"{}"}))
    assert digest_of(made.write_sharded(tmp_path / "two", [{"b": tensors["b"]}, {"a": tensors["a"]}])) == one
    flipped = {**tensors, "b": ("BF16", (8,), bytes([tensors["b"][2][0] ^ 1]) + tensors["b"][2][1:])}
    others = [
        made.write_model(tmp_path / "three", flipped, files={"config.json": b"{}"}),
        made.write_model(tmp_path / "four", {"a": tensors["a"], "c": tensors["b"]}, files={"config.json": b"{}"}),
        made.write_model(tmp_path / "five", tensors, files={"config.json": b"{ }"}),
        made.write_model(tmp_path / "six", {**tensors, "b": ("F16", (8,), tensors["b"][2])}, files={"config.json": b"{}"}),
    ]
    assert len({one, *map(digest_of, others)}) == 5


def test_a_tied_head_becomes_an_alias_and_stays_one(made: ModuleType, tmp_path: Path) -> None:
    embedding = made.weights((16, 8))
    tied = {"config.json": b'{"tie_word_embeddings": true}'}
    tensors = {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding, "model.norm.weight": made.weights((8,))}
    manifest = publish(
        made.write_model(tmp_path / "m", tensors, files=tied), tmp_path / "store", job_id="j", version=0, canary_ids=()
    )
    assert manifest.aliases == {"lm_head.weight": "model.embed_tokens.weight"}
    assert [one.name for one in manifest.tensors] == ["model.embed_tokens.weight", "model.norm.weight"]
    assemble(manifest, by(manifest, manifest.edges[1]), PieceStore(tmp_path / "store"), tmp_path / "out")
    assert open_snapshot(tmp_path / "out").aliases == manifest.aliases
    assert digest_of(tmp_path / "out") == manifest.digest


def test_a_head_that_differs_or_is_not_called_tied_is_stored(made: ModuleType, tmp_path: Path) -> None:
    embedding = made.weights((16, 8))
    alike = {"lm_head.weight": embedding, "model.embed_tokens.weight": embedding}
    differs = {**alike, "lm_head.weight": made.weights((16, 8), 1)}
    for number, (tensors, config) in enumerate(
        [(alike, b"{}"), (alike, b"not JSON"), (alike, b"[]"), (differs, b'{"tie_word_embeddings":true}')]
    ):
        snapshot = open_snapshot(made.write_model(tmp_path / str(number), tensors, files={"config.json": config}))
        assert snapshot.aliases == {}
        assert len(snapshot.tensors) == 2


def test_aliases_in_a_files_metadata_are_kept(made: ModuleType, tmp_path: Path) -> None:
    metadata = {"format": "pt", "head.weight": "a", "note": "nothing of that name"}
    assert open_snapshot(made.write_model(tmp_path, {"a": made.weights((2,))}, metadata=metadata)).aliases == {"head.weight": "a"}


def bad_directories(made: ModuleType, path: Path) -> Iterator[tuple[Path, str]]:
    (path / "empty").mkdir(parents=True)
    yield path / "empty", "holds neither"
    yield made.write_model(path / "none", {}), "no tensors"
    made.write_sharded(path / "twice", [{"a": made.weights((2,))}, {"a": made.weights((2,))}])
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (path / "twice" / "model.safetensors.index.json").write_text(json.dumps(index))
    yield path / "twice", "is in .* and in another file"
    (path / "cut").mkdir()
    data = made.safetensors_bytes({"a": made.weights((8,))})
    (path / "cut" / "model.safetensors").write_bytes(data[:-1])
    yield path / "cut", "end at byte 16"
    (path / "long").mkdir()
    (path / "long" / "model.safetensors").write_bytes(data + b"x")
    yield path / "long", "holds 17 bytes"
    for number, text in enumerate(
        ["{", "[]", '{"weight_map": []}', '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": 3}}']
    ):
        directory = path / f"index{number}"
        directory.mkdir()
        (directory / "model.safetensors.index.json").write_text(text)
        yield directory, "is not an index|names must be like"


def test_directories_that_are_no_snapshot_are_refused_in_words(made: ModuleType, tmp_path: Path) -> None:
    for directory, words in bad_directories(made, tmp_path):
        with pytest.raises(SnapshotError, match=words):
            publish(directory, tmp_path / "store", job_id="j", version=0, canary_ids=())


def test_a_small_file_that_is_not_small_is_refused(made: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2p.adapters.snapshot_dir.MAX_FILE_BYTES", 10)
    monkeypatch.setattr("p2p.adapters.snapshot_dir.MAX_INDEX_BYTES", 10)
    with pytest.raises(SnapshotError, match=r"config\.json holds"):
        open_snapshot(model(made, tmp_path / "m"))
    with pytest.raises(SnapshotError, match="larger than 10"):
        open_snapshot(made.write_sharded(tmp_path / "s", [{"a": made.weights((2,))}]))


def test_only_allow_listed_files_are_published(made: ModuleType, tmp_path: Path) -> None:
    files = {
        "config.json": b"{}",
        "modeling_x.py": b"import os",
        "pytorch_model.bin": b"x",
        "chat_template.jinja": b"{{ x }}",
        "merges.txt": b"",
    }
    manifest = publish(model(made, tmp_path / "m", files=files), tmp_path / "store", job_id="j", version=0, canary_ids=())
    assert [entry.name for entry in manifest.files] == ["chat_template.jinja", "config.json", "merges.txt"]
    assemble(manifest, by(manifest, manifest.edges[0]), PieceStore(tmp_path / "store"), tmp_path / "out")
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != "model.safetensors"} == {
        name: files[name] for name in ("config.json", "chat_template.jinja", "merges.txt")
    }


def test_names_that_no_manifest_can_carry_are_refused(made: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match="job_id"):
        publish(model(made, tmp_path / "m"), tmp_path / "store", job_id="no such job", version=0, canary_ids=())


def broken(manifest: Manifest, store: PieceStore) -> Iterator[tuple[Manifest, Edge, str]]:
    raw, planes = manifest.edges
    yield manifest, replace(raw, pieces=raw.pieces[1:]), "no held version has these bits"
    short = replace(raw, pieces=raw.pieces[:-1])
    yield replace(manifest, edges=(short,)), short, "bytes short in shard"
    doubled = replace(raw, pieces=raw.pieces * 2)
    yield replace(manifest, edges=(doubled,)), doubled, "bytes follow"
    swapped = replace(planes, encoding="raw")
    yield replace(manifest, edges=(swapped,)), swapped, "short"
    unknown = replace(raw, encoding="zip")
    yield replace(manifest, edges=(unknown,)), unknown, "'zip' is not known here"
    delta = Edge("delta", 0, "d" * 64, raw.pieces)
    yield replace(manifest, edges=(delta,)), delta, "is not held"
    yield replace(manifest, digest="0" * 64), raw, "has digest"
    yield replace(manifest, aliases={"x": "empty"}), raw, "has digest"
    yield replace(manifest, files=()), raw, "has digest"
    lying = replace(raw, pieces=(replace(raw.pieces[0], size=7),))
    yield replace(manifest, edges=(lying,)), lying, "the manifest says 7"
    other = pieces.name(b"other bits" * 10)
    store.put(other, b"other bits" * 10)
    yield replace(manifest, files=(FileEntry("config.json", (other,)),)), planes, "has digest"
    store.remove(planes.pieces[0].digest)
    yield manifest, planes, "not in the store"
    store.path(raw.pieces[0].digest).write_bytes(b"damaged")
    yield manifest, raw, "damaged on disk"


def test_a_failed_assembly_keeps_the_old_version_and_leaves_nothing(made: ModuleType, tmp_path: Path) -> None:
    manifest, store = published(made, tmp_path)
    out = tmp_path / "versions" / "current"
    assemble(manifest, by(manifest, manifest.edges[0]), store, out)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    for bad, edge, words in broken(manifest, store):
        with pytest.raises(ApplyFailed, match=f"version 1 of job job is not applied: .*{words}"):
            assemble(bad, by(bad, edge), store, out)
        assert {path.name: path.read_bytes() for path in out.iterdir()} == before
        assert [path.name for path in out.parent.iterdir()] == ["current"]


class FullDisk(RealFiles):
    """A disk that is full when the named call comes."""

    def __init__(self, call: str) -> None:
        self.call = call

    def fsync_file(self, path: Path) -> None:
        self.fail("fsync_file")
        super().fsync_file(path)

    def replace(self, source: Path, target: Path) -> None:
        self.fail("replace")
        super().replace(source, target)

    def write_file(self, path: Path, data: bytes | memoryview) -> None:
        self.fail("write_file")
        super().write_file(path, data)

    def fail(self, call: str) -> None:
        if call == self.call:
            raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("call", ["write_file", "fsync_file", "replace"])
def test_a_full_disk_is_told_and_leaves_nothing(made: ModuleType, tmp_path: Path, call: str) -> None:
    manifest, store = published(made, tmp_path)
    with pytest.raises(ApplyFailed, match="No space left"):
        assemble(manifest, by(manifest, manifest.edges[0]), store, tmp_path / "versions" / "new", files=FullDisk(call))
    assert list((tmp_path / "versions").iterdir()) == []


class Xor:
    """The simplest delta: what a later encoding must be able to do without a change elsewhere."""

    def encode(self, some: Iterable[tuple[Shard, Bytes]], base: Base | None) -> Iterator[Chunk]:
        assert base is not None
        return (data ^ base(shard) for shard, data in some)

    def decode(self, chunks: Iterable[Chunk], plan: Sequence[Shard], base: Base | None) -> Iterator[Bytes]:
        assert base is not None
        raw = ENCODINGS["raw"].decode(chunks, plan, None)
        return (data ^ base(shard) for shard, data in zip(plan, raw, strict=True))


def test_a_delta_encoding_needs_no_change_elsewhere(made: ModuleType, tmp_path: Path) -> None:
    encodings = {**ENCODINGS, "xor": Xor()}
    old, store = published(made, tmp_path)
    new = publish(model(made, tmp_path / "new", seed=1), tmp_path / "store", job_id="job", version=2, canary_ids=())
    assemble(old, by(old, old.edges[0]), store, tmp_path / "held")
    both = [b"".join(store.read(piece.digest) for piece in manifest.edges[0].pieces) for manifest in (old, new)]
    difference = bytes(a ^ b for a, b in zip(*both, strict=True))
    piece = pieces.name(difference)
    store.put(piece, difference)
    linked = replace(new, edges=(*new.edges, Edge("xor", 1, old.digest, (piece,))))
    read = Manifest.from_json(linked.to_json())
    (edge,) = (one for one in read.edges if one.encoding == "xor")
    assemble(read, by(read, edge), store, tmp_path / "out", held={old.digest: tmp_path / "held"}, encodings=encodings)
    assert digest_of(tmp_path / "out") == new.digest
    with pytest.raises(ApplyFailed, match="is not held"):
        assemble(read, by(read, edge), store, tmp_path / "out", encodings=encodings)
    made.write_model(tmp_path / "alien", {"z": made.weights((4,))})
    with pytest.raises(ApplyFailed, match="has other tensors"):
        assemble(read, by(read, edge), store, tmp_path / "out", held={old.digest: tmp_path / "alien"}, encodings=encodings)
    with pytest.raises(ApplyFailed, match="has digest"):
        assemble(
            read,
            by(read, edge),
            store,
            tmp_path / "out",
            held={old.digest: model(made, tmp_path / "wrong", seed=9)},
            encodings=encodings,
        )


def test_the_command_prints_the_manifest_or_one_line(made: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model(made, tmp_path / "m")
    options = [str(tmp_path / "m"), str(tmp_path / "store"), "--job-id", "job", "--version", "1", "--canary-ids", "5,6"]
    assert publish_module.main(options) == 0
    assert Manifest.from_json(capsys.readouterr().out.strip()).canary_ids == (5, 6)
    assert publish_module.main([str(tmp_path / "absent"), *options[1:]]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert "cannot publish" in told.err


def test_a_certificate_is_made_once_and_again_for_other_names(tmp_path: Path) -> None:
    certificate, key, digest = self_signed(tmp_path / "tls", ["127.0.0.1", "localhost", "127.0.0.1"])
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert certificate_sha256(certificate) == digest
    assert self_signed(tmp_path / "tls", ["localhost", "127.0.0.1"])[2] == digest
    assert self_signed(tmp_path / "tls", ["::1"])[2] != digest
    context = server_context(certificate, key)
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert pinned_client(digest).fingerprint == bytes.fromhex(digest)
    with pytest.raises(ValueError, match="at least one"):
        self_signed(tmp_path / "tls", [])


def test_a_damaged_certificate_or_foreign_key_is_replaced(tmp_path: Path) -> None:
    certificate, key, digest = self_signed(tmp_path / "a", ["localhost"])
    _, other_key, _ = self_signed(tmp_path / "b", ["localhost"])
    key.write_bytes(other_key.read_bytes())
    second = self_signed(tmp_path / "a", ["localhost"])[2]
    assert second != digest
    certificate.write_text("damaged")
    assert self_signed(tmp_path / "a", ["localhost"])[2] not in (digest, second)
