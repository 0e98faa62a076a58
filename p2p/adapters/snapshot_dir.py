"""A Hugging Face directory read as a snapshot: tensors mapped from safetensors files, and the small files beside them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from p2p.codec import safetensors
from p2p.codec.layout import Bytes
from p2p.codec.snapshot import whole_digest
from p2p.domain.manifest import ALLOWED_FILES, MAX_FILE_BYTES, Tensor
from p2p.errors import SnapshotError

WEIGHTS = safetensors.WEIGHTS
INDEX = safetensors.INDEX
MAX_INDEX_BYTES = 64 << 20
TIED_HEAD = "lm_head.weight"
_EMBEDDING = re.compile(r"(.*\.)?(embed_tokens|wte|word_embeddings|embed_in|tok_embeddings)\.weight")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is in a directory. The tensors' bytes are mapped, not loaded; the files are small and are."""

    tensors: tuple[Tensor, ...]  # stored ones, by name
    aliases: Mapping[str, str]
    files: Mapping[str, bytes]
    mapped: Mapping[str, Bytes]

    def read(self, name: str) -> Bytes:
        """The bytes of a stored tensor, read-only."""
        return self.mapped[name]

    def digest(self) -> str:
        """The identity of the version that these bits are."""
        files = {name: blake3(data).hexdigest() for name, data in self.files.items()}
        return whole_digest(self.tensors, self.aliases, files, self.read)


def digest_of(directory: Path) -> str:
    """The identity of the version in a directory, from its bits. Raises SnapshotError, OSError."""
    return open_snapshot(directory).digest()


def open_snapshot(directory: Path) -> Snapshot:
    """Map a directory. Raises SnapshotError (what is wrong, and where), OSError."""
    mapped: dict[str, Bytes] = {}
    tensors: dict[str, Tensor] = {}
    metadata: dict[str, str] = {}
    for path in weight_files(directory):
        header, data = map_file(path)
        for one in header.tensors:
            name = one.tensor.name
            if name in tensors:
                raise SnapshotError(f"tensor {name!r} is in {path.name} and in another file of {directory}")
            tensors[name] = one.tensor
            mapped[name] = data[one.start : one.start + one.tensor.nbytes]
        metadata.update(header.metadata)
    if not tensors:
        raise SnapshotError(f"{directory} holds no tensors: save the model again with save_pretrained")
    files = _small_files(directory)
    aliases = {name: target for name, target in metadata.items() if name not in tensors and target in tensors and name != "format"}
    _tie_head(tensors, aliases, mapped, files.get("config.json", b"{}"))
    stored = tuple(tensors[name] for name in sorted(tensors))
    return Snapshot(stored, aliases, files, mapped)


def weight_files(directory: Path) -> Sequence[Path]:
    """The safetensors files of a directory: the single one, or those its index names. Raises SnapshotError."""
    single, index = directory / WEIGHTS, directory / INDEX
    if single.is_file():
        return [single]
    if not index.is_file():
        raise SnapshotError(f"{directory} holds neither {WEIGHTS} nor {INDEX}: save the model with safetensors")
    names = _index_names(index)
    for name in names:
        if not safetensors.SHARD_NAME.fullmatch(name):
            raise SnapshotError(f"{index} names the file {name[:80]!r}; names must be like model-00001-of-00002.safetensors")
        if not (directory / name).is_file():
            raise SnapshotError(f"{index} names {name}, and no such file lies beside it: copy or download all shards")
    return [directory / name for name in names]


def _index_names(index: Path) -> list[str]:
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise SnapshotError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    try:
        names = {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SnapshotError(
            f"{index} is not an index of safetensors files: {error}; copy it again, or save the model again"
        ) from error
    return sorted(names)


def map_file(path: Path) -> tuple[safetensors.Header, Bytes]:
    """A safetensors file's header, and its bytes after the header. Raises SnapshotError, OSError."""
    size = path.stat().st_size
    try:
        with path.open("rb") as source:
            length = safetensors.header_bytes(source.read(safetensors.LENGTH.size), file_bytes=size)
            start = safetensors.LENGTH.size + length
            header = safetensors.parse_header(source.read(length), data_bytes=size - start)
    except SnapshotError as error:
        raise SnapshotError(f"{path}: {error}") from error
    data: Bytes = np.memmap(path, np.uint8, mode="r")
    return header, data[start:].view(np.ndarray)


def _small_files(directory: Path) -> dict[str, bytes]:
    """The allow-listed files that are there, by name."""
    files = {}
    for name in sorted(ALLOWED_FILES):
        path = directory / name
        if not path.is_file():
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            raise SnapshotError(f"{path} holds {path.stat().st_size} bytes; at most {MAX_FILE_BYTES} are allowed")
        files[name] = path.read_bytes()
    return files


def _tie_head(tensors: dict[str, Tensor], aliases: dict[str, str], mapped: Mapping[str, Bytes], config: bytes) -> None:
    """Turn an output head that the config calls tied, and that equals the embedding bit for bit, into an alias of it."""
    head = tensors.get(TIED_HEAD)
    if head is None or not _says_tied(config):
        return
    for name, tensor in sorted(tensors.items()):
        alike = (tensor.dtype, tensor.shape) == (head.dtype, head.shape)
        if _EMBEDDING.fullmatch(name) and alike and np.array_equal(mapped[name], mapped[TIED_HEAD]):
            del tensors[TIED_HEAD]
            aliases[TIED_HEAD] = name
            return


def _says_tied(config: bytes) -> bool:
    try:
        fields = json.loads(config)
    except (ValueError, RecursionError):
        return False
    return isinstance(fields, dict) and fields.get("tie_word_embeddings") is True
