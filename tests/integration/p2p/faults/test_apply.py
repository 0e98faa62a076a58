"""Applying a version: killed in the middle, or from a base that the disk has damaged. The older version stays, and the reason is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.hops import Hop, hops_of
from p2p.domain.manifest import Manifest
from p2p.errors import ApplyFailed
from tests.factories_p2p import by, publish, weights, write_model

ROWS = 6_000  # of 1024 bf16 elements: 12 MB, which take a while to write

CHILD = """
import sys
from pathlib import Path
from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.domain.hops import hops_of
from p2p.domain.manifest import Manifest
manifest = Manifest.from_json(Path(sys.argv[1]).read_text())
hop = next(hop for hop in hops_of(manifest) if hop.edge.encoding == "raw")
assemble(manifest, [hop], PieceStore(Path(sys.argv[2])), Path(sys.argv[3]))
"""


class Versions:
    """Two versions of a model, published; the first one also as the directory `out`."""

    def __init__(self, root: Path, rows: int) -> None:
        self.root = root
        spec = weights((rows, 1024))
        data = np.frombuffer(spec[2], "<u2").copy()
        write_model(root / "0", {"w": spec})
        data[::1000] += 1
        write_model(root / "1", {"w": ("BF16", (rows, 1024), data.tobytes())})
        self.store = PieceStore(root / "pieces", files=UNSYNCED_FILES)
        encoder = Encoder(root / "pieces")
        self.first = encoder.publish(root / "0", job_id="job", version=0, canary_ids=())
        self.second = encoder.publish(
            root / "1", job_id="job", version=1, canary_ids=(), base=Base(0, self.first.digest, root / "0")
        )
        self.keyframes = encoder.add_edges(root / "1", self.second, keyframe=True)
        self.out = root / "versions" / "out"
        assemble(self.first, raw(self.first), self.store, self.out, files=UNSYNCED_FILES)


def raw(manifest: Manifest) -> list[Hop]:
    """The path of the plain keyframe."""
    return by(manifest, next(edge for edge in manifest.edges if edge.encoding == "raw"))


def test_killed_while_it_writes(tmp_path: Path) -> None:
    """SIGKILL when the new directory is half there: it has no name yet, and the next try is as if nothing had been."""
    store, target = PieceStore(tmp_path / "pieces"), tmp_path / "versions" / "out"
    manifest = publish(
        write_model(tmp_path / "0", {"w": weights((ROWS, 1024))}), store.root, job_id="job", version=0, canary_ids=()
    )
    (tmp_path / "manifest.json").write_text(manifest.to_json())
    command = [sys.executable, "-c", CHILD, str(tmp_path / "manifest.json"), str(store.root), str(target)]
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def written() -> int:
        return max((path.stat().st_size for path in target.parent.glob(".out.*.tmp/model.safetensors")), default=0)

    end = time.monotonic() + 60
    while written() < manifest.nbytes // 4 and child.poll() is None and time.monotonic() < end:
        time.sleep(0.0005)
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL, "it was over before it could be killed"
    assert not target.exists()
    assert list(target.parent.glob(".out.*.tmp")), "nothing was under way"
    assemble(manifest, raw(manifest), store, target, files=UNSYNCED_FILES)
    assert digest_of(target) == manifest.digest


@pytest.mark.parametrize("damage", ["bit", "cut", "gone", "other tensors"])
def test_a_damaged_base_is_noticed_and_another_path_leads_there(tmp_path: Path, damage: str) -> None:
    made = Versions(tmp_path, 100)
    base = made.root / "0"
    file = base / "model.safetensors"
    data = bytearray(file.read_bytes())
    match damage:
        case "bit":
            data[-7] ^= 1
            file.write_bytes(data)
        case "cut":
            file.write_bytes(data[:-100])
        case "gone":
            file.unlink()
        case _:
            write_model(base, {"v": weights((100, 1024))})
    held = {made.first.digest: base}
    (delta,) = hops_of(made.second)
    assert delta.edge.base_digest == made.first.digest
    with pytest.raises(ApplyFailed, match=r"^version 1 of job job is not applied: [^\n]{10,400}$") as refused:
        assemble(made.second, [delta], made.store, made.out, held=held)
    if damage == "bit":
        assert f"the manifest names {made.second.digest}" in str(refused.value)
    assert digest_of(made.out) == made.first.digest
    keyframe = next(hop for hop in made.keyframes if hop.edge.encoding == "planes")
    assemble(made.second, [keyframe], made.store, made.out, held=held)
    assert digest_of(made.out) == made.second.digest
    assert [path.name for path in made.out.parent.iterdir()] == ["out"]
