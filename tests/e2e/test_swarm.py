"""Whole jobs with a swarm: most weights come from other workers, and a seeder that dies costs time, never a version."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from tests.e2e.cluster import Cluster, scripted_job
from tests.models.tiny import make_tiny_model

NAMES = ("one", "two", "three")
STEPS = 8
LOOPBACK = '["127.0.0.0/8"]'
SLOW_SEEDER = {"ECHO2_PEER_NETWORKS": LOOPBACK, "ECHO2_SEEDER_UP_MBIT": "3"}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A keyframe of some twenty pieces."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "wide", width=256)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def begin(cluster: Cluster, model: Path) -> str:
    """Three workers that listen; no control plane beside HTTPS: its tests are elsewhere."""
    cluster.start_coordinator()
    job = cluster.submit(scripted_job(model, budget={"steps": STEPS}))
    for name in NAMES:
        options = ("--peer-host", "127.0.0.1", "--peer-port", str(free_port()), "--no-libp2p")
        cluster.start_worker(name, options=options)
    return job


def check_end(cluster: Cluster, job: str) -> None:
    ended = cluster.until_ended(job, within_s=240, restart=False)
    assert ended["state"] == "completed", ended["reason"]
    assert cluster.audit(job)["ok"]
    assert all(worker.poll() is None for worker in cluster.workers.values()), cluster.last_words()


def fetched(cluster: Cluster, job: str) -> tuple[int, int]:
    """Bytes that workers fetched, and those of them that other workers gave."""
    [(total, by_peers)] = cluster.rows(
        "SELECT sum(fetched_bytes), sum(fetched_from_peers_bytes) FROM holdings WHERE job_id = ?", job
    )
    return int(total), int(by_peers)


def seeder_of(cluster: Cluster) -> int:
    """The seeder's process id."""
    assert cluster.coordinator is not None
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if parent == cluster.coordinator.pid and b"p2p.adapters.bulk.seeder" in command:
            return int(path.parent.name)
    raise AssertionError("no seeder runs")


@pytest.mark.long
def test_most_bytes_come_from_other_workers(tmp_path: Path, wide_model: Path) -> None:
    with Cluster(tmp_path / "all", variables=SLOW_SEEDER) as cluster:
        job = begin(cluster, wide_model)
        check_end(cluster, job)
        total, by_peers = fetched(cluster, job)
        print(f"{by_peers} of {total} bytes came from other workers")
        assert by_peers > total / 2


@pytest.mark.long
def test_a_seeder_killed_in_the_middle_is_started_again_and_the_job_goes_on(tmp_path: Path, wide_model: Path) -> None:
    """Twice: while the first keyframe is on its way, and in the middle of the job."""
    with Cluster(tmp_path / "all", variables=SLOW_SEEDER) as cluster:
        job = begin(cluster, wide_model)
        pieces = [tmp_path / "all" / name / "weights" / "pieces" for name in NAMES]
        cluster.until(lambda: any(list(place.glob("??/*")) for place in pieces), "first pieces")
        first = seeder_of(cluster)
        os.kill(first, signal.SIGKILL)
        cluster.until(lambda: cluster.job(job)["committed_steps"] >= STEPS // 2, "half of the steps", within_s=120)
        second = seeder_of(cluster)
        assert second != first
        os.kill(second, signal.SIGKILL)
        check_end(cluster, job)
