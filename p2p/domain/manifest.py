"""What a policy version is made of: tensors, files, and the edges by which its bytes may be had.

A manifest is canonical JSON (`to_json`), signed as text (`signing.py`) and specified in PROTOCOL.md. `from_json` believes
nothing: sizes are limited before parsing, every value is checked, and the text must be the canonical one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

from blake3 import blake3

from p2p.domain import dtypes
from p2p.domain import strict_json as js
from p2p.errors import ManifestError

FORMAT = "echo2-manifest-1"
ALLOWED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
)
KEYFRAMES = ("raw", "planes")

MAX_TEXT = 64 << 20  # characters
MAX_TENSORS = 100_000
MAX_EDGES = 64
MAX_PIECES = 1 << 20  # of one edge or file
MAX_PIECE_BYTES = 16 << 20
MAX_FILE_BYTES = 64 << 20
MAX_TOTAL_BYTES = 1 << 44
MAX_DIMENSIONS = 8
MAX_CANARY = 4096
EDGE_SLACK_BYTES = 1 << 20  # an encoding may add this, and 1/64, to the raw bytes

DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[\x21-\x7e]{1,512}")
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
ENCODING = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Unit of transfer: `size` bytes whose BLAKE3 is `digest` (hex)."""

    digest: str
    size: int


@dataclass(frozen=True, slots=True)
class Tensor:
    """A stored tensor; `dtype` in the spelling of safetensors, `nbytes` raw little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One of the allow-listed small files beside the weights: its pieces, in order."""

    name: str
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class Edge:
    """One way to the version's tensor bytes: from nothing (keyframe, base None) or from a base version (delta).

    `transfer` is the hash of the first signed batch of its pieces (`batches.py`); None if they never travelled in batches.
    """

    encoding: str
    base_version: int | None
    base_digest: str | None
    pieces: tuple[Piece, ...]
    transfer: str | None = None

    @property
    def size(self) -> int:
        """Bytes to fetch."""
        return sum(piece.size for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Manifest:
    """A policy version. `digest` is its identity: see `codec.snapshot`. Tensors are sorted by name."""

    job_id: str
    version: int
    digest: str
    tensors: tuple[Tensor, ...]
    aliases: Mapping[str, str]  # tied weights: alias -> stored tensor
    files: tuple[FileEntry, ...]
    canary_ids: tuple[int, ...]
    edges: tuple[Edge, ...]

    @property
    def nbytes(self) -> int:
        """Raw bytes of all stored tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def elements(self) -> int:
        """Parameters: elements of all stored tensors."""
        return sum(tensor.nbytes * 8 // dtypes.BITS[tensor.dtype] for tensor in self.tensors)

    @property
    def layout(self) -> str:
        """Digest of what the tensors are called and how they lie: a delta applies between versions of one layout."""
        return blake3(js.canonical({"tensors": self._plain_tensors(), "aliases": dict(self.aliases)}).encode()).hexdigest()

    def pieces(self, edges: Iterable[Edge]) -> tuple[Piece, ...]:
        """The distinct pieces that a receiver by these edges needs, files included, in order."""
        return tuple(dict.fromkeys((*self._file_pieces(), *(piece for edge in edges for piece in edge.pieces))))

    def all_pieces(self) -> frozenset[Piece]:
        """Every piece named anywhere in the manifest: what a store keeps while the version is alive."""
        return frozenset(self.pieces(self.edges))

    def to_json(self) -> str:
        """The canonical text, the one that is signed."""
        return js.canonical(
            {
                "format": FORMAT,
                "job_id": self.job_id,
                "version": self.version,
                "digest": self.digest,
                "tensors": self._plain_tensors(),
                "aliases": dict(self.aliases),
                "files": [{"name": file.name, "pieces": plain_pieces(file.pieces)} for file in self.files],
                "canary_ids": list(self.canary_ids),
                "edges": [plain_edge(edge) for edge in self.edges],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read and check a manifest. Raises ManifestError."""
        try:
            manifest = _manifest(js.parse(text, limit=MAX_TEXT))
            if manifest.to_json() != text:
                raise js.JsonRefused("the text is not canonical JSON (sorted keys, no spaces, ASCII): send it exactly as signed")
        except js.JsonRefused as error:
            raise ManifestError(f"the manifest is refused: {error}") from error
        return manifest

    def _plain_tensors(self) -> list[list[object]]:
        return [[one.name, one.dtype, list(one.shape), one.nbytes] for one in self.tensors]

    def _file_pieces(self) -> Iterator[Piece]:
        return (piece for file in self.files for piece in file.pieces)


def most_edge_bytes(raw_bytes: int) -> int:
    """What an edge may take for tensors of so many bytes."""
    return raw_bytes + raw_bytes // 64 + EDGE_SLACK_BYTES


def plain_pieces(pieces: tuple[Piece, ...]) -> list[list[object]]:
    """Pieces as canonical JSON spells them."""
    return [[piece.digest, piece.size] for piece in pieces]


def plain_edge(edge: Edge) -> dict[str, object]:
    """An edge as canonical JSON spells it."""
    return {
        "encoding": edge.encoding,
        "base_version": edge.base_version,
        "base_digest": edge.base_digest,
        "pieces": plain_pieces(edge.pieces),
        "transfer": edge.transfer,
    }


_EDGE_KEYS = frozenset({"encoding", "base_version", "base_digest", "pieces", "transfer"})
_KEYS = frozenset({"format", "job_id", "version", "digest", "tensors", "aliases", "files", "canary_ids", "edges"})


def _manifest(value: object) -> Manifest:
    fields = js.record(value, "manifest", _KEYS)
    if fields["format"] != FORMAT:
        js.refuse("format", fields["format"], repr(FORMAT))
    tensors = _tensors(fields["tensors"])
    version = js.integer(fields["version"], "version", least=0, most=2**53)
    return Manifest(
        job_id=js.text(fields["job_id"], "job_id", JOB),
        version=version,
        digest=js.text(fields["digest"], "digest", DIGEST),
        tensors=tensors,
        aliases=_aliases(fields["aliases"], {tensor.name for tensor in tensors}),
        files=_files(fields["files"]),
        canary_ids=js.each(js.array(fields["canary_ids"], "canary_ids", most=MAX_CANARY), "canary_ids", _token),
        edges=_edges(fields["edges"], version, sum(tensor.nbytes for tensor in tensors)),
    )


def _tensors(value: object) -> tuple[Tensor, ...]:
    tensors = js.each(js.array(value, "tensors", most=MAX_TENSORS), "tensors", _tensor)
    if not tensors:
        raise js.JsonRefused("tensors is empty; a version holds at least one")
    for before, after in pairwise(tensors):
        if before.name >= after.name:
            raise js.JsonRefused(f"tensors must be sorted by name without repeats; {after.name!r} follows {before.name!r}")
    total = sum(tensor.nbytes for tensor in tensors)
    if total > MAX_TOTAL_BYTES:
        raise js.JsonRefused(f"the tensors hold {total} bytes, above the limit of {MAX_TOTAL_BYTES}")
    return tensors


def _tensor(value: object, place: str) -> Tensor:
    entry = js.array(value, place, most=4)
    if len(entry) != 4:
        js.refuse(place, value, "[name, dtype, shape, nbytes]")
    name = js.text(entry[0], f"{place} name", _NAME)
    dtype = entry[1]
    if not isinstance(dtype, str) or dtype not in dtypes.BITS:
        js.refuse(f"{place} dtype", dtype, f"one of {', '.join(dtypes.BITS)}")
    shape = js.each(js.array(entry[2], f"{place} shape", most=MAX_DIMENSIONS), f"{place} shape", _side)
    nbytes = js.integer(entry[3], f"{place} nbytes", least=0, most=MAX_TOTAL_BYTES)
    wanted = dtypes.whole_bytes(dtype, shape)
    if nbytes != wanted:
        js.refuse(f"{place} nbytes", nbytes, f"{wanted}, what {dtype} {list(shape)} takes (None: not whole bytes)")
    return Tensor(name, dtype, shape, nbytes)


def _side(value: object, place: str) -> int:
    return js.integer(value, place, least=0, most=MAX_TOTAL_BYTES)


def _token(value: object, place: str) -> int:
    return js.integer(value, place, least=0, most=2**31 - 1)


def _aliases(value: object, stored: set[str]) -> dict[str, str]:
    aliases = js.table(value, "aliases", most=MAX_TENSORS)
    for alias, target in aliases.items():
        js.text(alias, "alias", _NAME)
        if alias in stored:
            raise js.JsonRefused(f"alias {alias!r} is also a stored tensor")
        if not isinstance(target, str) or target not in stored:
            js.refuse(f"aliases[{alias!r}]", target, "the name of a stored tensor")
    return aliases


def _files(value: object) -> tuple[FileEntry, ...]:
    files = js.each(js.array(value, "files", most=len(ALLOWED_FILES)), "files", _file)
    names = [file.name for file in files]
    if names != sorted(set(names)):
        raise js.JsonRefused(f"files must be sorted by name without repeats; they are {names}")
    return files


def _file(value: object, place: str) -> FileEntry:
    fields = js.record(value, place, frozenset({"name", "pieces"}))
    if fields["name"] not in ALLOWED_FILES:
        js.refuse(f"{place} name", fields["name"], f"one of {', '.join(ALLOWED_FILES)}")
    pieces = read_pieces(fields["pieces"], f"{place} pieces", limit=MAX_FILE_BYTES)
    return FileEntry(fields["name"], pieces)


def _edges(value: object, version: int, raw_bytes: int) -> tuple[Edge, ...]:
    edges = tuple(
        read_edge(entry, f"edges[{index}]", version, raw_bytes)
        for index, entry in enumerate(js.array(value, "edges", most=MAX_EDGES))
    )
    for index, edge in enumerate(edges):
        if edge.encoding == "raw" and edge.size != raw_bytes:
            raise js.JsonRefused(f"edges[{index}] holds {edge.size} bytes; raw must hold the {raw_bytes} bytes of the tensors")
    kinds = [(edge.encoding, edge.base_digest) for edge in edges]
    if len(set(kinds)) != len(kinds):
        raise js.JsonRefused("two edges have the same encoding and base; one is allowed")
    return edges


def read_edge(value: object, place: str, version: int, raw_bytes: int) -> Edge:
    """An edge of `version`, whose tensors hold `raw_bytes`. Raises JsonRefused."""
    fields = js.record(value, place, _EDGE_KEYS)
    encoding = js.text(fields["encoding"], f"{place} encoding", ENCODING)
    base_version, base_digest = fields["base_version"], fields["base_digest"]
    if (base_version is None) != (base_digest is None):
        raise js.JsonRefused(f"{place} must name both base_version and base_digest, or neither")
    if base_digest is not None:
        js.integer(base_version, f"{place} base_version", least=0, most=version)
        js.text(base_digest, f"{place} base_digest", DIGEST)
        if encoding in KEYFRAMES:
            js.refuse(f"{place} base_digest", base_digest, f"null: {encoding} is a keyframe")
    pieces = read_pieces(fields["pieces"], f"{place} pieces", limit=most_edge_bytes(raw_bytes))
    transfer = fields["transfer"]
    return Edge(
        encoding,
        base_version,
        base_digest,
        pieces,
        None if transfer is None else js.text(transfer, f"{place} transfer", DIGEST),
    )


def read_pieces(value: object, place: str, *, limit: int, most: int = MAX_PIECES) -> tuple[Piece, ...]:
    """At most `most` pieces of at most `limit` bytes together. Raises JsonRefused."""
    pieces = js.each(js.array(value, place, most=most), place, _piece)
    total = sum(piece.size for piece in pieces)
    if total > limit:
        raise js.JsonRefused(f"{place} hold {total} bytes; at most {limit} are allowed")
    sizes: dict[str, int] = {}
    for piece in pieces:
        if sizes.setdefault(piece.digest, piece.size) != piece.size:
            raise js.JsonRefused(f"{place} give piece {piece.digest} two sizes")
    return pieces


def _piece(value: object, place: str) -> Piece:
    entry = js.array(value, place, most=2)
    if len(entry) != 2:
        js.refuse(place, value, "[digest, size]")
    return Piece(
        digest=js.text(entry[0], f"{place} digest", DIGEST),
        size=js.integer(entry[1], f"{place} size", least=1, most=MAX_PIECE_BYTES),
    )
