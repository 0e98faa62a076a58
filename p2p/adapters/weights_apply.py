"""Applying a weights delta file: the base's directory and the file give the new version's directory back, byte for byte."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from p2p.adapters.durable import (
    REAL_FILES,
    TEMPORARY_SUFFIX,
    FileLayer,
    hash_file,
    make_directory_durably,
    replace_directory_durably,
)
from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.adapters.weights_diff import base_of
from p2p.adapters.weights_file import (
    DeltaFile,
    Watch,
    identity,
    open_delta,
    open_directory,
    require_same,
    small_files,
    unwatched,
)
from p2p.codec.encodings import ENCODINGS, Encoding
from p2p.codec.layout import Bytes, Shard, shards, view
from p2p.codec.weights_file import Place
from p2p.errors import ApplyFailed, WeightsFileRefused


def apply(
    base_dir: Path,
    path: Path,
    out: Path,
    *,
    encodings: Mapping[str, Encoding] = ENCODINGS,
    watch: Watch = unwatched,
    files: FileLayer = REAL_FILES,
) -> DeltaFile:
    """Make `out` the directory that `path` was made from; verified whole and durable on return.

    `out` must not exist, or be an empty directory. Raises WeightsFileRefused (damaged, another base, `out` in use, no room),
    SnapshotError, ApplyFailed, OSError; `out` is then as it was, and nothing is left beside it.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100 (resolve() would follow a link that the user means by name)
    _refuse_used(out)
    delta = open_delta(path, watch=watch)
    encoding = encodings.get(delta.head.encoding)
    if encoding is None:
        raise WeightsFileRefused(
            f"{path} is encoded as {delta.head.encoding!r}; known are {sorted(encodings)}: update this program"
        )
    base = open_directory(base_dir)
    _require_base(base_dir, base, delta, watch)
    _require_room(out, delta)
    temporary = out.with_name(f".{out.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    try:
        make_directory_durably(temporary, files=files)
        _write_small_files(delta, base_dir, base, temporary, files)
        _write_weights(delta, encoding, base, temporary, watch)
        _verify(delta, temporary, watch)
        replace_directory_durably(temporary, out, files=files)
    finally:
        with suppress(OSError):
            files.remove_tree(temporary)
    return delta


def _refuse_used(out: Path) -> None:
    if not out.parent.is_dir():
        raise WeightsFileRefused(f"{out} cannot be made: there is no directory {out.parent}; make it first")
    if out.is_symlink() or (out.exists() and not (out.is_dir() and not any(out.iterdir()))):
        raise WeightsFileRefused(f"{out} exists already: choose a name that is free")


def _require_base(base_dir: Path, base: Snapshot, delta: DeltaFile, watch: Watch) -> None:
    found = identity(base, "hashing the base", watch)
    if found == delta.head.base_digest:
        return
    known = "the version that it makes" if found == delta.head.result_digest else "another version"
    raise WeightsFileRefused(
        f"{base_dir} holds {known}, digest {found}; {delta.path} applies to digest {delta.head.base_digest}: name that version's directory"
    )


def _require_room(out: Path, delta: DeltaFile) -> None:
    needed = sum(file.size for file in delta.head.weights) + sum(file.size for file in delta.head.files)
    free = shutil.disk_usage(out.parent).free
    if free < needed:
        raise WeightsFileRefused(
            f"{out} needs {needed} bytes, {free} are free on its disk: make room, or name a place on another disk"
        )


def _write_weights(delta: DeltaFile, encoding: Encoding, base: Snapshot, directory: Path, watch: Watch) -> None:
    """Headers as they were, and each tensor's bytes wherever they belong. Synced with the directory, later."""
    for file in delta.head.weights:
        with (directory / file.name).open("wb") as target:
            os.posix_fallocate(target.fileno(), 0, file.size)  # a full disk shows here, before any work
            target.write(file.prefix)
    plan = shards(delta.layout.tensors)
    total = sum(shard.nbytes for shard in plan)
    decoded = encoding.decode(delta.stream(), plan, base_of(base))
    for shard, data in zip(plan, decoded, strict=True):
        for place, part in _parts(shard, data, delta.layout.places):
            with (directory / place.file).open("r+b") as target:
                target.seek(place.offset)
                target.write(view(part))
        watch("writing", shard.offset + shard.nbytes, total)


def _parts(shard: Shard, data: Bytes, places: Mapping[str, tuple[Place, ...]]) -> Iterator[tuple[Place, Bytes]]:
    """A shard's bytes and where they go."""
    offset = 0
    for one in shard.slices:
        part = data[offset : offset + one.stop - one.start]
        offset += len(part)
        for place in places[one.tensor.name]:
            yield Place(place.file, place.offset + one.start), part


def _write_small_files(delta: DeltaFile, base_dir: Path, base: Snapshot, directory: Path, files: FileLayer) -> None:
    held = small_files(base_dir, base)
    for entry, carried in delta.small_files():
        data = held.get(entry.name, b"") if carried is None else carried
        require_same(entry, data, f"{base_dir} holds")
        files.write_file(directory / entry.name, data)


def _verify(delta: DeltaFile, directory: Path, watch: Watch) -> None:
    """Read back what was written: every file's digest, and the version's."""
    for file in delta.head.weights:
        found = hash_file(directory / file.name)
        if found != file.digest:
            raise ApplyFailed(
                f"{delta.path} gives {file.name} with digest {found}, its head says {file.digest}: make or fetch it again"
            )
    found = identity(open_snapshot(directory), "verifying", watch)
    if found != delta.head.result_digest:
        raise ApplyFailed(
            f"{delta.path} gives a version with digest {found}, its head says {delta.head.result_digest}: make it again"
        )
