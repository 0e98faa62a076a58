"""From pieces to a snapshot directory: decode, verify every bit, and only then let it appear under its name."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

from p2p.adapters.durable import REAL_FILES, FileLayer, make_directory_durably, replace_directory_durably
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.snapshot_dir import WEIGHTS, open_snapshot
from p2p.codec import safetensors
from p2p.codec.encodings import ENCODINGS, Base, Encoding
from p2p.codec.layout import Bytes, gather, shards, view
from p2p.domain.manifest import Edge, Manifest, Piece
from p2p.errors import ApplyFailed, SwarmError

NOTHING_HELD: Mapping[str, Path] = MappingProxyType({})


def assemble(
    manifest: Manifest,
    edge: Edge,
    store: PieceStore,
    directory: Path,
    *,
    held: Mapping[str, Path] = NOTHING_HELD,
    encodings: Mapping[str, Encoding] = ENCODINGS,
    files: FileLayer = REAL_FILES,
) -> None:
    """Make `directory` the snapshot that `manifest` names, from the pieces of `edge`; durable and verified whole on return.

    `held` maps digests of versions to their directories: a delta edge is applied to its base there. An older directory of the
    name is replaced atomically. Raises ApplyFailed (what failed); `directory` is then as it was, and nothing is left beside it.
    """
    temporary = directory.with_name(f".{directory.name}.{secrets.token_hex(8)}.tmp")
    try:
        encoding, base = _plan(manifest, edge, held, encodings)
        make_directory_durably(temporary, files=files)
        _write_weights(manifest, encoding.decode(_stored(store, edge.pieces), shards(manifest.tensors), base), temporary / WEIGHTS)
        for entry in manifest.files:
            files.write_file(temporary / entry.name, b"".join(_stored(store, entry.pieces)))
        _verify(manifest, temporary)
        replace_directory_durably(temporary, directory, files=files)
    except (SwarmError, OSError) as error:
        raise ApplyFailed(f"version {manifest.version} of job {manifest.job_id} is not applied: {error}") from error
    finally:
        _discard(temporary, files)


def _plan(
    manifest: Manifest, edge: Edge, held: Mapping[str, Path], encodings: Mapping[str, Encoding]
) -> tuple[Encoding, Base | None]:
    """How to decode the edge, and on what base."""
    if edge not in manifest.edges:
        raise ApplyFailed("the edge is not one of the manifest's")
    encoding = encodings.get(edge.encoding)
    if encoding is None:
        raise ApplyFailed(f"encoding {edge.encoding!r} is not known here; known are {sorted(encodings)}: choose another edge")
    if edge.base_digest is None:
        return encoding, None
    if edge.base_digest not in held:
        raise ApplyFailed(f"its base, version {edge.base_version} with digest {edge.base_digest}, is not held: choose another edge")
    base = open_snapshot(held[edge.base_digest])
    if base.tensors != manifest.tensors:
        raise ApplyFailed(f"the base at {held[edge.base_digest]} has other tensors than version {manifest.version}")
    return encoding, lambda shard: gather(shard, base.read)


def _stored(store: PieceStore, pieces: tuple[Piece, ...]) -> Iterator[bytes]:
    """The pieces' bytes in order, each verified."""
    for piece in pieces:
        try:
            data = store.read(piece.digest)
        except KeyError:
            raise ApplyFailed(f"piece {piece.digest} is not in the store: fetch the edge first") from None
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
        raise ApplyFailed(f"the result has digest {found}, the manifest names {manifest.digest}: fetch by another edge")


def _discard(temporary: Path, files: FileLayer) -> None:
    try:
        files.remove_tree(temporary)
    except OSError as error:
        raise ApplyFailed(f"{temporary} could not be removed: {error}; remove it by hand") from error
