"""The head of a weights delta file: what a stranger may write in it, and what is refused in words."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import zstandard

from p2p.codec import weights_file as form
from p2p.codec.weights_file import Head, Place, SmallFile, WeightFile
from p2p.errors import WeightsFileRefused

HEADER = '{"a":{"dtype":"BF16","shape":[2],"data_offsets":[0,4]},"b":{"dtype":"BF16","shape":[2],"data_offsets":[4,8]}}'
SIZE = 8 + len(HEADER) + 8


def head(**changes: Any) -> Head:
    fields: dict[str, Any] = {
        "encoding": "delta",
        "base_digest": "a" * 64,
        "result_digest": "b" * 64,
        "weights": (WeightFile("model.safetensors", SIZE, "c" * 64, HEADER),),
        "tied": {"b": "a"},
        "files": (SmallFile("config.json", 2, "d" * 64, None),),
    }
    return Head(**{**fields, **changes})


def text(change: Callable[[dict[str, Any]], None] = lambda fields: None) -> bytes:
    """The head's JSON after a change."""
    packed = form.pack_head(head())
    fields = json.loads(zstandard.ZstdDecompressor().decompress(packed[form.PREFIX.size :]))
    change(fields)
    return json.dumps(fields).encode()


def test_a_head_comes_back_as_it_was() -> None:
    packed = form.pack_head(head())
    assert packed.startswith(b"ECHO2WD\n")
    assert form.head_length(packed[: form.PREFIX.size]) == len(packed) - form.PREFIX.size
    assert form.unpack_head(packed[form.PREFIX.size :]) == head()


def test_a_stored_tensor_goes_to_its_own_place_and_to_those_tied_to_it() -> None:
    layout = form.layout(head())
    start = 8 + len(HEADER)
    assert [tensor.name for tensor in layout.tensors] == ["a"]
    assert layout.places == {"a": (Place("model.safetensors", start), Place("model.safetensors", start + 4))}
    assert [tensor.name for tensor in form.layout(head(tied={})).tensors] == ["a", "b"]


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields.__setitem__(key, value)


def _weight(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["weights"][0].__setitem__(place, value)


def _file(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda fields: fields["files"][0].__setitem__(place, value)


OTHER = ["model-00001-of-00002.safetensors", SIZE, "c" * 64, HEADER]
REFUSED = {
    "another format": (_set("format", "echo2-weights-delta-2"), "format is"),
    "an unknown key": (_set("path", "x"), "unknown"),
    "no hex": (_set("base_digest", "z" * 64), "base_digest"),
    "an encoding that is no name": (_set("encoding", "../delta"), "encoding"),
    "a path as weights": (_weight(0, "../model.safetensors"), "weights"),
    "an absolute path": (_weight(0, "/etc/model.safetensors"), "weights"),
    "a foreign name": (_weight(0, "consolidated.safetensors"), "weights"),
    "a size that is short": (_weight(1, SIZE - 1), "does not describe model.safetensors"),
    "a negative size": (_weight(1, -1), "size"),
    "no header": (_weight(3, None), "header"),
    "half a surrogate": (_weight(3, "\ud800"), "header"),
    "a header of something else": (_weight(3, "[]"), "does not describe"),
    "the single file beside others": (lambda fields: fields["weights"].insert(0, OTHER), "stands alone"),
    "weights out of order": (lambda fields: fields["weights"].append(OTHER), "sorted"),
    "a repeated file": (lambda fields: fields["files"].append(fields["files"][0]), "sorted"),
    "a tensor in two files": (
        _set("weights", [OTHER, ["model-00002-of-00002.safetensors", *OTHER[1:]]]),
        "in model-00002-of-00002.safetensors and in model-00001-of-00002.safetensors",
    ),
    "a path as a file": (_file(0, "../../.bashrc"), "files"),
    "a hidden file": (_file(0, ".bashrc"), "files"),
    "a huge file": (_file(1, 1 << 40), "size"),
    "an empty frame": (_file(3, 0), "packed"),
    "a short entry": (_set("files", [["config.json", 2]]), "files"),
    "no tensors": (_set("weights", []), "0 tensors"),
    "tied to nothing": (_set("tied", {"b": "c"}), "ties"),
    "tied to itself": (_set("tied", {"b": "b"}), "ties"),
    "tied to a number": (_set("tied", {"b": 1}), "tied"),
    "an unknown name tied": (_set("tied", {"x": "a"}), "ties"),
}


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_other_heads_are_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    with pytest.raises(WeightsFileRefused, match=words):
        form.parse_head(text(change))


def test_ties_of_other_shapes_are_refused() -> None:
    other = HEADER.replace('"dtype":"BF16","shape":[2],"data_offsets":[4,8]', '"dtype":"F16","shape":[2],"data_offsets":[4,8]')
    file = WeightFile("model.safetensors", 8 + len(other) + 8, "c" * 64, other)
    with pytest.raises(WeightsFileRefused, match="another dtype or shape"):
        form.layout(head(weights=(file,)))


def test_what_is_no_such_file_or_of_another_time_is_named() -> None:
    for prefix in (b"", b"PK\x03\x04" + bytes(10), b"ECHO2WD"):
        with pytest.raises(WeightsFileRefused, match="not a weights delta file"):
            form.head_length(prefix)
    with pytest.raises(WeightsFileRefused, match="format version 2"):
        form.head_length(form.PREFIX.pack(form.MAGIC, 2, 10))
    with pytest.raises(WeightsFileRefused, match="at most"):
        form.head_length(form.PREFIX.pack(form.MAGIC, 1, form.MAX_HEAD_BYTES + 1))


def test_bombs_are_measured_before_they_are_opened() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(form.MAX_HEAD_BYTES + 1))
    assert len(bomb) < 10_000
    with pytest.raises(WeightsFileRefused, match=f"declares {form.MAX_HEAD_BYTES + 1} bytes"):
        form.unpack_head(bomb)
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(b"x")
    with pytest.raises(WeightsFileRefused, match="declares no size"):
        form.unpack(undeclared, "it", most=10)
    lying = bytearray(zstandard.ZstdCompressor().compress(bytes(1000)))
    lying[5:7] = struct.pack("<H", 100 - 256 & 0xFFFF)  # the content size field of a frame of this length
    with pytest.raises(WeightsFileRefused):
        form.unpack(bytes(lying), "it", most=500)
    with pytest.raises(WeightsFileRefused, match="does not decompress"):
        form.unpack(b"no zstd frame", "it", most=500)
