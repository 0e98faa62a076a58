"""What the tests of p2p are made with: model directories with any bits, manifests, sources. Loaded by the conftests."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Encoder
from p2p.domain.dtypes import whole_bytes
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Edge, Manifest, Piece
from p2p.errors import PieceAbsent

Spec = tuple[str, tuple[int, ...], bytes]  # dtype, shape, little-endian bytes


def bits(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Spec:
    """A tensor of random bits."""
    nbytes = whole_bytes(dtype, shape)
    assert nbytes is not None
    return dtype, shape, np.random.default_rng(seed).bytes(nbytes)


def weights(shape: tuple[int, ...], seed: int = 0) -> Spec:
    """A bf16 tensor with values as a model has them: normal with deviation 0.02."""
    values = np.random.default_rng(seed).normal(0, 0.02, shape).astype("<f4")
    return "BF16", shape, (values.view("<u4") >> 16).astype("<u2").tobytes()


def safetensors_bytes(tensors: Mapping[str, Spec], metadata: Mapping[str, str] | None = None) -> bytes:
    """A file as the format's description says, in the order given."""
    header: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values())


def write_model(
    directory: Path,
    tensors: Mapping[str, Spec],
    *,
    metadata: Mapping[str, str] | None = None,
    files: Mapping[str, bytes] | None = None,
) -> Path:
    """A Hugging Face directory with one safetensors file."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").write_bytes(safetensors_bytes(tensors, metadata or {"format": "pt"}))
    for name, data in (files if files is not None else {"config.json": b'{"model_type": "llama"}'}).items():
        (directory / name).write_bytes(data)
    return directory


def write_sharded(directory: Path, files: Sequence[Mapping[str, Spec]]) -> Path:
    """A Hugging Face directory with an index and several safetensors files."""
    directory.mkdir(parents=True, exist_ok=True)
    index = {}
    for number, tensors in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        (directory / name).write_bytes(safetensors_bytes(tensors))
        index.update(dict.fromkeys(tensors, name))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (directory / "config.json").write_bytes(b"{}")
    return directory


def publish(directory: Path, store: Path, *, job_id: str, version: int, canary_ids: Sequence[int]) -> Manifest:
    """Keyframes of a directory, as a job's first version is published."""
    return Encoder(store).publish(directory, job_id=job_id, version=version, canary_ids=canary_ids)


def by(manifest: Manifest, edge: Edge) -> list[Hop]:
    """The path of one hop that takes an edge of the manifest."""
    return [hop for hop in hops_of(manifest) if hop.edge is edge]


class StoreSource:
    """The simplest source: reads a store in this process, as the coordinator's own route does. `bad` digests come damaged."""

    def __init__(self, name: str, store: PieceStore, bad: Sequence[str] = ()) -> None:
        self.name = name
        self.store = store
        self.bad = set(bad)
        self.asked: list[str] = []

    async def read(self, piece: Piece) -> bytes:
        self.asked.append(piece.digest)
        try:
            data = self.store.read(piece.digest)
        except KeyError:
            raise PieceAbsent(f"{self.name} does not hold {piece.digest}") from None
        return bytes([data[0] ^ 1]) + data[1:] if piece.digest in self.bad else data
