"""Publishing: a Hugging Face directory becomes pieces in a store and an unsigned manifest that names them.

Runs in a process of its own beside the learner (`python -m p2p.adapters.publish`), so that training goes on meanwhile.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from p2p.adapters.piece_store import PieceStore
from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.codec import pieces
from p2p.codec.encodings import ENCODINGS
from p2p.codec.layout import gather, shards
from p2p.domain.manifest import KEYFRAMES, Edge, FileEntry, Manifest, Piece
from p2p.errors import SwarmError


def publish(directory: Path, store_dir: Path, *, job_id: str, version: int, canary_ids: Sequence[int]) -> Manifest:
    """Encode the snapshot in `directory` in every keyframe encoding; its pieces are durable in `store_dir` on return.

    Memory is bounded by a few shards. Raises SnapshotError for a directory that is none, ManifestError for a job id, version or
    canary that a manifest cannot carry, OSError. What a failure leaves in the store are valid pieces that no manifest names.
    """
    snapshot = open_snapshot(directory)
    store = PieceStore(store_dir)
    manifest = Manifest(
        job_id=job_id,
        version=version,
        digest=snapshot.digest(),
        tensors=snapshot.tensors,
        aliases=snapshot.aliases,
        files=tuple(FileEntry(name, _keep(store, pieces.cut_file(data))) for name, data in snapshot.files.items()),
        canary_ids=tuple(canary_ids),
        edges=tuple(_keyframe(snapshot, store, encoding) for encoding in KEYFRAMES),
    )
    return Manifest.from_json(manifest.to_json())


def _keyframe(snapshot: Snapshot, store: PieceStore, encoding: str) -> Edge:
    stream = ((shard, gather(shard, snapshot.read)) for shard in shards(snapshot.tensors))
    return Edge(encoding, None, None, _keep(store, pieces.cut(ENCODINGS[encoding].encode(stream, None))))


def _keep(store: PieceStore, parts: Iterable[bytes]) -> tuple[Piece, ...]:
    named = []
    for data in parts:
        piece = pieces.name(data)
        store.put(piece, data)
        named.append(piece)
    return tuple(named)


def main(arguments: Sequence[str] | None = None) -> int:
    """Publish as the command line says; the manifest goes to standard output. 1, with one line on standard error, on failure."""
    parser = argparse.ArgumentParser(prog="python -m p2p.adapters.publish", description="Turn a model directory into pieces.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--version", type=int, required=True)
    parser.add_argument("--canary-ids", default="", help="token ids with commas between")
    options = parser.parse_args(arguments)
    try:
        canary = [int(token) for token in options.canary_ids.split(",") if token]
        manifest = publish(options.directory, options.store, job_id=options.job_id, version=options.version, canary_ids=canary)
    except (SwarmError, OSError, ValueError) as error:
        print(f"cannot publish {options.directory}: {error}", file=sys.stderr)
        return 1
    print(manifest.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
