"""The safetensors file format: eight bytes of header length, a JSON header, the tensors' bytes.

Read by hand because numpy knows no bf16 and nothing here may import torch. Stricter than the format's readers need to be:
no holes, no overlap, nothing after the last tensor.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from p2p.codec.layout import ordered
from p2p.domain import dtypes
from p2p.domain import strict_json as js
from p2p.domain.manifest import MAX_DIMENSIONS, MAX_TENSORS, MAX_TOTAL_BYTES, Tensor
from p2p.errors import SnapshotError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_NAME = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class Located:
    """A tensor and where its bytes start, counted from the first byte after the header."""

    tensor: Tensor
    start: int


@dataclass(frozen=True, slots=True)
class Header:
    """What a file holds."""

    tensors: tuple[Located, ...]
    metadata: Mapping[str, str]


def header_bytes(first: bytes, *, file_bytes: int) -> int:
    """Length of the JSON header, from the file's first eight bytes. Raises SnapshotError."""
    if len(first) < LENGTH.size:
        raise SnapshotError(f"a safetensors file starts with {LENGTH.size} bytes of length; this one holds {len(first)} bytes")
    (length,) = LENGTH.unpack_from(first)
    if not 2 <= length <= min(MAX_HEADER_BYTES, file_bytes - LENGTH.size):
        raise SnapshotError(f"header length {length} does not fit a file of {file_bytes} bytes (limit {MAX_HEADER_BYTES})")
    return int(length)


def parse_header(data: bytes, *, data_bytes: int) -> Header:
    """The tensors of a file whose header is `data` and which holds `data_bytes` after it. Raises SnapshotError."""
    try:
        entries = js.table(js.parse(data.decode(), limit=MAX_HEADER_BYTES), "header", most=MAX_TENSORS)
        metadata = _metadata(entries.pop(METADATA, {}))
        located = sorted((_located(name, entry) for name, entry in entries.items()), key=lambda one: (one.start, one.tensor.nbytes))
    except (js.JsonRefused, UnicodeDecodeError) as error:
        raise SnapshotError(f"the safetensors header is refused: {error}") from error
    end = 0
    for one in located:
        if one.start != end:
            raise SnapshotError(
                f"tensor {one.tensor.name!r} starts at byte {one.start}, the one before it ends at {end}: holes and overlap are refused"
            )
        end += one.tensor.nbytes
    if end != data_bytes:
        raise SnapshotError(
            f"the tensors end at byte {end} but the file holds {data_bytes} bytes after its header: copy or download it again"
        )
    return Header(tuple(located), metadata)


def build_header(tensors: Sequence[Tensor], metadata: Mapping[str, str]) -> bytes:
    """The file's bytes before its tensors, which follow in layout order; padded so that they start aligned."""
    entries: dict[str, Any] = {METADATA: dict(sorted(metadata.items()))}
    offset = 0
    for tensor in ordered(tensors):
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return LENGTH.pack(len(text)) + text


def _metadata(value: object) -> dict[str, str]:
    entries = js.table(value, METADATA, most=MAX_TENSORS)
    for key, entry in entries.items():
        if not isinstance(entry, str):
            js.refuse(f"{METADATA}[{key[:60]!r}]", entry, "text")
    return entries


def _located(name: str, value: object) -> Located:
    place = f"tensor {name[:120]!r}"
    fields = js.record(value, place, frozenset({"dtype", "shape", "data_offsets"}))
    dtype = fields["dtype"]
    if not isinstance(dtype, str) or dtype not in dtypes.BITS:
        js.refuse(f"{place} dtype", dtype, f"one of {', '.join(dtypes.BITS)}")
    shape = js.each(js.array(fields["shape"], f"{place} shape", most=MAX_DIMENSIONS), f"{place} shape", _count)
    offsets = js.each(js.array(fields["data_offsets"], f"{place} data_offsets", most=2), f"{place} data_offsets", _count)
    nbytes = dtypes.whole_bytes(dtype, shape)
    if len(offsets) != 2 or nbytes is None or offsets[1] - offsets[0] != nbytes:
        js.refuse(f"{place} data_offsets", offsets, f"{nbytes} bytes apart, what {dtype} {list(shape)} takes")
    return Located(Tensor(name, dtype, shape, nbytes), offsets[0])


def _count(value: object, place: str) -> int:
    return js.integer(value, place, least=0, most=MAX_TOTAL_BYTES)
