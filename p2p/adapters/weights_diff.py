"""Making a weights delta file from two Hugging Face directories."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from blake3 import blake3

from p2p.adapters.durable import REAL_FILES, TEMPORARY_SUFFIX, FileLayer, hash_file
from p2p.adapters.snapshot_dir import Snapshot, weight_files
from p2p.adapters.weights_file import Watch, held_alike, identity, is_delta, open_directory, small_files, unwatched
from p2p.codec import safetensors
from p2p.codec import weights_file as form
from p2p.codec.encodings import Base, Encoding
from p2p.codec.layout import Bytes, Chunk, Shard, Slice, gather, shards, view
from p2p.codec.weights_file import Head, Layout, SmallFile, WeightFile
from p2p.errors import WeightsFileRefused


@dataclass(frozen=True, slots=True)
class Diffed:
    """What was written, and what was left out."""

    head: Head
    layout: Layout
    nbytes: int
    without_base: tuple[str, ...]  # tensors that the base lacks, or holds in another dtype or shape
    not_carried: tuple[str, ...]  # entries of the new directory


def diff(
    base_dir: Path,
    new_dir: Path,
    out: Path,
    *,
    encoding: str,
    encoder: Encoding,
    threads: int = 1,
    watch: Watch = unwatched,
) -> Diffed:
    """Write to `out` what makes the version in `new_dir` out of the one in `base_dir`; durable on return.

    `encoder` writes what readers know as `encoding`; `threads` threads encode shards. Raises SnapshotError, WeightsFileRefused
    (`out` is something else), OSError; `out` is then as it was.
    """
    _refuse_other_file(out)
    base, new = open_directory(base_dir), open_directory(new_dir)
    small = _small_files(small_files(base_dir, base), small_files(new_dir, new))
    head = Head(
        encoding=encoding,
        base_digest=identity(base, "hashing the base", watch),
        result_digest=identity(new, "hashing the new version", watch),
        weights=tuple(_described(path) for path in weight_files(new_dir)),
        tied={name: target for name, target in new.aliases.items() if name in new.mapped},
        files=tuple(entry for entry, _ in small),
    )
    layout = form.layout(head)
    start = [form.pack_head(head), *(frame for _, frame in small)]
    stream = _encoded(encoder, new, base_of(base), shards(layout.tensors), threads, watch)
    nbytes = _write(out, _sealed(start, stream))
    held = held_alike(base)
    without = tuple(tensor.name for tensor in layout.tensors if held(tensor) is None)
    return Diffed(head, layout, nbytes, without, _not_carried(new_dir, head))


def base_of(base: Snapshot) -> Base:
    """The base's bytes of a shard; zeros where it holds no such tensor."""
    held = held_alike(base)

    def part(one: Slice) -> Bytes:
        found = held(one.tensor)
        return np.zeros(one.stop - one.start, np.uint8) if found is None else found[one.start : one.stop]

    def read(shard: Shard) -> Bytes:
        parts = [part(one) for one in shard.slices]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    return read


def _refuse_other_file(out: Path) -> None:
    if not out.parent.is_dir():
        raise WeightsFileRefused(f"{out} cannot be written: there is no directory {out.parent}; make it first")
    if out.is_dir() or (out.exists() and not is_delta(out)):
        raise WeightsFileRefused(f"{out} exists and is no weights delta file: choose another name")


def _small_files(base: dict[str, bytes], new: dict[str, bytes]) -> list[tuple[SmallFile, bytes]]:
    """Entries by name with their frames; an empty frame for what the base holds already."""
    found = []
    for name, data in sorted(new.items()):
        frame = b"" if base.get(name) == data else form.pack(data)
        found.append((SmallFile(name, len(data), blake3(data).hexdigest(), len(frame) or None), frame))
    return found


def _described(path: Path) -> WeightFile:
    size = path.stat().st_size
    with path.open("rb") as source:
        length = safetensors.header_bytes(source.read(safetensors.LENGTH.size), file_bytes=size)
        header = source.read(length).decode()
    return WeightFile(path.name, size, hash_file(path), header)


def _encoded(
    encoder: Encoding, new: Snapshot, base: Base, plan: Sequence[Shard], threads: int, watch: Watch
) -> Iterator[Sequence[Chunk]]:
    """The stream's chunks, a shard at a time, in order."""
    tasks = (lambda shard=shard: list(encoder.encode([(shard, gather(shard, new.read))], base)) for shard in plan)
    total = sum(shard.nbytes for shard in plan)
    done = 0
    for shard, chunks in zip(plan, _in_order(tasks, threads), strict=True):
        done += shard.nbytes
        watch("encoding", done, total)
        yield chunks


def _in_order(tasks: Iterable[Callable[[], list[Chunk]]], threads: int) -> Iterator[list[Chunk]]:
    """Results of tasks in order; at most one more task than threads is under way or waits to be taken."""
    waiting: deque[Future[list[Chunk]]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="weights-diff")
    try:
        for task in tasks:
            waiting.append(pool.submit(task))
            if len(waiting) > threads:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _sealed(start: Iterable[bytes], stream: Iterable[Sequence[Chunk]]) -> Iterator[memoryview]:
    """Everything in order, and at the end the digest of it."""
    state = blake3()
    for data in start:
        state.update(data)
        yield memoryview(data)
    for chunks in stream:
        for chunk in chunks:
            state.update(view(chunk))
            yield view(chunk)
    yield memoryview(state.digest())


def _write(out: Path, chunks: Iterable[memoryview], files: FileLayer = REAL_FILES) -> int:
    """Put the chunks at `out`, whole and durable on return; their length."""
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        files.write_chunks(temporary, chunks)
        files.fsync_file(temporary)
        nbytes = temporary.stat().st_size
        files.replace(temporary, out)
    except BaseException:
        with suppress(OSError):
            files.remove_file(temporary)
        raise
    files.fsync_dir(out.parent)
    return nbytes


def _not_carried(directory: Path, head: Head) -> tuple[str, ...]:
    carried = {file.name for file in head.weights} | {file.name for file in head.files}
    entries = ((path.name + "/" if path.is_dir() else path.name) for path in directory.iterdir())
    return tuple(sorted(name for name in entries if name not in carried))
