"""A worker that joins in earnest, confirms, and serves other bytes than it should: the honest one finishes by the coordinator."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from aiohttp import web

from p2p.adapters.tls import self_signed, server_context
from tests.conftest import load_module
from tests.e2e.cluster import Cluster, scripted_job

Hostile = load_module("echo2_attack_hostile", Path(__file__).with_name("hostile.py")).Hostile
GARBAGE = bytes(range(256)) * 1000


class Liar:
    """Serves garbage over TLS to whoever asks, and counts."""

    def __init__(self, folder: Path) -> None:
        self.asked = 0
        certificate, key, self.fingerprint = self_signed(folder, ["127.0.0.1"])
        self._tls = server_context(certificate, key)

    async def answer(self, _: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(body=GARBAGE)

    async def serve(self) -> tuple[web.AppRunner, int]:
        app = web.Application()
        app.router.add_route("*", "/{rest:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls).start()
        return runner, int(runner.addresses[0][1])


async def _lie(cluster: Cluster, job: str, folder: Path) -> int:
    """Confirm every version the moment it is out, serve garbage for it; how often it was asked until the job ended."""
    served = json.loads((cluster.home / "serve.json").read_text())
    code = (await asyncio.to_thread(cluster.run, lambda c: c.post("/invites", {})))["code"]
    peer = Liar(folder)
    runner, port = await peer.serve()
    async with Hostile(served["url"], served["public_key"], code) as liar:
        address = {"host": "127.0.0.1", "port": port, "certificate_sha256": peer.fingerprint}
        assert (await liar.join(peer=address))["notice"] == ""
        known: Any = None
        started = False
        async with asyncio.timeout(60):
            while (await asyncio.to_thread(cluster.job, job))["state"] not in ("completed", "failed"):
                _, beat = await liar.say("heartbeat", held=[])
                newest = beat.get("versions", [])
                if newest and newest[0]["digest"] != known:
                    known = newest[0]["digest"]
                    await liar.confirm(newest[0])
                if known and not started:
                    started = True
                    await asyncio.to_thread(cluster.start_worker, "honest")
                await asyncio.sleep(0.05)
    await runner.cleanup()
    return peer.asked


def test_garbage_from_a_peer_costs_time_and_nothing_else(tmp_path: Path, tiny_model: Path) -> None:
    with Cluster(tmp_path / "all", variables={"ECHO2_PEER_NETWORKS": '["127.0.0.0/8"]'}) as cluster:
        cluster.start_coordinator()
        job = cluster.submit(scripted_job(tiny_model, budget={"steps": 8}))
        asked = asyncio.run(_lie(cluster, job, tmp_path / "liar"))
        ended = cluster.job(job)
        assert ended["state"] == "completed", ended["reason"]
        assert cluster.audit(job)["ok"]
        assert asked > 0, "the honest worker never tried the peer"
