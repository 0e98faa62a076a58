"""Killing libp2p costs time, never a version: real processes, a whole job, libp2p whole, missing, killed or closed on the way."""

from __future__ import annotations

import json
import re
import ssl
import urllib.request
from collections.abc import Mapping
from pathlib import Path

import pytest

from p2p.adapters.control import stack
from tests.e2e.cluster import Cluster, scripted_job

FAULTS = Path(__file__).parent / "faults"
NAMES = ("one", "two")
STEPS = 8


def fault(words: str) -> dict[str, str]:
    return {"PYTHONPATH": str(FAULTS), "CONTROL_FAULT": words} if words else {}


class Run(Cluster):
    """A job with libp2p on, and where it stands."""

    job_id = ""

    def begin(self, model: Path, *, steps: int, worker_fault: str = "") -> None:
        self.start_coordinator()
        self.job_id = self.submit(scripted_job(model, budget={"steps": steps}))
        for name in NAMES:
            self.start_worker(name, variables=fault(worker_fault))

    def ways(self) -> list[str]:
        """Which way each worker's control messages go, as the coordinator knows it."""
        listed = self.run(lambda c: c.get("/workers"))["workers"]
        return [self.run(lambda c, one=one: c.get(f"/workers/{one['id']}"))["control"] for one in listed]  # type: ignore[misc]

    def metric(self, way: str) -> float:
        served = json.loads((self.home / "serve.json").read_text())
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with urllib.request.urlopen(f"{served['url']}/metrics", context=context, timeout=10.0) as answer:
            found = re.search(rf'echo2_control_requests_total{{way="{way}"}} ([0-9.]+)', answer.read().decode())
        assert found is not None
        return float(found[1])

    def are_newest(self) -> bool:
        """Whether each worker confirmed the newest published version."""
        [(newest,)] = self.rows("SELECT max(version) FROM publications WHERE job_id = ? AND state = 'published'", self.job_id)
        held = self.rows("SELECT worker_id, max(version) FROM holdings WHERE job_id = ? GROUP BY worker_id", self.job_id)
        return newest is not None and len(held) == len(NAMES) and all(version == newest for _, version in held)

    def steps(self) -> int:
        return int(self.job(self.job_id)["committed_steps"])

    def check_end(self, steps: int) -> None:
        """Paused before its end, so that versions stop: every worker is on the newest. Then to the end, and the audit."""
        self.until(lambda: self.steps() >= steps - 2, "the job goes on", within_s=120)
        self.run(lambda c: c.post(f"/jobs/{self.job_id}/pause", {"reason": "look"}))
        self.until(
            lambda: self.job(self.job_id)["state"] == "paused" and self.are_newest(), "every worker is on the newest version"
        )
        self.run(lambda c: c.post(f"/jobs/{self.job_id}/resume", {"reason": ""}))
        job = self.until_ended(self.job_id, within_s=120, restart=False)
        assert (job["state"], job["committed_steps"]) == ("completed", steps), job["reason"]
        audit = self.audit(self.job_id)
        assert audit["ok"], audit["findings"]
        assert all(process.poll() is None for process in self.workers.values()), self.last_words()


@pytest.fixture(autouse=True)
def needs_libp2p() -> None:
    if stack.version() is None:
        pytest.skip("libp2p is not installed (extra p2p)")


def run(folder: Path, *, coordinator_fault: str = "", libp2p: str = "true") -> Run:
    variables: Mapping[str, str] = {"ECHO2_LIBP2P": libp2p, "ECHO2_PEER_NETWORKS": '["127.0.0.0/8"]', **fault(coordinator_fault)}
    return Run(folder, variables=variables)


def test_with_libp2p(tmp_path: Path, tiny_model: Path) -> None:
    """Requests and announcements travel over libp2p, and the coordinator tells so."""
    with run(tmp_path) as cluster:
        cluster.begin(tiny_model, steps=6)
        cluster.until(lambda: cluster.ways() == ["libp2p", "libp2p"], "both use libp2p")
        cluster.until(lambda: cluster.metric("libp2p") > 0, "a request came over libp2p")
        cluster.check_end(6)


@pytest.mark.long
def test_libp2p_missing_on_the_workers(tmp_path: Path, tiny_model: Path) -> None:
    with run(tmp_path) as cluster:
        cluster.begin(tiny_model, steps=STEPS, worker_fault="missing")
        cluster.until(
            lambda: [way.startswith("https (libp2p cannot be used here") for way in cluster.ways()] == [True, True], "they say why"
        )
        cluster.check_end(STEPS)
        assert (cluster.metric("libp2p"), cluster.metric("https") > 0) == (0, True)


@pytest.mark.long
def test_libp2p_missing_on_the_coordinator(tmp_path: Path, tiny_model: Path) -> None:
    with run(tmp_path, coordinator_fault="missing") as cluster:
        cluster.begin(tiny_model, steps=STEPS)
        cluster.until(lambda: cluster.ways() == ["https (the coordinator has no libp2p)"] * 2, "they say why")
        cluster.check_end(STEPS)


@pytest.mark.long
def test_the_coordinators_port_is_closed_in_mid_job(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "now"
    with run(tmp_path / "run", coordinator_fault=f"closed {file}") as cluster:
        cluster.begin(tiny_model, steps=STEPS + 4)
        cluster.until(lambda: cluster.ways() == ["libp2p", "libp2p"], "both use libp2p")
        cluster.until(lambda: cluster.steps() >= 2, "two steps")
        file.touch()
        cluster.until(lambda: all(way.startswith("https (libp2p is down") for way in cluster.ways()), "both went over to HTTPS")
        cluster.check_end(STEPS + 4)


@pytest.mark.long
def test_the_workers_trio_threads_die_again_and_again(tmp_path: Path, tiny_model: Path) -> None:
    file = tmp_path / "now"
    with run(tmp_path / "run") as cluster:
        cluster.begin(tiny_model, steps=STEPS + 4, worker_fault=f"killed {file}")
        cluster.until(lambda: cluster.ways() == ["libp2p", "libp2p"], "both use libp2p")
        file.touch()
        cluster.until(lambda: all(way.startswith("https (") for way in cluster.ways()), "both went over to HTTPS")
        cluster.check_end(STEPS + 4)
