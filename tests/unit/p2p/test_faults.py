"""Faults of other systems that the weights' way rules out; the numbers are those of docs/faults.md."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.hops import hops_of
from p2p.errors import ApplyFailed


def trained(made: ModuleType, steps: int) -> tuple[str, tuple[int, ...], bytes]:
    """A tensor of which every step moves some elements by one place, as an optimiser does."""
    dtype, shape, data = made.weights((64, 64))
    bits = np.frombuffer(data, "<u2").copy()
    for step in range(steps):
        bits[step :: 50 + step] += 1
    return dtype, shape, bits.tobytes()


def test_fault_07_a_delta_on_a_wrong_base_is_no_version(made: ModuleType, tmp_path: Path) -> None:
    """The receiver missed version 1. The sender's base moved on, the receiver's did not: nothing is applied, the version that it
    holds stays as it is and serves as base for the way over version 1.
    """
    encoder, store = Encoder(tmp_path / "store"), PieceStore(tmp_path / "store")
    folders = [made.write_model(tmp_path / f"v{number}", {"w": trained(made, number)}) for number in range(3)]
    digests = [digest_of(folder) for folder in folders]
    bases = [None, *(Base(number, digests[number], folders[number]) for number in range(2))]
    manifests = [
        encoder.publish(folder, job_id="job", version=number, canary_ids=(), base=base)
        for number, (folder, base) in enumerate(zip(folders, bases, strict=True))
    ]
    hops = [hops_of(manifest) for manifest in manifests]
    assert [[hop.edge.encoding for hop in each] for each in hops[1:]] == [["delta"], ["delta"]]
    current = tmp_path / "worker" / "current"
    assemble(manifests[0], hops[0][:1], store, current)
    with pytest.raises(ApplyFailed, match="is not held"):
        assemble(manifests[2], hops[2], store, current, held={digests[0]: current})
    with pytest.raises(ApplyFailed):  # it believes to hold version 1
        assemble(manifests[2], hops[2], store, current, held={digests[1]: current})
    assert digest_of(current) == digests[0]
    assemble(manifests[2], [*hops[1], *hops[2]], store, current, held={digests[0]: current})
    assert digest_of(current) == digests[2]
