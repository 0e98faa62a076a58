"""The weights delta file: one version of a Hugging Face directory as a change to another, for people who move models by hand.

prefix (magic, version, head length) · head · small files · delta stream · BLAKE3 of all before. The head keeps the header of
every safetensors file as it is, so that the result's files are the original's byte for byte. Specified in PROTOCOL.md.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import zstandard

from p2p.codec import safetensors
from p2p.codec.safetensors import Located
from p2p.domain import strict_json as js
from p2p.domain.manifest import ALLOWED_FILES, MAX_FILE_BYTES, MAX_TENSORS, MAX_TOTAL_BYTES, Tensor
from p2p.errors import SnapshotError, WeightsFileRefused

MAGIC = b"ECHO2WD\n"
VERSION = 1
FORMAT = "echo2-weights-delta-1"
PREFIX = struct.Struct("<8sHI")  # magic, version, bytes of the packed head
DIGEST_BYTES = 32
MAX_HEAD_BYTES = 32 << 20
MAX_WEIGHT_FILES = 10_000
SMALL_FILES = (*ALLOWED_FILES, safetensors.INDEX)

_DIGEST = re.compile(r"[0-9a-f]{64}")
_ENCODING = re.compile(r"[a-z][a-z0-9-]{0,31}")
_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can spell them, UTF-8 cannot
_ZSTD_LEVEL = 9


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A safetensors file of the result: its size, the BLAKE3 of the whole of it, and its JSON header as it is."""

    name: str
    size: int
    digest: str
    header: str

    @property
    def prefix(self) -> bytes:
        """The file's bytes before its tensors."""
        text = self.header.encode()
        return safetensors.LENGTH.pack(len(text)) + text


@dataclass(frozen=True, slots=True)
class SmallFile:
    """A file beside the weights. `packed` is the length of its zstd frame in this file; None: the base's file is the same."""

    name: str
    size: int
    digest: str
    packed: int | None


@dataclass(frozen=True, slots=True)
class Head:
    """What the delta stream is about. Digests are identities of versions (see `codec.snapshot`)."""

    encoding: str
    base_digest: str
    result_digest: str
    weights: tuple[WeightFile, ...]
    tied: Mapping[str, str]  # tensors in the files that repeat a stored one: name -> stored name
    files: tuple[SmallFile, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor's bytes begin: an offset from the start of a file of the result."""

    file: str
    offset: int


@dataclass(frozen=True, slots=True)
class Layout:
    """The result's tensors: those in the stream, by name, and every place that the bytes of each go to."""

    tensors: tuple[Tensor, ...]
    places: Mapping[str, tuple[Place, ...]]


def pack_head(head: Head) -> bytes:
    """Prefix and head, as they begin the file. Raises WeightsFileRefused for one that no reader would take."""
    text = js.canonical(
        {
            "format": FORMAT,
            "encoding": head.encoding,
            "base_digest": head.base_digest,
            "result_digest": head.result_digest,
            "weights": [[one.name, one.size, one.digest, one.header] for one in head.weights],
            "tied": dict(head.tied),
            "files": [[one.name, one.size, one.digest, one.packed] for one in head.files],
        }
    ).encode()
    parse_head(text)
    packed = pack(text)
    return PREFIX.pack(MAGIC, VERSION, len(packed)) + packed


def head_length(prefix: bytes) -> int:
    """Bytes of the packed head, which follow the prefix. Raises WeightsFileRefused."""
    if len(prefix) < PREFIX.size or not prefix.startswith(MAGIC):
        raise WeightsFileRefused("it is not a weights delta file: its first bytes are others")
    _, version, length = PREFIX.unpack_from(prefix)
    if version != VERSION:
        raise WeightsFileRefused(f"it has format version {version}, this program reads {VERSION}: update the program")
    if length > MAX_HEAD_BYTES:
        raise WeightsFileRefused(f"its head takes {length} bytes; at most {MAX_HEAD_BYTES} are allowed")
    return int(length)


def unpack_head(packed: bytes) -> Head:
    """The head, from the bytes after the prefix. Raises WeightsFileRefused."""
    return parse_head(unpack(packed, "the head", most=MAX_HEAD_BYTES))


def parse_head(data: bytes) -> Head:
    """The head, from its JSON text. Every value is checked, the layout of the tensors included. Raises WeightsFileRefused."""
    try:
        head = _head(js.parse(data.decode("ascii"), limit=MAX_HEAD_BYTES))
    except (js.JsonRefused, UnicodeDecodeError) as error:
        raise WeightsFileRefused(f"its head is refused: {error}") from error
    layout(head)
    return head


def layout(head: Head) -> Layout:
    """Where the tensors of the result lie. Raises WeightsFileRefused for headers that do not describe one set of tensors."""
    found: dict[str, tuple[Tensor, Place]] = {}
    for file in head.weights:
        start = len(file.prefix)
        for one in _located(file, start):
            name = one.tensor.name
            if name in found:
                raise WeightsFileRefused(f"its head has tensor {name[:120]!r} in {file.name} and in {found[name][1].file}")
            found[name] = (one.tensor, Place(file.name, start + one.start))
    total = sum(file.size for file in head.weights)
    if not found or len(found) > MAX_TENSORS or total > MAX_TOTAL_BYTES:
        raise WeightsFileRefused(
            f"its head describes {len(found)} tensors in {total} bytes; 1 to {MAX_TENSORS} in at most {MAX_TOTAL_BYTES} are allowed"
        )
    return _stored(head, found)


def pack(data: bytes) -> bytes:
    """One zstd frame that declares its content size."""
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(data)


def unpack(frame: bytes, what: str, *, most: int) -> bytes:
    """The content of one zstd frame; its declared size is compared before anything is allocated. Raises WeightsFileRefused."""
    try:
        declared = zstandard.frame_content_size(frame)
        if not 0 <= declared <= most:
            size = "no size" if declared < 0 else f"{declared} bytes"
            raise WeightsFileRefused(f"{what} declares {size}; at most {most} bytes are allowed")
        return zstandard.ZstdDecompressor().decompress(frame, max_output_size=declared, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WeightsFileRefused(f"{what} does not decompress: {error}") from error


def _located(file: WeightFile, start: int) -> tuple[Located, ...]:
    try:
        return safetensors.parse_header(file.header.encode(), data_bytes=file.size - start).tensors
    except SnapshotError as error:
        raise WeightsFileRefused(f"its head does not describe {file.name}: {error}") from error


def _stored(head: Head, found: Mapping[str, tuple[Tensor, Place]]) -> Layout:
    """Tensors and places, the tied ones put with what they repeat."""
    places = {name: [place] for name, (_, place) in found.items() if name not in head.tied}
    for name, target in head.tied.items():
        if name not in found or target not in places:
            raise WeightsFileRefused(
                f"its head ties {name[:120]!r} to {target[:120]!r}; both must be tensors, the second one untied"
            )
        one, other = found[name][0], found[target][0]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            raise WeightsFileRefused(f"its head ties {name[:120]!r} to {target[:120]!r}, which has another dtype or shape")
        places[target].append(found[name][1])
    return Layout(tuple(found[name][0] for name in sorted(places)), {name: tuple(all_of) for name, all_of in places.items()})


_KEYS = frozenset({"format", "encoding", "base_digest", "result_digest", "weights", "tied", "files"})


def _head(value: object) -> Head:
    fields = js.record(value, "head", _KEYS)
    if fields["format"] != FORMAT:
        js.refuse("format", fields["format"], repr(FORMAT))
    weights = js.each(js.array(fields["weights"], "weights", most=MAX_WEIGHT_FILES), "weights", _weight_file)
    files = js.each(js.array(fields["files"], "files", most=len(SMALL_FILES)), "files", _small_file)
    _require_sorted([file.name for file in weights], "weights")
    _require_sorted([file.name for file in files], "files")
    if len(weights) > 1 and any(file.name == safetensors.WEIGHTS for file in weights):
        raise js.JsonRefused(f"weights name {safetensors.WEIGHTS} beside others; it stands alone")
    tied = js.table(fields["tied"], "tied", most=MAX_TENSORS)
    for name, target in tied.items():
        if not isinstance(target, str):
            js.refuse(f"tied[{name[:60]!r}]", target, "the name of a tensor")
    return Head(
        encoding=js.text(fields["encoding"], "encoding", _ENCODING),
        base_digest=js.text(fields["base_digest"], "base_digest", _DIGEST),
        result_digest=js.text(fields["result_digest"], "result_digest", _DIGEST),
        weights=weights,
        tied=tied,
        files=files,
    )


def _require_sorted(names: list[str], place: str) -> None:
    for before, after in pairwise(names):
        if before >= after:
            raise js.JsonRefused(f"{place} must be sorted by name without repeats; {after!r} follows {before!r}")


def _weight_file(value: object, place: str) -> WeightFile:
    name, size, digest, header = _entry(value, place, ("name", "size", "digest", "header"))
    if not isinstance(name, str) or not (name == safetensors.WEIGHTS or safetensors.SHARD_NAME.fullmatch(name)):
        js.refuse(f"{place} name", name, f"{safetensors.WEIGHTS} or like model-00001-of-00002.safetensors")
    if not isinstance(header, str) or _SURROGATE.search(header):
        js.refuse(f"{place} header", header, "the JSON text of a safetensors header")
    return WeightFile(
        name=name,
        size=js.integer(size, f"{place} size", least=0, most=MAX_TOTAL_BYTES),
        digest=js.text(digest, f"{place} digest", _DIGEST),
        header=header,
    )


def _small_file(value: object, place: str) -> SmallFile:
    name, size, digest, packed = _entry(value, place, ("name", "size", "digest", "packed"))
    if name not in SMALL_FILES:
        js.refuse(f"{place} name", name, f"one of {', '.join(SMALL_FILES)}")
    return SmallFile(
        name=str(name),
        size=js.integer(size, f"{place} size", least=0, most=MAX_FILE_BYTES),
        digest=js.text(digest, f"{place} digest", _DIGEST),
        packed=None if packed is None else js.integer(packed, f"{place} packed", least=1, most=MAX_FILE_BYTES),
    )


def _entry(value: object, place: str, names: tuple[str, ...]) -> Iterator[object]:
    entry = js.array(value, place, most=len(names))
    if len(entry) != len(names):
        js.refuse(place, value, f"[{', '.join(names)}]")
    return iter(entry)
