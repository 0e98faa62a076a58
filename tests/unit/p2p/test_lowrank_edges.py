"""Low-rank edges through publisher and receiver: from the first version to any other, for the bytes of the adapters."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from p2p.adapters.adapter_dir import open_adapter
from p2p.adapters.assemble import assemble
from p2p.adapters.piece_store import PieceStore
from p2p.adapters.publish import Base, Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.codec import peft_files
from p2p.codec.lowrank import Factors
from p2p.domain.hops import Hop, hops_of
from p2p.domain.lineage import DELTA, LOWRANK
from p2p.domain.manifest import Manifest
from p2p.errors import ApplyFailed, SnapshotError
from tests.factories_lowrank import defined, drawn, matrix, write_adapter
from tests.factories_p2p import Spec, safetensors_bytes, weights, write_model

Q, K, OTHER = matrix("model.q.weight", 64, 96), matrix("model.k.weight", 32, 96), matrix("model.embed.weight", 100, 96)
RANK, ALPHA = 4, 6


def factors_at(version: int) -> dict[str, Factors]:
    return {one.name: drawn(one, RANK, 10 * version + seed, size=0.1) for seed, one in enumerate((Q, K))}


class Job:
    """Version 0, and others that adapters make of it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.encoder = Encoder(root / "pieces")
        self.base = {
            one.name: np.frombuffer(weights(one.shape, seed)[2], "<u2").reshape(one.shape) for seed, one in enumerate((Q, K, OTHER))
        }
        self.first = self.encoder.publish(self.write(0), job_id="job", version=0, canary_ids=(1,))

    def write(self, version: int) -> Path:
        words = dict(self.base)
        if version:
            words |= {name: defined(self.base[name], each, ALPHA / RANK) for name, each in factors_at(version).items()}
        tensors: dict[str, Spec] = {name: ("BF16", each.shape, each.tobytes()) for name, each in words.items()}
        directory = write_model(self.root / f"v{version}", tensors)
        if version:
            write_adapter(directory, factors_at(version), rank=RANK, alpha=ALPHA)
        return directory

    def lowrank(self, *, instead: Base | None = None) -> Base:
        return Base(0, self.first.digest, self.root / "v0", encoding=LOWRANK, instead=instead)

    def publish(self, version: int, base: Base) -> Manifest:
        return self.encoder.publish(self.root / f"v{version}", job_id="job", version=version, canary_ids=(1,), base=base)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def test_a_version_comes_from_the_first_one_and_its_adapters(job: Job, tmp_path: Path) -> None:
    """Announced by its low-rank edge: the factors' bytes, less what their exponents compress to, and nine a record."""
    job.write(7)
    manifest = job.publish(7, job.lowrank())
    (edge,) = manifest.edges
    assert (edge.encoding, edge.base_version, edge.base_digest) == (LOWRANK, 0, job.first.digest)
    assert edge.size <= 8 + 2 * RANK * (64 + 96 + 32 + 96) + 5 * 9
    assemble(
        manifest, hops_of(manifest), PieceStore(tmp_path / "pieces"), tmp_path / "out", held={job.first.digest: tmp_path / "v0"}
    )
    assert digest_of(tmp_path / "out") == manifest.digest == digest_of(tmp_path / "v7")


def test_who_holds_nothing_comes_by_keyframe_and_adapters(job: Job, tmp_path: Path) -> None:
    """Two hops, shard by shard; a delta may follow a low-rank edge, too."""
    job.write(3)
    job.write(4)
    three = job.publish(3, job.lowrank())
    four = job.publish(4, Base(3, three.digest, tmp_path / "v3"))
    route = [hops_of(job.first)[1], *hops_of(three), *hops_of(four)]
    assert [hop.edge.encoding for hop in route] == ["planes", LOWRANK, DELTA]
    assemble(four, route, PieceStore(tmp_path / "pieces"), tmp_path / "out")
    assert digest_of(tmp_path / "out") == four.digest


def test_both_edges_of_a_version_are_told_apart(job: Job, tmp_path: Path) -> None:
    """Version 1 has a delta and a low-rank edge from the same version: other ids, other transfers, the same bits."""
    job.write(1)
    manifest = job.publish(1, Base(0, job.first.digest, tmp_path / "v0"))
    (hop,) = job.encoder.add_edges(tmp_path / "v1", manifest, bases=[job.lowrank()])
    (single,) = hops_of(manifest)
    assert (hop.way.id, hop.edge.transfer) != (single.way.id, single.edge.transfer)
    assert Hop.from_json(hop.to_json()) == hop
    assemble(manifest, [hop], PieceStore(tmp_path / "pieces"), tmp_path / "out", held={job.first.digest: tmp_path / "v0"})
    assert digest_of(tmp_path / "out") == manifest.digest


def test_adapters_that_do_not_make_the_version_give_no_edge(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What stands in for it is made instead; alone, nothing is."""
    directory = job.write(2)
    config = directory / peft_files.FOLDER / peft_files.CONFIG
    config.write_bytes(config.read_bytes().replace(b'"lora_alpha": 6', b'"lora_alpha": 7'))
    manifest = job.publish(2, job.lowrank(instead=Base(0, job.first.digest, tmp_path / "v0")))
    assert [edge.encoding for edge in manifest.edges] == [DELTA]
    assert job.encoder.add_edges(directory, manifest, bases=[job.lowrank()]) == ()
    assert "version 2 gets no low-rank edge: the factors do not make the shard at byte 0" in caplog.text


def test_a_version_without_adapters_gives_none(job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "v5", {name: ("BF16", each.shape, each.tobytes()) for name, each in job.base.items()}, files={})
    manifest = job.publish(5, job.lowrank())
    assert [edge.encoding for edge in manifest.edges] == ["raw", "planes"]
    assert "made without adapters" in caplog.text


def test_a_wrong_base_is_found_out(job: Job, tmp_path: Path) -> None:
    """Another version held than the edge names: refused before a byte is read; bits that changed on disk: by the digest."""
    job.write(1)
    manifest = job.publish(1, job.lowrank())
    store, route = PieceStore(tmp_path / "pieces"), hops_of(manifest)
    with pytest.raises(ApplyFailed, match="is not held"):
        assemble(manifest, route, store, tmp_path / "out", held={manifest.digest: tmp_path / "v1"})
    weights_file = tmp_path / "v0" / "model.safetensors"
    weights_file.write_bytes(weights_file.read_bytes()[:-1] + b"\x55")
    with pytest.raises(ApplyFailed, match="fetch by another path"):
        assemble(manifest, route, store, tmp_path / "out", held={job.first.digest: tmp_path / "v0"})
    assert not (tmp_path / "out").exists()


# --- the adapter folder


def test_the_folder_says_what_peft_says(job: Job) -> None:
    found = open_adapter(job.write(9))
    assert found.scale == ALPHA / RANK
    assert found.factors.keys() == {Q.name, K.name}
    assert all(np.array_equal(found.factors[name].up, each.up) for name, each in factors_at(9).items())
    assert all(np.array_equal(found.factors[name].down, each.down) for name, each in factors_at(9).items())


def _weights(tensors: dict[str, Spec]) -> Callable[[Path], object]:
    return lambda folder: (folder / peft_files.WEIGHTS).write_bytes(safetensors_bytes(tensors))


def _config(**changed: object) -> Callable[[Path], object]:
    def write(folder: Path) -> object:
        fields = json.loads((folder / peft_files.CONFIG).read_bytes())
        return (folder / peft_files.CONFIG).write_text(json.dumps({**fields, **changed}))

    return write


HALF = ("BF16", (4, 96), bytes(768))
DOWN, UP = peft_files.tensor_name("model.q", "down"), peft_files.tensor_name("model.q", "up")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda folder: (folder / peft_files.CONFIG).unlink(), "holds not both"),
        (lambda folder: (folder / peft_files.WEIGHTS).unlink(), "holds not both"),
        (lambda folder: (folder / peft_files.CONFIG).write_bytes(b" " * (1 << 20) + b"{}"), "at most 1048576 are read"),
        (lambda folder: (folder / peft_files.CONFIG).write_bytes(b"["), "does not say lora_alpha and r"),
        (_config(r=0), "does not say lora_alpha and r"),
        (_config(r="x"), "does not say lora_alpha and r"),
        (_config(lora_alpha=None), "does not say lora_alpha and r"),
        (lambda folder: (folder / peft_files.WEIGHTS).write_bytes(b"short"), "8 bytes of length"),
        (_weights({DOWN: HALF}), "half of an adapter, or none: model.q"),
        (_weights({}), "there is no tensor"),
        (_weights({DOWN: HALF, UP: ("F32", (64, 4), bytes(1024))}), "is F32"),
        (_weights({DOWN: ("BF16", (384,), bytes(768)), UP: HALF}), r"is BF16 \[384\]"),
        (_weights({"lora_A.weight": HALF}), "no factor of an adapter"),
        (_weights({"base_model.model.q.weight": HALF}), "no factor of an adapter"),
    ],
)
def test_a_folder_that_is_none_is_refused(job: Job, change: Callable[[Path], object], words: str) -> None:
    directory = job.write(1)
    change(directory / peft_files.FOLDER)
    with pytest.raises(SnapshotError, match=words):
        open_adapter(directory)


def test_a_base_that_is_gone_gives_what_stands_in_for_it(job: Job, tmp_path: Path) -> None:
    job.write(1)
    gone = replace(job.lowrank(instead=Base(0, job.first.digest, tmp_path / "v0")), directory=tmp_path / "gone")
    assert [edge.encoding for edge in job.publish(1, gone).edges] == [DELTA]
