"""Layout, planes, pieces, safetensors headers and the whole digest: pure computation."""

from __future__ import annotations

import json
import struct
from types import ModuleType

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2p.codec import pieces, planes, safetensors
from p2p.codec.encodings import ENCODINGS
from p2p.codec.layout import gather, ordered, shards
from p2p.codec.snapshot import whole_digest
from p2p.domain.dtypes import BITS, whole_bytes
from p2p.domain.manifest import Piece, Tensor
from p2p.errors import ApplyFailed, PieceCorrupt, SnapshotError


def tensor(name: str, dtype: str, *shape: int) -> Tensor:
    nbytes = whole_bytes(dtype, shape)
    assert nbytes is not None
    return Tensor(name, dtype, shape, nbytes)


def some_bytes(nbytes: int, seed: int = 0) -> np.ndarray:
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


tensor_lists = st.lists(
    st.builds(
        lambda name, dtype, sides: tensor(name, dtype, *sides),
        st.from_regex(r"[a-z]{1,6}", fullmatch=True),
        st.sampled_from(sorted(BITS)),
        st.sampled_from([(8,), (0,), (3, 8), (2, 0, 4), (16,), (40,)]),
    ),
    max_size=8,
    unique_by=lambda one: one.name,
)


def test_widest_elements_come_first_then_dtype_then_name() -> None:
    some = [tensor("b", "BF16", 4), tensor("a", "U8", 4), tensor("z", "F64", 1), tensor("a2", "F16", 4), tensor("a1", "BF16", 4)]
    assert [one.name for one in ordered(some)] == ["z", "a1", "b", "a2", "a"]


@given(tensor_lists, st.sampled_from([8, 16, 24, 1024]))
@settings(deadline=None, max_examples=100)
def test_shards_cover_every_byte_once_in_layout_order(tensors: list[Tensor], most: int) -> None:
    data = {one.name: some_bytes(one.nbytes, seed) for seed, one in enumerate(tensors)}
    cut = shards(tensors, most_elements=most)
    joined = b"".join(gather(shard, data.__getitem__).tobytes() for shard in cut)
    assert joined == b"".join(data[one.name].tobytes() for one in ordered(tensors))
    offset = 0
    for shard in cut:
        assert 0 < shard.elements <= most
        assert shard.offset == offset
        assert {part.tensor.dtype for part in shard.slices} == {shard.dtype}
        offset += shard.nbytes


def test_splitting_planes_puts_the_exponent_in_the_high_byte() -> None:
    words = np.arange(1 << 16, dtype="<u2")
    high, low = planes.split(words.view(np.uint8))
    assert np.array_equal(high, ((words >> 7) & 0xFF).astype(np.uint8))
    assert np.array_equal(low, (((words & 0x7F) << 1) | (words >> 15)).astype(np.uint8))
    assert np.array_equal(planes.join(high, low).view("<u2"), words)


@pytest.mark.parametrize("encoding", ["raw", "planes", "delta"])  # lowrank leads to what its factors make: test_codec_lowrank.py
@given(tensors=tensor_lists, seed=st.integers(0, 2**32), narrow=st.booleans(), most=st.sampled_from([8, 16, 4096]))
@settings(deadline=None, max_examples=60)
def test_encodings_are_lossless_for_any_bits(encoding: str, tensors: list[Tensor], seed: int, narrow: bool, most: int) -> None:
    plan = shards(tensors, most_elements=most)
    raw = [some_bytes(shard.nbytes, seed + number) & (0x11 if narrow else 0xFF) for number, shard in enumerate(plan)]
    held = {shard.offset: some_bytes(shard.nbytes, seed // 2) for shard in plan}
    edge = b"".join(bytes(chunk) for chunk in ENCODINGS[encoding].encode(zip(plan, raw, strict=True), lambda one: held[one.offset]))
    chunks = [edge[start : start + 7] for start in range(0, len(edge), 7)]
    decoded = list(ENCODINGS[encoding].decode(chunks, plan, lambda one: held[one.offset]))
    assert [one.tobytes() for one in decoded] == [one.tobytes() for one in raw]


def test_planes_of_weights_take_two_thirds(made: ModuleType) -> None:
    _, shape, data = made.weights((1 << 20,))
    plan = shards([tensor("w", "BF16", *shape)])
    size = sum(len(chunk) for chunk in planes.encode([(plan[0], np.frombuffer(data, np.uint8))]))
    assert 1.32 < size / (1 << 20) < 1.345


def test_what_does_not_compress_is_stored() -> None:
    (shard,) = shards([tensor("w", "U8", 1000)])
    assert sum(len(chunk) for chunk in planes.encode([(shard, some_bytes(1000))])) == 1000 + planes.RECORD.size


def record(mode: int, elements: int, blob: bytes, length: int | None = None) -> bytes:
    return planes.RECORD.pack(mode, elements, len(blob) if length is None else length) + blob


def frame(data: bytes, *, declare: bool = True) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=declare).compress(data)


BOMB = frame(bytes(1 << 28))  # 256 MiB of zeros in a few KB
(PLAN,) = shards([tensor("w", "BF16", 1 << 14)])
HOSTILE = {
    "nothing": b"",
    "half a record": b"\0\1",
    "unknown mode": record(9, 1 << 14, b"x" * 9),
    "other element count": record(0, 1 << 13, bytes(1 << 14)),
    "blob above raw": record(0, 1 << 14, bytes(1 << 15), length=(1 << 15) + 1),
    "blob of 4 GB": record(1, 1 << 14, b"", length=2**32 - 1),
    "stored too short": record(0, 1 << 14, bytes(100)),
    "edge ends in the blob": record(0, 1 << 14, bytes(100), length=1 << 15),
    "bytes after the last": record(0, 1 << 14, bytes(1 << 15)) + b"x",
    "bomb": record(1, 1 << 14, BOMB),
    "bomb in the high plane": record(2, 1 << 14, BOMB[:16000] + bytes(1 << 14)),
    "no frame": record(1, 1 << 14, b"not zstd at all"),
    "frame too short": record(1, 1 << 14, frame(bytes(100))),
    "frame without a size": record(1, 1 << 14, frame(bytes(1 << 15), declare=False)),
    "frame cut": record(1, 1 << 14, frame(np.random.default_rng(0).bytes(1 << 10) + bytes(31 << 10))[:-5]),
    "two frames": record(1, 1 << 14, frame(bytes(1 << 15)) + frame(bytes(1 << 15))),
    "bytes after the frame": record(1, 1 << 14, frame(bytes(1 << 15)) + b"x"),
    "planes too short": record(2, 1 << 14, bytes(100)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_edges_are_refused_in_words(name: str) -> None:
    with pytest.raises(ApplyFailed, match=r".{20}"):
        list(planes.decode([HOSTILE[name]], [PLAN]))


def test_a_frame_that_lies_about_its_size_costs_no_more_than_it_declares() -> None:
    lying = bytearray(frame(bytes(1 << 20)))
    assert lying[4] & 0xC0 == 0x80  # a four-byte content size follows the descriptor
    lying[5:9] = struct.pack("<I", 1 << 15)
    with pytest.raises(ApplyFailed, match=r"does not decompress|decompresses to"):
        list(planes.decode([record(1, 1 << 14, bytes(lying))], [PLAN]))


def test_planes_are_for_sixteen_bit_floats_only() -> None:
    (plan,) = shards([tensor("w", "I16", 1 << 14)])
    with pytest.raises(ApplyFailed, match="I16 must be one of"):
        list(planes.decode([record(2, 1 << 14, frame(bytes(1 << 14)) + bytes(1 << 14))], [plan]))


@given(st.binary(max_size=200))
@settings(deadline=None, max_examples=200)
def test_any_bytes_are_refused_or_decode_to_what_is_planned(data: bytes) -> None:
    (plan,) = shards([tensor("w", "BF16", 8)])
    try:
        decoded = list(planes.decode([data], [plan]))
    except ApplyFailed:
        return
    assert [one.nbytes for one in decoded] == [16]


def test_raw_edges_of_another_length_are_refused() -> None:
    for data in (bytes(15), bytes(17)):
        (plan,) = shards([tensor("w", "BF16", 8)])
        with pytest.raises(ApplyFailed):
            list(ENCODINGS["raw"].decode([data], [plan], None))


@pytest.mark.parametrize(
    ("total", "size", "number"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (300 << 10, 256 << 10, 2),
        (15_999_999, 256 << 10, 62),
        (16_000_000, 1 << 20, 16),
        (20 << 20, 1 << 20, 20),
    ],
)
def test_piece_size_follows_the_size_of_the_edge(total: int, size: int, number: int) -> None:
    data = bytes(total)
    cut = list(pieces.cut(data[start : start + 3_000_001] for start in range(0, total, 3_000_001)))
    assert len(cut) == number
    assert b"".join(cut) == data
    assert all(len(piece) == size for piece in cut[:-1])


def test_a_piece_is_its_bytes() -> None:
    piece = pieces.name(b"abc")
    assert piece == Piece(blake3(b"abc").hexdigest(), 3)
    pieces.verify(piece, b"abc")
    for other in (b"abd", b"ab", b"abcd", b""):
        with pytest.raises(PieceCorrupt):
            pieces.verify(piece, other)


def test_small_files_are_cut_at_one_mebibyte() -> None:
    assert [len(part) for part in pieces.cut_file(bytes((2 << 20) + 1))] == [1 << 20, 1 << 20, 1]
    assert pieces.cut_file(b"") == []


def test_the_whole_digest_is_over_names_shapes_files_and_every_bit() -> None:
    tensors = [tensor("b", "BF16", 2), tensor("a", "I8", 2, 2)]
    data = {"a": some_bytes(4, 1), "b": some_bytes(4, 2)}
    header = '{"aliases":{"x":"a"},"files":{"config.json":"ff"},"format":"echo2-snapshot-1","tensors":[["a","I8",[2,2]],["b","BF16",[2]]]}\n'
    wanted = blake3(header.encode() + data["a"].tobytes() + data["b"].tobytes()).hexdigest()
    assert whole_digest(tensors, {"x": "a"}, {"config.json": "ff"}, data.__getitem__) == wanted


def test_a_built_header_is_read_back_aligned() -> None:
    tensors = [tensor("a", "U8", 3), tensor("b", "BF16", 5), tensor("c", "F64"), tensor("d", "BF16", 0)]
    built = safetensors.build_header(tensors, {"format": "pt", "x": "b"})
    assert len(built) % 8 == 0
    total = sum(one.nbytes for one in tensors)
    assert safetensors.header_bytes(built[:8], file_bytes=len(built) + total) == len(built) - 8
    header = safetensors.parse_header(built[8:], data_bytes=total)
    assert header.metadata == {"format": "pt", "x": "b"}
    assert {one.tensor for one in header.tensors} == set(tensors)
    assert all(one.start % (BITS[one.tensor.dtype] // 8) == 0 for one in header.tensors)


def entry(**changes: object) -> dict[str, object]:
    return {"dtype": "U8", "shape": [4], "data_offsets": [0, 4], **changes}


BAD_HEADERS = {
    "not JSON": "{",
    "an array": "[]",
    "entry no object": {"a": 1},
    "unknown key": {"a": entry(more=1)},
    "unknown dtype": {"a": entry(dtype="U9")},
    "negative": {"a": entry(data_offsets=[-4, 0])},
    "one offset": {"a": entry(data_offsets=[0])},
    "wrong span": {"a": entry(data_offsets=[0, 5])},
    "part of a byte": {"a": entry(dtype="F4", shape=[3])},
    "past the end": {"a": entry(shape=[5], data_offsets=[0, 5])},
    "short of the end": {"a": entry(shape=[3], data_offsets=[0, 3])},
    "hole": {"a": entry(shape=[1], data_offsets=[0, 1]), "b": entry(shape=[2], data_offsets=[2, 4])},
    "overlap": {"a": entry(shape=[3], data_offsets=[0, 3]), "b": entry(shape=[2], data_offsets=[2, 4])},
    "metadata no text": {"__metadata__": {"x": 1}, "a": entry()},
    "huge shape": {"a": entry(shape=[2**60])},
}


@pytest.mark.parametrize("name", BAD_HEADERS)
def test_bad_safetensors_headers_are_refused_in_words(name: str) -> None:
    bad = BAD_HEADERS[name]
    text = bad if isinstance(bad, str) else json.dumps(bad)
    with pytest.raises(SnapshotError, match=r".{20}"):
        safetensors.parse_header(text.encode(), data_bytes=4)


@pytest.mark.parametrize("first", [b"", b"\0" * 7, struct.pack("<Q", 0), struct.pack("<Q", 93), struct.pack("<Q", 2**63)])
def test_bad_header_lengths_are_refused(first: bytes) -> None:
    with pytest.raises(SnapshotError):
        safetensors.header_bytes(first, file_bytes=100)


def test_a_header_that_is_not_text_is_refused() -> None:
    with pytest.raises(SnapshotError):
        safetensors.parse_header(b"\xff\xfe{}", data_bytes=0)
