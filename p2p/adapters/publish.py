"""Publishing: a Hugging Face directory becomes pieces in a store, an unsigned manifest that names them, and more edges later.

Runs in a process of its own beside the learner (`coordinator.adapters.encode_child`, or `python -m p2p.adapters.publish`), so that
training goes on meanwhile. Pieces are told batch by batch while later shards are still being encoded.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from p2p.adapters.adapter_dir import open_adapter
from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.snapshot_dir import Snapshot, open_snapshot
from p2p.adapters.threads import encode_lowrank_threads, encode_threads
from p2p.codec import pieces
from p2p.codec.delta import Delta
from p2p.codec.encodings import ENCODINGS, Encoding
from p2p.codec.layout import Base as BaseBits
from p2p.codec.layout import Bytes, Chunk, Shard, gather, shards, view
from p2p.domain.batches import text_hash
from p2p.domain.batching import batches
from p2p.domain.hops import Hop
from p2p.domain.lineage import DELTA, LOWRANK
from p2p.domain.manifest import KEYFRAMES, Edge, FileEntry, Manifest, Piece
from p2p.errors import ApplyFailed, SnapshotError, SwarmError

log = logging.getLogger(__name__)
LEAST_PIECE, MOST_PIECE = 64 << 10, 1 << 20
PIECES_AN_EDGE = 400
THREADS = min(8, max(1, (os.cpu_count() or 1) // 2))

OnBatch = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Base:
    """A version to encode against, whole in `directory`. `expected_bytes` is what the edge may take; 0: not known.

    `link_bytes_per_s`: how fast a delta spreads; a slow link is worth the work of a smaller one. `encoding`: delta, or lowrank, for which the
    adapters lie beside the new version. `instead`: what to encode against where that does not lead to the new version.
    `path`, where the directory is gone: a keyframe and the edges after it whose pieces are in the store.
    """

    version: int
    digest: str
    directory: Path
    expected_bytes: int = 0
    link_bytes_per_s: float = 12.5e6
    encoding: str = DELTA
    instead: Base | None = None
    path: tuple[Hop, ...] = ()


class Encoder:
    """Encodes snapshots into one store. Remembers which directories it has hashed, so that a base is not hashed at each use."""

    def __init__(self, store_dir: Path, *, encodings: Mapping[str, Encoding] = ENCODINGS) -> None:
        self._store = PieceStore(store_dir)
        self._encodings = encodings
        self._hashed: dict[Path, str] = {}

    def publish(
        self,
        directory: Path,
        *,
        job_id: str,
        version: int,
        canary_ids: Sequence[int],
        base: Base | None = None,
        on_batch: OnBatch = lambda _: None,
    ) -> Manifest:
        """Encode the snapshot against `base`, or as keyframes if there is none that fits; its pieces are durable on return.

        Memory is bounded by a few shards. Raises SnapshotError for a directory that is none, ManifestError for a job id, version or
        canary that a manifest cannot carry, OSError. What a failure leaves in the store are valid pieces that no manifest names.
        """
        snapshot = open_snapshot(directory)
        target = _Target(job_id, version, directory, snapshot)
        edges = self._deltas(target, [] if base is None else [base], on_batch) or self._keyframes(target, on_batch)
        manifest = Manifest(
            job_id=job_id,
            version=version,
            digest=self._digest(directory, snapshot),
            tensors=snapshot.tensors,
            aliases=snapshot.aliases,
            files=tuple(FileEntry(name, self._keep(pieces.cut_file(data))) for name, data in snapshot.files.items()),
            canary_ids=tuple(canary_ids),
            edges=edges,
        )
        return Manifest.from_json(manifest.to_json())

    def add_edges(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        bases: Sequence[Base] = (),
        keyframe: bool = False,
        on_batch: OnBatch = lambda _: None,
    ) -> tuple[Hop, ...]:
        """More edges to a published version: deltas against `bases` (those that fit), and keyframes. Raises SwarmError, OSError.

        A base that has a path is made again beside `directory`, shard by shard, for as long as it is needed.
        """
        snapshot = open_snapshot(directory)
        if self._digest(directory, snapshot) != manifest.digest:
            raise SnapshotError(f"{directory} does not hold version {manifest.version} ({manifest.digest[:12]}) any more")
        target = _Target(manifest.job_id, manifest.version, directory, snapshot)
        with ExitStack() as made:
            found = [self._made_again(base, manifest, directory, made) if base.path else base for base in bases]
            edges = self._deltas(target, [base for base in found if base is not None], on_batch)
        edges += self._keyframes(target, on_batch) if keyframe else ()
        layout = manifest.layout
        return tuple(Hop(manifest.job_id, manifest.version, manifest.digest, layout, edge) for edge in edges)

    def _keyframes(self, target: _Target, on_batch: OnBatch) -> tuple[Edge, ...]:
        size = sum(tensor.nbytes for tensor in target.snapshot.tensors)
        return tuple(self._edge(target, encoding, None, size, None, on_batch) for encoding in KEYFRAMES)

    def _deltas(self, target: _Target, bases: Sequence[Base], on_batch: OnBatch) -> tuple[Edge, ...]:
        """Edges against the bases, or what stands in for them, whose bits are what they should be and that have the same tensors."""
        return tuple(edge for base in bases for edge in self._against(target, base, on_batch))

    def _against(self, target: _Target, base: Base, on_batch: OnBatch) -> tuple[Edge, ...]:
        """One edge, or none."""
        found = self._open_base(base)
        if found is not None and (found.tensors, found.aliases) == (target.snapshot.tensors, target.snapshot.aliases):
            try:
                return (self._edge(target, base.encoding, base, base.expected_bytes, found, on_batch),)
            except (SnapshotError, ApplyFailed) as error:
                if base.encoding != LOWRANK:
                    raise
                log.warning("version %d gets no low-rank edge: %s", target.version, error)
        return () if base.instead is None else self._against(target, base.instead, on_batch)

    def _made_again(self, base: Base, manifest: Manifest, beside: Path, made: ExitStack) -> Base | None:
        """The base in a directory that goes with `made`, from its path's pieces; None when they do not lead there any more.

        Small files are taken to be those of `manifest`: the digest tells whether they are.
        """
        place = beside.with_name(f".{base.digest[:16]}.base")
        made.callback(shutil.rmtree, place, ignore_errors=True)
        try:
            assemble(replace(manifest, version=base.version, digest=base.digest), base.path, self._store, place)
        except ApplyFailed as error:
            log.warning("version %d cannot be made again from its edges: %s", base.version, error)
            return None
        self._hashed[place] = base.digest
        return replace(base, directory=place)

    def _open_base(self, base: Base) -> Snapshot | None:
        """None when the directory is gone or holds other bits: an edge against them would lead nowhere."""
        if DELTA not in self._encodings:
            return None
        try:
            found = open_snapshot(base.directory)
        except (SnapshotError, OSError):
            return None
        return found if self._digest(base.directory, found) == base.digest else None

    def _digest(self, directory: Path, snapshot: Snapshot) -> str:
        if directory not in self._hashed:
            self._hashed = {known: digest for known, digest in self._hashed.items() if known.is_dir()}
            self._hashed[directory] = snapshot.digest()
        return self._hashed[directory]

    def _edge(
        self, target: _Target, encoding: str, base: Base | None, expected: int, found: Snapshot | None, on_batch: OnBatch
    ) -> Edge:
        stream = ((shard, gather(shard, target.snapshot.read)) for shard in shards(target.snapshot.tensors))
        read = None if found is None else _reader(found)
        chunks = self._chunks(target, encoding, stream, base, read)
        base_version, base_digest = (None, None) if base is None else (base.version, base.digest)
        made = (self._keep([data])[0] for data in cut(chunks, piece_bytes(expected)))
        row: list[Piece] = []
        transfer = ""
        for batch in batches(target.job_id, target.version, encoding, base_digest, made):
            text = batch.to_json()
            transfer = transfer or text_hash(text)
            row += batch.pieces
            on_batch(text)
        return Edge(encoding, base_version, base_digest, tuple(row), transfer)

    def _chunks(
        self, target: _Target, encoding: str, stream: Iterator[tuple[Shard, Bytes]], base: Base | None, read: BaseBits | None
    ) -> Iterator[Chunk]:
        """The edge's bytes. The learner trains meanwhile: half of the cores are left to it."""
        if base is None or read is None or self._encodings is not ENCODINGS:
            return self._encodings[encoding].encode(stream, read)
        if encoding == LOWRANK:
            return encode_lowrank_threads(stream, read, edge=open_adapter(target.directory), threads=THREADS)
        effort = Delta("auto", link_bytes_per_s=base.link_bytes_per_s, cores=THREADS)
        return encode_threads(stream, read, effort=effort, threads=THREADS)

    def _keep(self, parts: Iterable[bytes]) -> tuple[Piece, ...]:
        named = []
        for data in parts:
            piece = pieces.name(data)
            self._store.put(piece, data)
            named.append(piece)
        return tuple(named)


@dataclass(frozen=True, slots=True)
class _Target:
    """The version being encoded."""

    job_id: str
    version: int
    directory: Path
    snapshot: Snapshot


def piece_bytes(expected: int) -> int:
    """Size of the pieces of an edge that takes about so many bytes: a few hundred pieces, so that relays are filled soon."""
    return max(LEAST_PIECE, min(MOST_PIECE, expected // PIECES_AN_EDGE))


def cut(stream: Iterable[Chunk], size: int) -> Iterator[bytes]:
    """The stream in pieces of `size` bytes, each as soon as it is full; the last one may be shorter."""
    buffer = bytearray()
    for chunk in stream:
        buffer += view(chunk)
        whole = len(buffer) - len(buffer) % size
        for start in range(0, whole, size):
            yield bytes(memoryview(buffer)[start : start + size])
        del buffer[:whole]
    if buffer:
        yield bytes(buffer)


def _reader(snapshot: Snapshot) -> Callable[[Shard], Bytes]:
    return lambda shard: gather(shard, snapshot.read)


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
        encoder = Encoder(options.store)
        manifest = encoder.publish(options.directory, job_id=options.job_id, version=options.version, canary_ids=canary)
    except (SwarmError, OSError, ValueError) as error:
        print(f"cannot publish {options.directory}: {error}", file=sys.stderr)
        return 1
    print(manifest.to_json())
    return 0


if __name__ == "__main__":
    sys.exit(main())
