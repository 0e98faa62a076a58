"""A worker of a job with adapters: it keeps the first version, and comes from there to any other by the adapters alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from coordinator.wire import messages as wire
from p2p.adapters.publish import Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.hops import Hop
from p2p.domain.lineage import DELTA, LOWRANK
from p2p.domain.manifest import Manifest
from tests.factories_lowrank import defined, drawn, matrix, write_adapter
from tests.factories_p2p import weights, write_model
from tests.integration.worker_node.test_worker import Until, running, settings_for

Q, OTHER = matrix("a.q.weight", 64, 96), matrix("b.weight", 64, 96)
RANK, ALPHA = 4, 8


class Line:
    """Versions that adapters make of version 0, published by the small coordinator."""

    def __init__(self, coordinator: Any, root: Path) -> None:
        self.coordinator = coordinator
        self._root = root
        self._base = {
            one.name: np.frombuffer(weights(one.shape, n)[2], "<u2").reshape(one.shape) for n, one in enumerate((Q, OTHER))
        }
        self._publish(0, None, DELTA)
        coordinator.newest = 0
        coordinator.base = wire.BaseVersion(version=0, digest=coordinator.manifests[0].digest)

    def publish(self, version: int, *, first: str = DELTA) -> Manifest:
        """Announced with the edge that goes first; the other one follows."""
        manifest = self._publish(version, 0 if first == LOWRANK else version - 1, first)
        other = self.coordinator.against(version - 1) if first == LOWRANK else self.coordinator.against(0, LOWRANK)
        self.coordinator.hops += Encoder(self.coordinator.store_dir).add_edges(
            self.coordinator.directories[version], manifest, bases=[other]
        )
        self.coordinator.newest = version
        return manifest

    def _publish(self, version: int, base: int | None, encoding: str) -> Manifest:
        factors = drawn(Q, RANK, version, size=0.1)
        words = dict(self._base)
        if version:
            words[Q.name] = defined(self._base[Q.name], factors, ALPHA / RANK)
        config = json.dumps({"model_type": "qwen3", "vocab_size": 40}).encode()
        specs = {name: ("BF16", each.shape, each.tobytes()) for name, each in words.items()}
        directory = write_model(self._root / f"v{version}", specs, files={"config.json": config})
        if version:
            write_adapter(directory, {Q.name: factors}, rank=RANK, alpha=ALPHA)
        self.coordinator.encode(directory, version, base=base, encoding=encoding)
        found: Manifest = self.coordinator.manifests[version]
        return found

    def edge(self, encoding: str, version: int) -> Hop:
        (found,) = [hop for hop in self.coordinator.hops if (hop.edge.encoding, hop.version) == (encoding, version)]
        return found  # type: ignore[no-any-return]


class Here(NamedTuple):
    """What a worker has on disk: versions, and how many pieces."""

    versions: set[int]
    pieces: int


def here(tmp_path: Path, line: Line) -> Here:
    """Every version is there with the very bits."""
    root = tmp_path / "worker" / "weights"
    found = set()
    for record in (root / "versions").glob("*.json"):
        try:
            manifest = Manifest.from_json(json.loads(record.read_text())["manifest"])
            digest = digest_of(record.with_suffix(""))
        except FileNotFoundError:
            assert not record.exists()  # the worker removes it just now: the record goes first
            continue
        assert manifest == line.coordinator.manifests[manifest.version]
        assert digest == manifest.digest
        found.add(manifest.version)
    return Here(found, len(list((root / "pieces").glob("??/*"))))


@pytest.fixture
async def line(coordinator: Any, tmp_path: Path) -> Line:
    await coordinator.start()
    return Line(coordinator, tmp_path / "line")


async def test_a_worker_that_was_away_comes_back_by_the_adapters(line: Line, tmp_path: Path, until: Until) -> None:
    """Seven versions came out meanwhile: it fetches the factors of the newest, and nothing else."""
    coordinator, settings = line.coordinator, settings_for(line.coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.confirms, "version 0")
        line.publish(1)
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
        await until(lambda: {held.version for held in coordinator.beats[-1].held} == {1}, "version 0 is not served any more")
        assert here(tmp_path, line).versions == {0, 1}, "but kept"
    assert coordinator.confirms[-1].fetched_bytes == line.edge(LOWRANK, 1).edge.size
    coordinator.confirms.clear()
    for version in range(2, 9):
        line.publish(version)
    chain = sum(line.edge(DELTA, version).edge.size for version in range(2, 9))
    async with running(settings):
        await until(lambda: coordinator.confirms and coordinator.confirms[-1].version == 8, "version 8")
        await until(lambda: here(tmp_path, line).versions == {0, 8}, "version 1 goes, version 0 stays")
    assert coordinator.confirms[-1].fetched_bytes == line.edge(LOWRANK, 8).edge.size < chain / 8
    confirmed = [confirm.version for confirm in coordinator.confirms]
    assert 0 not in confirmed, "what is only kept is not loaded"


async def test_who_comes_late_brings_the_first_version_and_keeps_it(line: Line, tmp_path: Path, until: Until) -> None:
    """A keyframe and the factors; then each version by its factors, although its delta would do as well."""
    coordinator = line.coordinator
    for version in range(1, 5):
        line.publish(version)
    keyframe = next(hop for hop in coordinator.hops if hop.edge.encoding == "planes")
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 4")
        assert [confirm.version for confirm in coordinator.confirms] == [4]
        assert here(tmp_path, line).versions == {0, 4}
        files = sum(piece.size for piece in coordinator.manifests[4].pieces(()))
        expected = keyframe.edge.size + line.edge(LOWRANK, 4).edge.size + files
        assert coordinator.confirms[-1].fetched_bytes == expected
        line.publish(5, first=LOWRANK)
        await until(lambda: coordinator.confirms[-1].version == 5, "version 5")
        assert coordinator.confirms[-1].fetched_bytes == line.edge(LOWRANK, 5).edge.size
        await until(lambda: here(tmp_path, line).versions == {0, 5}, "the version before goes")
        line.publish(6, first=LOWRANK)
        await until(
            lambda: here(tmp_path, line) == Here({0, 6}, 3), "pieces of the last two edges and config.json, none of the keyframe"
        )


async def test_without_room_nothing_is_kept(line: Line, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than two models of space: every version comes by its delta, and version 0 goes when it is served no more."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(1 << 30, 1 << 30, 2 * 2 * 2 * 64 * 96 - 1))
    coordinator = line.coordinator
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        line.publish(1)
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
        await until(lambda: here(tmp_path, line).versions == {1}, "version 0 goes")
    shutil.rmtree(tmp_path / "worker")
    coordinator.confirms.clear()
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 1 again")
        assert here(tmp_path, line).versions == {1}


async def test_a_base_that_the_coordinator_has_no_more_is_done_without(
    line: Line, refused: Callable[..., Exception], tmp_path: Path, until: Until
) -> None:
    """The path over it is taken all the same; it is only not kept."""
    coordinator = line.coordinator
    line.publish(1)
    asked: list[str] = []

    def refuse(route: str, request: Any) -> None:
        if route == "manifest" and request.match_info["version"] == "0":
            asked.append(route)
            raise refused(404, "not_published")

    coordinator.before = refuse
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 1")
        assert here(tmp_path, line).versions == {1}
    assert asked


async def test_a_restart_knows_what_was_kept(line: Line, tmp_path: Path, until: Until) -> None:
    """From its record: the version is neither served nor dropped, though no manifest came yet."""
    coordinator, settings = line.coordinator, settings_for(line.coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.confirms, "version 0")
        line.publish(1)
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
    coordinator.confirms.clear()
    manifests = coordinator.requests["manifest"]
    async with running(settings):
        await until(lambda: coordinator.confirms, "version 1 from disk")
        assert [confirm.version for confirm in coordinator.confirms] == [1]
        assert coordinator.requests["manifest"] == manifests
        assert here(tmp_path, line).versions == {0, 1}
