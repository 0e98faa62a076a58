"""Uploads and names: what a job file may point at, and nothing else.

An upload of digest D lies in `data_dir/uploads/D/`: one file, or the files of a model. A name in a job is `upload:D`, or a path
inside a root that the operator listed; `..`, links that lead out, and everything that is not a plain name are refused.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from blake3 import blake3

from coordinator.domain.model import Upload
from coordinator.service.deps import Deps
from coordinator.service.model_tar import unpack_model
from coordinator.service.operator_errors import Kind, RequestRefused, conflict, invalid, unavailable
from coordinator.service.ports import Tx
from coordinator.wire.rest import FilesQuery, FileView
from p2p.adapters.durable import make_directory_durably, replace_directory_durably

SUFFIXES = {"dataset": (".jsonl", ".parquet"), "code": (".py",), "model": (".tar",)}
_UPLOAD = re.compile(r"upload:([0-9a-f]{64})")
_DISK_RETRY_S = 60.0
_LONGEST_NAME = 1024


@dataclass(frozen=True, slots=True)
class Received:
    """A body on disk, not yet an upload."""

    path: Path
    digest: str
    bytes: int


def uploads_dir(data_dir: Path) -> Path:
    """Where uploads lie, one directory per digest."""
    return data_dir / "uploads"


def resolve_name(name: str, *, field: str, roots: Sequence[Path], uploads: Path, directory: bool) -> Path:
    """The file or directory that a name in a job stands for. Raises RequestRefused, naming `field`."""
    match = _UPLOAD.fullmatch(name)
    if match is not None:
        return _uploaded(uploads / match[1], name, field=field, directory=directory)
    if not name or len(name) > _LONGEST_NAME or not name.isprintable() or name.startswith(("upload:", "~")):
        raise _name_refused(name, field, "it is neither upload:DIGEST nor a path")
    if ".." in PurePosixPath(name).parts:
        raise _name_refused(name, field, "it holds `..`")
    for root in roots:
        path = _inside(root, name)
        if path is not None and (path.is_dir() if directory else path.is_file()):
            return path
    what = "directory" if directory else "file"
    raise _name_refused(name, field, f"no {what} of that name lies inside a listed root")


def _inside(root: Path, name: str) -> Path | None:
    """`name` resolved below `root` with every link followed; None when it is absent or leads out."""
    try:
        base = root.resolve(strict=True)
        path = (base / name).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):
        return None
    return path if path.is_relative_to(base) else None


def _uploaded(place: Path, name: str, *, field: str, directory: bool) -> Path:
    files = sorted(place.iterdir()) if place.is_dir() else []
    if not files:
        raise _name_refused(name, field, "no such upload exists")
    is_model = (place / "config.json").is_file()
    if directory != is_model:
        raise _name_refused(name, field, "that upload is a model" if is_model else "that upload is a single file, not a model")
    return place if directory else files[0]


def _name_refused(name: str, field: str, why: str) -> RequestRefused:
    return invalid(
        "name_not_allowed",
        f"{field} is {name[:200]!r}: {why}",
        field=field,
        fix="upload the file (POST /api/v1/files) and write upload:DIGEST, or name a path inside a root that the operator listed",
    )


def check_upload(query: FilesQuery) -> None:
    """The name's suffix must fit the kind."""
    allowed = SUFFIXES[query.kind]
    if not query.name.endswith(allowed):
        raise invalid(
            "wrong_suffix",
            f"name is {query.name!r}; a {query.kind} ends in {' or '.join(allowed)}",
            field="name",
            fix=f"name the file with {' or '.join(allowed)}",
        )


async def check_space(deps: Deps, more_bytes: int) -> None:
    """Raises RequestRefused when the disk would fall below the operator's minimum."""
    free = await deps.blobs.free_bytes()
    if free - more_bytes < deps.settings.minimum_free_bytes:
        raise unavailable(
            "disk_full",
            f"{free} bytes are free; {more_bytes} more would leave less than the minimum of {deps.settings.minimum_free_bytes}",
            fix="tell the operator to free disk space, then repeat the upload",
            retry_after_s=_DISK_RETRY_S,
        )


def too_large(limit: int) -> RequestRefused:
    """The refusal of a body over the upload limit."""
    return RequestRefused(
        Kind.TOO_LARGE,
        "upload_too_large",
        f"an upload holds at most {limit} bytes",
        field="body",
        fix="split the data set, or put the file into a root that the operator lists",
    )


async def receive(deps: Deps, blocks: AsyncIterator[bytes]) -> Received:
    """Write a body to a temporary file, counting and hashing it. The caller removes the file with `discard`."""
    folder = deps.settings.data_dir / "tmp"
    await asyncio.to_thread(make_directory_durably, folder)
    path = folder / f"upload-{secrets.token_hex(8)}"
    state, size, limit = blake3(), 0, deps.settings.upload_limit_bytes
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as out:
            async for block in blocks:
                size += len(block)
                if size > limit:
                    raise too_large(limit)
                state.update(block)
                await asyncio.to_thread(out.write, block)
    except BaseException:
        discard(path)
        raise
    if size == 0:
        discard(path)
        raise invalid("empty_upload", "the body is empty", field="body", fix="send the file's bytes as the request body")
    return Received(path, state.hexdigest(), size)


def discard(path: Path) -> None:
    """Remove what `receive` left."""
    path.unlink(missing_ok=True)


async def place(deps: Deps, received: Received, query: FilesQuery) -> None:
    """Put the received file into its directory, whole and durable. One that lies there without a row (a crash) is replaced."""
    final = uploads_dir(deps.settings.data_dir) / received.digest
    known = await deps.store.read(lambda reader: reader.get(Upload, received.digest))
    if known is None or not await asyncio.to_thread(final.is_dir):
        await asyncio.to_thread(_place, received.path, final, query, deps.settings.upload_limit_bytes)


def remove_leftovers(data_dir: Path) -> int:
    """Remove what uploads left that a crash cut off; the number removed. Call it while no upload runs."""
    files = list((data_dir / "tmp").glob("upload-*"))
    directories = list(uploads_dir(data_dir).glob(".*.tmp"))
    for path in files:
        path.unlink(missing_ok=True)
    for path in directories:
        shutil.rmtree(path, ignore_errors=True)
    return len(files) + len(directories)


def _place(source: Path, final: Path, query: FilesQuery, limit: int) -> None:
    make_directory_durably(final.parent)
    building = final.with_name(f".{final.name[:16]}.{secrets.token_hex(8)}.tmp")
    building.mkdir(mode=0o700)
    try:
        if query.kind == "model":
            unpack_model(source, building, limit_bytes=limit)
        else:
            source.rename(building / query.name)
        replace_directory_durably(building, final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


async def record(tx: Tx, received: Received, query: FilesQuery, *, owner: str, now: float) -> FileView:
    """The row of a placed upload; the first one to bring the bytes gives name and kind."""
    row = Upload(received.digest, query.name, query.kind, received.bytes, owner, now)
    known = await tx.get(Upload, received.digest)
    if known is None:
        await tx.put(row)
    elif known.kind != query.kind:
        raise conflict(
            "upload_kind_differs",
            f"these bytes were uploaded before as {known.kind} {known.name!r}, not as {query.kind}",
            fix=f"use upload:{known.digest} as {known.kind}",
            field="kind",
        )
    return view(known or row)


def view(row: Upload) -> FileView:
    """What is shown of an upload."""
    return FileView.model_validate(
        {
            "digest": row.digest,
            "reference": f"upload:{row.digest}",
            "name": row.name,
            "kind": row.kind,
            "bytes": row.bytes,
            "owner": row.owner,
            "created_at": row.created_at,
        }
    )
