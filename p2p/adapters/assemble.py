"""From pieces to a snapshot directory: decode, verify every bit, and only then let it appear under its name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from p2p.adapters.durable import REAL_FILES, FileLayer, make_directory_durably, replace_directory_durably
from p2p.adapters.snapshot_dir import WEIGHTS, Snapshot, open_snapshot
from p2p.codec import safetensors
from p2p.codec.encodings import ENCODINGS, Base, Encoding
from p2p.codec.layout import Bytes, Shard, gather, shards, view
from p2p.domain.hops import Hop
from p2p.domain.manifest import Manifest, Piece
from p2p.errors import ApplyFailed, SwarmError


class Pieces(Protocol):
    """Where pieces are read from."""

    def read(self, digest: str) -> bytes:
        """The piece, verified. Raises KeyError if it is absent, PieceCorrupt if it was damaged."""
        ...


NOTHING_HELD: Mapping[str, Path] = MappingProxyType({})


def assemble(
    manifest: Manifest,
    path: Sequence[Hop],
    store: Pieces,
    directory: Path,
    *,
    held: Mapping[str, Path] = NOTHING_HELD,
    encodings: Mapping[str, Encoding] = ENCODINGS,
    files: FileLayer = REAL_FILES,
) -> None:
    """Make `directory` the snapshot that `manifest` names, from the pieces of the path's edges; durable and verified whole on return.

    `held` maps digests of versions to their directories: the first hop's base is one of them, unless it is a keyframe. All hops are
    applied shard by shard, in the order of the edges' pieces, so that no version in between is ever on disk. An empty path copies the held version with the
    same bits. An older directory of the name is replaced atomically.
    Raises ApplyFailed (what failed); `directory` is then as it was, and nothing is left beside it.
    """
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}.tmp")
    try:
        _check_path(manifest, path, held, encodings)
        make_directory_durably(temporary, files=files)
        _write_weights(manifest, _decoded(manifest, path, store, held, encodings), temporary / WEIGHTS)
        for entry in manifest.files:
            files.write_file(temporary / entry.name, b"".join(_stored(store, entry.pieces)))
        _verify(manifest, temporary)
        replace_directory_durably(temporary, directory, files=files)
    except (SwarmError, OSError) as error:
        raise ApplyFailed(f"version {manifest.version} of job {manifest.job_id} is not applied: {error}") from error
    finally:
        _discard(temporary, files)


def _check_path(manifest: Manifest, path: Sequence[Hop], held: Mapping[str, Path], encodings: Mapping[str, Encoding]) -> None:
    """Whether the path leads, hop by hop, from something held or from nothing to the manifest's version."""
    if not path and manifest.digest not in held:
        raise ApplyFailed("the path is empty, and no held version has these bits: choose another path")
    if path and path[-1].digest != manifest.digest:
        raise ApplyFailed("the path does not end at the manifest's version: choose another path")
    before: str | None = None
    for number, hop in enumerate(path):
        hop.check_fits(manifest)
        edge = hop.edge
        if edge.encoding not in encodings:
            raise ApplyFailed(f"encoding {edge.encoding!r} is not known here; known are {sorted(encodings)}: choose another path")
        if number == 0 and edge.base_digest is not None and edge.base_digest not in held:
            raise ApplyFailed(
                f"its base, version {edge.base_version} with digest {edge.base_digest}, is not held: choose another path"
            )
        if number > 0 and edge.base_digest != before:
            raise ApplyFailed(f"hop {number} starts at {edge.base_digest}, the one before it ends at {before}: choose another path")
        before = hop.digest


def _decoded(
    manifest: Manifest, path: Sequence[Hop], store: Pieces, held: Mapping[str, Path], encodings: Mapping[str, Encoding]
) -> Iterator[Bytes]:
    """The version's shards in layout order: each hop decodes on what the one before it yields."""
    plan = shards(manifest.tensors)
    base: Base | None = None
    start = path[0].edge.base_digest if path else manifest.digest
    if start is not None:
        directory = held[start]
        snapshot = open_snapshot(directory)
        if snapshot.tensors != manifest.tensors:
            raise ApplyFailed(f"the base at {directory} has other tensors than version {manifest.version}")
        base = _reader(snapshot)
    if base is not None and not path:  # another version with the very same bits
        yield from (base(shard) for shard in plan)
        return
    for hop in path[:-1]:
        base = _Lockstep(_hop_shards(hop, plan, store, encodings, base), plan).read
    yield from _hop_shards(path[-1], plan, store, encodings, base)


def _hop_shards(
    hop: Hop, plan: Sequence[Shard], store: Pieces, encodings: Mapping[str, Encoding], base: Base | None
) -> Iterator[Bytes]:
    """What one hop yields; its failures say which hop it was."""
    try:
        yield from encodings[hop.edge.encoding].decode(_stored(store, hop.edge.pieces), plan, base)
    except ApplyFailed as error:
        raise ApplyFailed(f"hop to version {hop.version} from {hop.edge.base_version}: {error}") from error


class _Lockstep:
    """The shards of a hop as the base of the next one, which may not look at all of them."""

    def __init__(self, decoded: Iterator[Bytes], plan: Sequence[Shard]) -> None:
        self._decoded = zip(plan, decoded, strict=True)

    def read(self, wanted: Shard) -> Bytes:
        """The shard; asked in the order of the plan."""
        for shard, data in self._decoded:
            if shard is wanted:
                return data
        raise ApplyFailed(f"the shard at byte {wanted.offset} was asked for out of order")


def _reader(snapshot: Snapshot) -> Base:
    return lambda shard: gather(shard, snapshot.read)


def _stored(store: Pieces, pieces: tuple[Piece, ...]) -> Iterator[bytes]:
    """The pieces' bytes in order, each verified."""
    for piece in pieces:
        try:
            data = store.read(piece.digest)
        except KeyError:
            raise ApplyFailed(f"piece {piece.digest} is not in the store: fetch the path first") from None
        if len(data) != piece.size:
            raise ApplyFailed(f"piece {piece.digest} holds {len(data)} bytes, the manifest says {piece.size}")
        yield data


def _write_weights(manifest: Manifest, decoded: Iterator[Bytes], path: Path) -> None:
    """Stream the decoded shards, which come in layout order, behind a fresh header. Synced with its directory, later."""
    with path.open("wb") as out:
        out.write(safetensors.build_header(manifest.tensors, {**manifest.aliases, "format": "pt"}))
        for data in decoded:
            out.write(view(data))


def _verify(manifest: Manifest, directory: Path) -> None:
    """Read back what was written: its digest must be the one in the manifest."""
    found = open_snapshot(directory).digest()
    if found != manifest.digest:
        raise ApplyFailed(f"the result has digest {found}, the manifest names {manifest.digest}: fetch by another path")


def _discard(temporary: Path, files: FileLayer) -> None:
    try:
        files.remove_tree(temporary)
    except OSError as error:
        raise ApplyFailed(f"{temporary} could not be removed: {error}; remove it by hand") from error
