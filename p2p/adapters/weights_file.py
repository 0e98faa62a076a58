"""Weights delta files on disk: opening and checking them, and the directories that they are made from and applied to.

Making one is in `weights_diff`, applying one in `weights_apply`. Memory is bounded by a few shards: tensors are mapped, files streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from p2p.adapters.durable import HASH_BLOCK_BYTES
from p2p.adapters.snapshot_dir import INDEX, MAX_INDEX_BYTES, WEIGHTS, Snapshot, open_snapshot
from p2p.codec import weights_file as form
from p2p.codec.layout import Bytes
from p2p.codec.snapshot import whole_digest
from p2p.codec.weights_file import Head, Layout, SmallFile
from p2p.domain.manifest import Tensor
from p2p.errors import SnapshotError, WeightsFileRefused

Watch = Callable[[str, int, int], None]  # stage, bytes done, bytes in all
OTHER_WEIGHTS = frozenset({".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".safetensors"})


def unwatched(stage: str, done: int, total: int) -> None:
    """Nobody looks."""


@dataclass(frozen=True, slots=True)
class DeltaFile:
    """A weights delta file whose digest was checked and whose head was read; the rest is read when asked for."""

    path: Path
    head: Head
    layout: Layout
    nbytes: int
    files_start: int
    stream_start: int

    @property
    def stream_bytes(self) -> int:
        """Length of the delta stream."""
        return self.nbytes - form.DIGEST_BYTES - self.stream_start

    def stream(self) -> Iterator[bytes]:
        """The delta stream, in blocks."""
        return _blocks(self.path, self.stream_start, self.stream_bytes)

    def small_files(self) -> Iterator[tuple[SmallFile, bytes | None]]:
        """The files beside the weights, verified; None stands for the base's. Raises WeightsFileRefused."""
        offset = self.files_start
        for entry in self.head.files:
            if entry.packed is None:
                yield entry, None
                continue
            frame = b"".join(_blocks(self.path, offset, entry.packed))
            offset += entry.packed
            data = form.unpack(frame, f"{self.path} carries {entry.name}, which", most=entry.size)
            require_same(entry, data, f"{self.path} carries")
            yield entry, data


def open_delta(path: Path, *, watch: Watch = unwatched) -> DeltaFile:
    """Check the file's own digest and read its head. Raises WeightsFileRefused (what is wrong, and what to do), OSError."""
    try:
        return _opened(path, watch)
    except WeightsFileRefused as error:
        raise WeightsFileRefused(f"{path} is refused: {error}") from error


def is_delta(path: Path) -> bool:
    """Whether the file begins as a weights delta file does. Raises OSError."""
    with path.open("rb") as source:
        return source.read(len(form.MAGIC)) == form.MAGIC


def open_directory(directory: Path) -> Snapshot:
    """Map a Hugging Face directory. Raises SnapshotError; one with weights in other formats is refused by their names."""
    if not directory.is_dir():
        raise SnapshotError(f"{directory} is no directory: name one that holds {WEIGHTS} or its shards with their index")
    if not (directory / WEIGHTS).is_file() and not (directory / INDEX).is_file():
        others = sorted(path.name for path in directory.iterdir() if path.suffix in OTHER_WEIGHTS)
        found = f"holds {', '.join(others[:4])}" if others else "holds no weights"
        raise SnapshotError(
            f"{directory} {found}; what is read is {WEIGHTS}, or model-00001-of-0000N.safetensors with {INDEX}: "
            "save the model with save_pretrained"
        )
    return open_snapshot(directory)


def identity(snapshot: Snapshot, stage: str, watch: Watch) -> str:
    """The digest of the version that a directory holds, with progress."""
    total = sum(tensor.nbytes for tensor in snapshot.tensors)
    done = 0

    def read(name: str) -> Bytes:
        nonlocal done
        data = snapshot.read(name)
        done += len(data)
        watch(stage, done, total)
        return data

    files = {name: blake3(data).hexdigest() for name, data in snapshot.files.items()}
    return whole_digest(snapshot.tensors, snapshot.aliases, files, read)


def small_files(directory: Path, snapshot: Snapshot) -> dict[str, bytes]:
    """The files of a directory that travel with its weights: the allow-listed ones, and the index of sharded weights."""
    index = directory / INDEX
    if (directory / WEIGHTS).is_file() or not index.is_file():
        return dict(snapshot.files)
    if index.stat().st_size > MAX_INDEX_BYTES:
        raise SnapshotError(f"{index} is larger than {MAX_INDEX_BYTES} bytes")
    return {**snapshot.files, INDEX: index.read_bytes()}


def held_alike(base: Snapshot) -> Callable[[Tensor], Bytes | None]:
    """The base's bytes of a tensor, under its own name or as an alias; None if it has none of that dtype and shape."""
    stored = {tensor.name: tensor for tensor in base.tensors}

    def read(tensor: Tensor) -> Bytes | None:
        name = base.aliases.get(tensor.name, tensor.name)
        found = stored.get(name)
        return base.read(name) if found and (found.dtype, found.shape) == (tensor.dtype, tensor.shape) else None

    return read


def require_same(entry: SmallFile, data: bytes, holder: str) -> None:
    """Return if `data` is the file; raise WeightsFileRefused if not."""
    found = blake3(data).hexdigest()
    if (len(data), found) != (entry.size, entry.digest):
        raise WeightsFileRefused(
            f"{holder} {entry.name} with {len(data)} bytes, digest {found}; {entry.size} with {entry.digest} are due"
        )


def _opened(path: Path, watch: Watch) -> DeltaFile:
    nbytes = path.stat().st_size
    with path.open("rb") as source:
        prefix = source.read(form.PREFIX.size)
        length = form.head_length(prefix)
        _check_digest(path, nbytes, watch)
        head = form.unpack_head(source.read(length))
    files_start = form.PREFIX.size + length
    stream_start = files_start + sum(entry.packed or 0 for entry in head.files)
    if stream_start > nbytes - form.DIGEST_BYTES:
        raise WeightsFileRefused(f"its small files reach to byte {stream_start}, past its end")
    return DeltaFile(path, head, form.layout(head), nbytes, files_start, stream_start)


def _check_digest(path: Path, nbytes: int, watch: Watch) -> None:
    content = nbytes - form.DIGEST_BYTES
    state = blake3()
    done = 0
    for block in _blocks(path, 0, max(0, content)):
        state.update(block)
        done += len(block)
        watch("checking the file", done, content)
    with path.open("rb") as source:
        source.seek(max(0, content))
        kept = source.read(form.DIGEST_BYTES)
    if content < form.PREFIX.size or kept != state.digest():
        raise WeightsFileRefused("it is damaged or cut short (its last 32 bytes are not the digest of the others): fetch it again")


def _blocks(path: Path, start: int, length: int) -> Iterator[bytes]:
    """`length` bytes of a file, in blocks; fewer if it ends."""
    with path.open("rb") as source:
        source.seek(start)
        while length > 0 and (block := source.read(min(length, HASH_BLOCK_BYTES))):
            length -= len(block)
            yield block
