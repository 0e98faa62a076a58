"""Versions by deltas: the cheapest path from what the worker holds, another one after a failure, and pieces brought ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from coordinator.wire import messages as wire
from p2p.adapters.publish import Encoder
from p2p.adapters.snapshot_dir import digest_of
from p2p.domain.batches import text_hash
from p2p.domain.manifest import Manifest
from tests.integration.worker_node.test_worker import Until, running, settings_for


@pytest.fixture
def make_next(make_model: Callable[[int], Path], tmp_path: Path) -> Callable[[int], Path]:
    """Version n of a line of models of which each differs from the one before in a few elements."""

    def make(number: int) -> Path:
        if number == 0:
            return make_model(0)
        directory = tmp_path / "line" / str(number)
        before = tmp_path / "line" / str(number - 1) if number > 1 else tmp_path / "models" / "0"
        directory.mkdir(parents=True)
        (directory / "config.json").write_bytes((before / "config.json").read_bytes())
        weights = load_file(before / "model.safetensors")["w"].copy()
        weights[number % 64, ::8] = np.nextafter(weights[number % 64, ::8], 9.0, dtype=np.float32)
        save_file({"w": weights}, directory / "model.safetensors", metadata={"format": "pt"})
        return directory

    return make


def on_disk(tmp_path: Path, manifest: Manifest) -> bool:
    """Whether the version is stored with the very bits."""
    versions = tmp_path / "worker" / "weights" / "versions"
    (directory,) = versions.glob(f"[!.]*-{manifest.version}-{manifest.digest[:32]}")
    return digest_of(directory) == manifest.digest


async def test_a_worker_in_step_fetches_the_delta_only(
    coordinator: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    await coordinator.start()
    coordinator.publish(make_next(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        manifest = coordinator.publish(make_next(1), 1, base=0)
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
        assert on_disk(tmp_path, manifest)
    delta = manifest.edges[0]
    assert coordinator.confirms[-1].fetched_bytes == delta.size < manifest.nbytes / 20


async def test_a_worker_that_was_away_comes_back_over_the_chain(
    coordinator: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Six versions came out meanwhile: six hops are fetched and applied at once, and no snapshot."""
    await coordinator.start()
    coordinator.publish(make_next(0), 0)
    settings = settings_for(coordinator, tmp_path / "worker")
    async with running(settings):
        await until(lambda: coordinator.confirms, "version 0")
    coordinator.confirms.clear()
    for number in range(1, 7):
        manifest = coordinator.publish(make_next(number), number, base=number - 1)
    async with running(settings):
        await until(lambda: coordinator.confirms and coordinator.confirms[-1].version == 6, "version 6")
        assert on_disk(tmp_path, manifest)
    chain = sum(hop.edge.size for hop in coordinator.hops if hop.edge.base_digest is not None)
    assert coordinator.confirms[-1].fetched_bytes == chain
    coordinator.confirms.clear()
    pieces = coordinator.requests["piece"]
    async with running(settings):
        await until(lambda: coordinator.confirms, "the stored version again")
    assert coordinator.requests["piece"] == pieces, "its record, hops and all, was read back"


async def test_after_a_failed_apply_another_path_is_asked_for(
    coordinator: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """A signed hop that leads to other bits: the old version stays, its edge and base are doubted, and a keyframe is taken instead."""
    await coordinator.start()
    coordinator.publish(make_next(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        for number in (1, 2):
            coordinator.encode(make_next(number), number, base=0)
        wrong, right = coordinator.hops[-2:]
        lying = replace(right, edge=replace(right.edge, pieces=wrong.edge.pieces, transfer=None))
        coordinator.manifests[2] = replace(coordinator.manifests[2], edges=(lying.edge,))
        coordinator.hops[-1] = lying
        seen: list[Any] = []
        coordinator.before = lambda route, request: seen.append(request.query) if route == "manifest" else None
        coordinator.newest = 2
        await until(lambda: len(seen) >= 2, "a second try")
        assert "doubted" not in seen[0]
        assert set(seen[1]["doubted"].split(",")) == {lying.way.id, coordinator.manifests[0].digest}
        assert coordinator.confirms[-1].version == 0
        assert on_disk(tmp_path, coordinator.manifests[0]), "the old version is kept"
        coordinator.hops += Encoder(coordinator.store_dir).add_edges(
            coordinator.directories[2], coordinator.manifests[2], keyframe=True
        )
        await until(lambda: coordinator.confirms[-1].version == 2, "version 2", limit_s=40.0)
        assert on_disk(tmp_path, coordinator.manifests[2])


async def test_pieces_of_a_version_that_is_being_encoded_are_brought_ahead(
    coordinator: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    """Announced at last, the version costs no further piece, and its price names what came ahead."""
    await coordinator.start()
    base = coordinator.publish(make_next(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        coordinator.encode(make_next(1), 1, base=0)
        manifest = coordinator.manifests[1]
        transfer = text_hash(coordinator.batches[1][0])
        before = coordinator.requests["piece"]
        coordinator.forthcoming = (wire.Forthcoming(job_id="job", version=1, base_digest=base.digest, transfer=transfer),)
        needed = len(set(manifest.edges[0].pieces))
        await until(lambda: coordinator.requests["piece"] == before + needed, "the pieces ahead")
        coordinator.forthcoming, coordinator.newest = (), 1
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
        assert coordinator.requests["piece"] == before + needed
    assert coordinator.confirms[-1].fetched_bytes == manifest.edges[0].size


async def test_a_batch_of_another_version_is_given_up_and_harms_nothing(
    coordinator: Any, make_next: Callable[[int], Path], tmp_path: Path, until: Until
) -> None:
    await coordinator.start()
    base = coordinator.publish(make_next(0), 0)
    async with running(settings_for(coordinator, tmp_path / "worker")):
        await until(lambda: coordinator.confirms, "version 0")
        coordinator.encode(make_next(1), 1, base=0)
        foreign = coordinator.batches[1][0].replace('"version":1', '"version":7')
        coordinator.batches = {1: [foreign]}
        before = coordinator.requests["piece"]
        news = wire.Forthcoming(job_id="job", version=1, base_digest=base.digest, transfer=text_hash(foreign))
        coordinator.forthcoming = (news,)
        await until(lambda: coordinator.requests["batches"] >= 1, "the batches")
        assert coordinator.requests["piece"] == before
        coordinator.newest = 1
        await until(lambda: coordinator.confirms[-1].version == 1, "version 1")
