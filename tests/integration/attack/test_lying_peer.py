"""A worker that joins in earnest, confirms, and gives other bytes than it should: the honest one finishes with what is right."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from p2p.adapters.bulk.node import BulkNode
from p2p.adapters.bulk.settings import BulkSettings
from p2p.adapters.piece_store import UNSYNCED_FILES, PieceStore
from p2p.domain.manifest import Piece
from tests.conftest import load_module
from tests.e2e.cluster import Cluster, scripted_job
from tests.models.tiny import make_tiny_model

Hostile = load_module("echo2_attack_hostile", Path(__file__).with_name("hostile.py")).Hostile


class Lies(PieceStore):
    """Says that it holds every piece, and gives zeros of the right length."""

    def __init__(self, root: Path, truth: Path) -> None:
        """`truth`: a store where the sizes can be looked up."""
        super().__init__(root, files=UNSYNCED_FILES)
        self._truth = truth
        self.asked = 0

    def path(self, digest: str) -> Path:
        place, true = super().path(digest), self._truth / digest[:2] / digest
        if true.is_file() and not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(bytes(true.stat().st_size))
        return place

    def load(self, piece: Piece, buffer: bytearray) -> None:
        self.asked += 1
        buffer[:] = bytes(piece.size)


async def _lie(cluster: Cluster, job: str, folder: Path) -> int:
    """Confirm every version the moment it is out, and give zeros for it; how often it was asked until the job ended."""
    served = json.loads((cluster.home / "serve.json").read_text())
    code = (await asyncio.to_thread(cluster.run, lambda c: c.post("/invites", {})))["code"]
    lies = Lies(folder / "pieces", cluster.home / "pieces")
    async with Hostile(served["url"], served["public_key"], code) as liar:
        settings = BulkSettings(liar.id, served["public_key"], host="127.0.0.1", allowed_networks=("127.0.0.0/8",))
        node = BulkNode(settings, liar.key, lies, lambda _: None)
        found = node.start()
        assert found is not None
        address = {"host": "127.0.0.1", "port": found.port, "certificate_sha256": found.certificate_sha256}
        assert (await liar.join(peer=address))["notice"] == ""
        known: Any = None
        started = False
        async with asyncio.timeout(90):
            while (await asyncio.to_thread(cluster.job, job))["state"] not in ("completed", "failed"):
                _, beat = await liar.say("heartbeat", held=[], uplink_bytes_per_s=1e8)
                newest = beat.get("versions", [])
                if newest and newest[0]["digest"] != known:
                    known = newest[0]["digest"]
                    await liar.confirm(newest[0])
                if known and not started:
                    started = True
                    await asyncio.to_thread(cluster.start_worker, "honest")
                await asyncio.sleep(0.05)
        await asyncio.to_thread(node.close)
    return lies.asked


@pytest.mark.long
def test_garbage_from_a_peer_costs_time_and_nothing_else(tmp_path: Path) -> None:
    """The seeder is slow and the versions of many pieces, so that the liar is asked."""
    model = make_tiny_model(tmp_path / "model", width=256)
    variables = {"ECHO2_PEER_NETWORKS": '["127.0.0.0/8"]', "ECHO2_SEEDER_UP_MBIT": "3"}
    with Cluster(tmp_path / "all", variables=variables) as cluster:
        cluster.start_coordinator()
        job = cluster.submit(scripted_job(model, budget={"steps": 4}))
        asked = asyncio.run(_lie(cluster, job, tmp_path / "liar"))
        ended = cluster.job(job)
        assert ended["state"] == "completed", ended["reason"]
        assert cluster.audit(job)["ok"]
        assert asked > 0, "the honest worker never tried the peer"
