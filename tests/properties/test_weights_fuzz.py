"""The bytes of versions, damaged: records of deltas, whole versions, weights files. 10,000 of each with --long.

For each case: the package's own error in one line, or bytes that are the version's; little time; no more memory than was declared.
The words around them: test_weights_fuzz_words.py; live connections: tests/integration/p2p/faults/test_fuzz_bytes.py.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
import tracemalloc
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import strategies as st

from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.adapters.weights_apply import apply
from p2p.adapters.weights_diff import diff
from p2p.codec import delta, pieces, safetensors
from p2p.codec import weights_file as form
from p2p.codec.compose import compose, squash
from p2p.codec.delta import Delta
from p2p.codec.effort import Effort
from p2p.codec.encodings import ENCODINGS
from p2p.codec.layout import Bytes, Shard
from p2p.codec.records import FAST, UNCHANGED
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Tensor
from p2p.errors import (
    ApplyFailed,
    SnapshotError,
    WeightsFileRefused,
)
from tests.factories_deltas import shard_of, version
from tests.factories_fuzz import bounded, damaged, fuzz, in_one_line, plain, scaled, texts
from tests.factories_p2p import bits, weights, write_model

TENSORS = (Tensor("a.weight", "BF16", (100, 7), 1400), Tensor("b.scale", "F32", (), 4), Tensor("c", "BOOL", (8,), 8))
WIDTHS = {"BF16": 2, "BOOL": 1, "F32": 4}


# --- records of an edge

DTYPES = ["BF16", "F16", "F32", "F8_E4M3", "I64", "U8"]
EFFORTS: tuple[Effort, ...] = ("fast", "grouped", "dense")


class Sample:
    """A shard of some dtype in two versions, and every stream that leads from one to the other."""

    def __init__(self, dtype: str, elements: int = 3000) -> None:
        rng = np.random.default_rng(len(dtype))
        if dtype == "BF16":
            self.shard, self.base = shard_of("BF16", version("w3_v06")[:elements])
            _, self.new = shard_of("BF16", version("w3_v14")[:elements])
        else:
            width = {"F16": 2, "F32": 4, "I64": 8}.get(dtype, 1)
            self.base = np.frombuffer(rng.bytes(elements * width), np.uint8).copy()
            self.shard = Shard(dtype, 0, self.base.nbytes, ())
            words = self.base.copy().view(f"<u{width}")
            words[:: 7 if width < 4 else 23] += words.dtype.type(1)
            words[5::601] -= words.dtype.type(90)
            self.new = words.view(np.uint8)
        self.streams = {effort: self._encoded("delta", Delta(effort)) for effort in EFFORTS}
        self.streams["planes"] = self._encoded("planes", ENCODINGS["planes"])
        self.streams["raw"] = self._encoded("raw", ENCODINGS["raw"])

    def _encoded(self, _name: str, encoding: Any) -> bytes:
        return b"".join(bytes(chunk) for chunk in encoding.encode([(self.shard, self.new)], lambda _: self.base))

    def decode(self, name: str, stream: bytes) -> Bytes:
        encoding = ENCODINGS["delta" if name in EFFORTS else name]
        (found,) = encoding.decode([stream], [self.shard], lambda _: self.base)
        return found


SAMPLES = {dtype: Sample(dtype) for dtype in DTYPES}
STREAMS = [(dtype, name) for dtype in DTYPES for name in (*EFFORTS, "planes", "raw")]


@pytest.mark.parametrize(("dtype", "name"), STREAMS)
def test_the_honest_streams_decode(dtype: str, name: str) -> None:
    sample = SAMPLES[dtype]
    assert sample.decode(name, sample.streams[name]).tobytes() == sample.new.tobytes()
    tracemalloc.start()  # loops compile on their first call, which is nobody's declared size
    sample.decode(name, sample.streams[name])
    tracemalloc.stop()


@cache
def zstd(size: int, fill: bytes) -> bytes:
    """A frame of so many bytes, mostly one after another the same."""
    return zstandard.ZstdCompressor().compress((fill * (size // max(len(fill), 1) + 1))[:size])


SIZES = [0, 1, 375, 2999, 3001, 1 << 26, 1 << 26]
FILLS = [b"\0", b"\1", b"\7", b"\xff"]


@st.composite
def made_up(draw: st.DrawFn) -> bytes:
    """A record with every length right and every number anything."""

    def planes(most: int, count: int) -> list[bytes]:
        size = st.just(count) | st.just(count) | st.sampled_from(SIZES)
        return [zstd(draw(size), draw(st.sampled_from(FILLS))) for _ in range(draw(st.integers(0, most)))]

    mode, changes = draw(st.integers(0, 7)), draw(st.sampled_from([0, 1, 2, 8, 3000, 3001]))
    exceptions = draw(st.sampled_from([0, 0, 1, changes, changes + 1]))
    rows = [planes(5, changes), planes(5, exceptions), planes(3, exceptions)]
    frames_of = [one for kind in rows for one in kind]
    body = struct.pack("<IBBB", exceptions, *map(len, rows))
    body += b"".join(struct.pack("<I", len(one)) for one in frames_of) + b"".join(frames_of)
    body += draw(st.sampled_from([bytes((changes + 7) // 8)] * 3 + [b"", b"\xff" * 376]))
    if mode == 5:
        body = bytes([draw(st.integers(0, 255)), 0]) + body
    if mode < 3:
        blob = zstd(draw(st.sampled_from([3000, 6000, 6001, 1 << 26, 1 << 26])), b"\0")
    else:
        blob = struct.pack("<III", draw(st.sampled_from([3000, 3000, 3000, 1, 3001])), changes, len(body)) + body
    elements = draw(st.sampled_from([3000, 3000, 3000, 3001, 0]))
    return struct.pack("<BII", mode, elements, len(blob)) + blob + draw(st.sampled_from([b"", b"", b"", b"x"]))


@st.composite
def streams(draw: st.DrawFn) -> tuple[str, str, bytes]:
    """Which stream, and what became of it. Long ones are damaged near their heads as often as anywhere."""
    dtype, name = draw(st.sampled_from(STREAMS))
    whole = SAMPLES[dtype].streams[name]
    match draw(st.integers(0, 3)):
        case 0:
            return dtype, name, draw(damaged(whole[:64])) + whole[64:]
        case 1:
            return dtype, draw(st.sampled_from(EFFORTS)), draw(made_up())
        case 2:  # one byte of the record's or the part's head
            head = bytearray(whole)
            at = draw(st.integers(0, min(20, len(whole) - 1)))
            head[at] = draw(st.sampled_from([0, 1, 255, (head[at] + 1) % 256, (head[at] - 1) % 256]))
            return dtype, name, bytes(head) + draw(st.sampled_from([b"", b"", b"\0"]))
    return dtype, name, draw(damaged(whole))


@scaled(400)
def test_records(cases: int) -> None:
    for dtype, name in STREAMS:
        test_the_honest_streams_decode(dtype, name)

    @fuzz(cases, streams())
    def check(case: tuple[str, str, bytes]) -> None:
        dtype, name, stream = case
        sample = SAMPLES[dtype]
        with bounded(20 * sample.shard.nbytes + 2 * len(stream)):
            try:
                found = sample.decode(name, stream)
            except ApplyFailed as error:
                return in_one_line(error)
        assert found.nbytes == sample.shard.nbytes
        if name in EFFORTS:
            _is_well_formed(sample.shard, stream)
        return None


def _is_well_formed(shard: Shard, stream: bytes) -> None:
    """PROTOCOL.md by hand: what an accepted record of one shard must have declared."""
    mode, elements, length = struct.unpack_from("<BII", stream)
    assert (elements, 9 + length) == (shard.elements, len(stream))
    assert mode <= 6
    words, at = shard.elements, 9
    while mode >= 4 and words > 0:
        covered, changes, body = struct.unpack_from("<III", stream, at)
        assert changes <= covered <= words
        assert body > 0 or changes == 0
        if mode == 4 and changes:
            _fast_body_is_whole(stream[at + 12 : at + 12 + body], changes)
        words, at = words - covered, at + 12 + body
    assert mode < 4 or (words, at) == (0, len(stream))


def _fast_body_is_whole(body: bytes, changes: int) -> None:
    exceptions, *planes = struct.unpack_from("<IBBB", body)
    lengths = struct.unpack_from(f"<{sum(planes)}I", body, 7)
    assert exceptions <= changes
    assert len(body) == 7 + 4 * len(lengths) + sum(lengths) + (changes + 7) // 8


@scaled(100, 5000)
def test_records_applied_in_place(cases: int) -> None:
    """A refusal leaves the host copy as it was; what is taken can be taken back."""

    @fuzz(cases, streams().filter(lambda case: case[1] in EFFORTS))
    def check(case: tuple[str, str, bytes]) -> None:
        dtype, _, stream = case
        sample = SAMPLES[dtype]
        held = sample.base.copy()
        try:
            ((place, shard, record),) = delta.read_records([stream], [sample.shard])
            done = delta.apply(shard, record, held, place)
        except ApplyFailed as error:
            in_one_line(error)
            assert held.tobytes() == sample.base.tobytes()
            return
        delta.undo(sample.shard, done, held)
        assert held.tobytes() == sample.base.tobytes()


@scaled(60, 3000)
def test_composing_records(cases: int) -> None:
    """A squashed edge of a damaged step is refused, or is what the damaged step leads to."""

    @fuzz(cases, streams().filter(lambda case: case[1] in EFFORTS))
    def check(case: tuple[str, str, bytes]) -> None:
        dtype, _, stream = case
        sample = SAMPLES[dtype]
        try:
            records = [record for _, _, record in delta.read_records([stream], [sample.shard])]
            once = delta.new_bytes(sample.shard, records[0], sample.base, "shard 0")
        except ApplyFailed as error:
            return in_one_line(error)
        steps = [*records, Delta("fast").record(sample.shard, once, sample.new)]
        both = compose(sample.shard, sample.base, steps, Delta("grouped"), "shard 0")
        assert delta.new_bytes(sample.shard, both, sample.base, "shard 0").tobytes() == sample.new.tobytes()
        if records[0].mode in (FAST, UNCHANGED):
            both = squash(sample.shard, sample.new, steps, Delta("dense"), "shard 0")
            assert delta.new_bytes(sample.shard, both, sample.base, "shard 0").tobytes() == sample.new.tobytes()
        return None


# --- a whole version from a publisher gone wrong: every signature and digest of what it sends is right, the bytes are not


class Line:
    """Two versions on disk, and the streams of the second one's edges."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for number in (0, 1):
            tensors = {"w": weights((60, 50), 0), "n": bits("F32", (9,), 3)}
            if number:
                data = bytearray(tensors["w"][2])
                data[::40] = bytes((value + 1) % 256 for value in data[::40])
                tensors["w"] = ("BF16", (60, 50), bytes(data))
            write_model(root / str(number), tensors)
        self.store = PieceStore(root / "store", files=UNSYNCED_FILES)
        encoder = Encoder(root / "store")
        self.base = encoder.publish(root / "0", job_id="job", version=0, canary_ids=())
        against = Base(0, self.base.digest, root / "0")
        self.manifest = encoder.publish(root / "1", job_id="job", version=1, canary_ids=(), base=against)
        keyframes = encoder.add_edges(root / "1", self.manifest, keyframe=True)
        self.edges = {"delta": self.manifest.edges[0]} | {hop.edge.encoding: hop.edge for hop in keyframes}
        self.out = root / "out"
        assemble(self.base, [hop for hop in hops_of(self.base) if hop.edge.encoding == "raw"], self.store, self.out)

    def stream(self, encoding: str) -> bytes:
        return b"".join(self.store.read(piece.digest) for piece in self.edges[encoding].pieces)

    def lying(self, encoding: str, stream: bytes) -> Hop:
        """The edge with other bytes, whose pieces are named as they are and lie in the store."""
        cut = [stream[at : at + 2000] for at in range(0, len(stream), 2000)]
        named = [pieces.name(data) for data in cut]
        for piece, data in zip(named, cut, strict=True):
            self.store.put(piece, data)
        edge = replace(self.edges[encoding], pieces=tuple(named), transfer=None)
        return replace(hops_of(self.manifest)[0], edge=edge)


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    return Line(tmp_path_factory.mktemp("line"))


@scaled(60)
def test_a_version_of_other_bytes_is_never_there(line: Line, cases: int) -> None:
    """Whatever decodes, the directory holds the manifest's bits or what it held before: nothing else can be, not even for a moment."""
    held = {line.base.digest: line.root / "0"}

    @fuzz(cases, st.sampled_from(sorted(line.edges)).flatmap(lambda name: st.tuples(st.just(name), damaged(line.stream(name)))))
    def check(case: tuple[str, bytes]) -> None:
        encoding, stream = case
        hop = line.lying(encoding, stream)
        before = digest_of(line.out)
        try:
            assemble(line.manifest, [hop], line.store, line.out, held=held, files=UNSYNCED_FILES)
        except ApplyFailed as error:
            in_one_line(error)
            assert digest_of(line.out) == before
        else:
            assert digest_of(line.out) == line.manifest.digest
        assert sorted(path.name for path in line.root.iterdir()) == ["0", "1", "out", "store"]


def test_swapped_shards_of_one_size_are_refused_by_the_digest(tmp_path: Path) -> None:
    """Two records that each decode well, in each other's place: only the result's digest can tell, and does."""
    made: dict[int, Path] = {}
    for number in (0, 1):
        tensors = {"a": bits("F32", (64,), 1), "b": bits("U32", (64,), 2)}
        if number:
            tensors = {name: (kind, shape, bytes([data[0] ^ 1]) + data[1:]) for name, (kind, shape, data) in tensors.items()}
            tensors["b"] = ("U32", (64,), tensors["b"][2][:-4] + b"\1\2\3\4")
        made[number] = write_model(tmp_path / str(number), tensors)
    store = PieceStore(tmp_path / "store", files=UNSYNCED_FILES)
    encoder = Encoder(tmp_path / "store")
    base = encoder.publish(made[0], job_id="job", version=0, canary_ids=())
    manifest = encoder.publish(made[1], job_id="job", version=1, canary_ids=(), base=Base(0, base.digest, made[0]))
    (hop,) = hops_of(manifest)
    stream = b"".join(store.read(piece.digest) for piece in hop.edge.pieces)
    length = int.from_bytes(stream[5:9], "little")
    swapped = stream[9 + length :] + stream[: 9 + length]
    piece = pieces.name(swapped)
    store.put(piece, swapped)
    lying = replace(hop, edge=replace(hop.edge, pieces=(piece,), transfer=None))
    with pytest.raises(ApplyFailed, match=f"the result has digest [0-9a-f]*, the manifest names {manifest.digest}"):
        assemble(manifest, [lying], store, tmp_path / "out", held={base.digest: made[0]})
    assert not (tmp_path / "out").exists()


# --- the weights delta file


@pytest.fixture(scope="module")
def delta_file(line: Line, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "one.echo2"
    diff(line.root / "0", line.root / "1", path, encoding="delta", encoder=Delta("grouped"), threads=1)
    return path


def head_text(path: Path) -> str:
    data = path.read_bytes()
    length = form.head_length(data[: form.PREFIX.size])
    return form.unpack(data[form.PREFIX.size : form.PREFIX.size + length], "the head", most=form.MAX_HEAD_BYTES).decode()


@scaled(100)
def test_heads_of_weights_files(delta_file: Path, cases: int) -> None:
    whole = head_text(delta_file)
    honest = form.parse_head(whole.encode())

    @fuzz(cases, texts(whole) | texts(whole).map(_with_header))
    def check(text: str) -> None:
        with bounded(60 * len(text)):
            try:
                head = form.parse_head(text.encode("utf-8", "replace"))
            except WeightsFileRefused as error:
                return in_one_line(error)
        assert (head == honest) <= (plain(text) == json.loads(whole))
        assert all("/" not in one.name and ".." not in one.name for one in (*head.weights, *head.files))
        return None


def _with_header(text: str) -> str:
    """The damage within the safetensors header that the head carries, where there is one to damage."""
    return text.replace("data_offsets", "data_offset", 1) if text.count("data_offsets") % 2 else text.replace("0", "1", 3)


BOMBS = [zstandard.ZstdCompressor().compress(bytes(size << 20)) for size in (33, 48, 64)]


def _as_head(packed: bytes) -> bytes:
    return form.PREFIX.pack(form.MAGIC, form.VERSION, len(packed)) + packed


@scaled(60)
def test_packed_heads_of_weights_files(delta_file: Path, cases: int) -> None:
    data = delta_file.read_bytes()[:600]

    @fuzz(cases, damaged(data) | damaged(data) | st.sampled_from(BOMBS).map(_as_head))
    def check(found: bytes) -> None:
        with bounded(4 << 20):
            try:
                length = form.head_length(found[: form.PREFIX.size])
                form.unpack_head(found[form.PREFIX.size : form.PREFIX.size + length])
            except WeightsFileRefused as error:
                in_one_line(error)


@scaled(40, 2000)
def test_weights_files_with_a_digest_that_is_right_again(line: Line, delta_file: Path, tmp_path: Path, cases: int) -> None:
    whole = delta_file.read_bytes()[:-32]
    lying, out = tmp_path / "lying.echo2", tmp_path / "out"
    wanted = {path.name: path.read_bytes() for path in (line.root / "1").iterdir()}

    @fuzz(cases, damaged(whole) | damaged(whole[:200]).map(lambda head: head + whole[200:]))
    def check(found: bytes) -> None:
        lying.write_bytes(found + blake3(found).digest())
        try:
            apply(line.root / "0", lying, out, files=UNSYNCED_FILES)
        except (WeightsFileRefused, SnapshotError, ApplyFailed) as error:
            in_one_line(error)
            assert sorted(path.name for path in tmp_path.iterdir()) == ["lying.echo2"]
            return
        assert {path.name: path.read_bytes() for path in out.iterdir()} == wanted
        shutil.rmtree(out)


@scaled(300)
def test_safetensors_headers(cases: int) -> None:
    """Two tensors of one size: each other's places are where a careless reader would let them overlap."""
    tensors = (*TENSORS, Tensor("d", "BOOL", (8,), 8))
    whole = safetensors.build_header(tensors, {"format": "pt", "head.weight": "a.weight"})[8:]
    honest = safetensors.parse_header(whole, data_bytes=1420)
    entries = json.loads(whole)
    entries["d"]["data_offsets"] = entries["c"]["data_offsets"]

    @fuzz(cases, texts(whole.decode()) | texts(json.dumps(entries)))
    def check(text: str) -> None:
        with bounded(50 * len(text)):
            try:
                read = safetensors.parse_header(text.encode("utf-8", "replace"), data_bytes=1420)
            except SnapshotError as error:
                return in_one_line(error)
        end = 0
        for one in sorted(read.tensors, key=lambda one: (one.start, one.tensor.nbytes)):
            assert one.start == end
            assert one.tensor.nbytes == math.prod(one.tensor.shape) * WIDTHS[one.tensor.dtype]
            end += one.tensor.nbytes
        assert end == 1420
        assert (read == honest) <= (plain(text) == json.loads(whole))
        return None
