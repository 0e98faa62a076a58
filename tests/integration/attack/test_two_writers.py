"""One coordinator per data directory, and what happens when somebody takes its lock away."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.cluster import BIN, Cluster, scripted_job


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path) as made:
        made.start_coordinator()
        yield made


def second(cluster: Cluster) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "echo2"), "serve", "--data-dir", str(cluster.home), "--port", "0"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_a_second_serve_on_the_same_data_is_refused_in_words(cluster: Cluster) -> None:
    before = (cluster.home / "serve.json").read_bytes()
    done = second(cluster)
    assert done.returncode == 1
    assert "is held by pid" in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert (cluster.home / "serve.json").read_bytes() == before, "the first one's address was left alone"
    assert cluster.run(lambda c: c.get("/jobs"))["jobs"] == []


@pytest.mark.long
def test_without_its_lock_file_a_coordinator_writes_nothing_more(cluster: Cluster, tiny_model: Path) -> None:
    """Whoever removes the file lets a second writer in: the first one must not write then."""
    cluster.start_worker("w1")
    job = cluster.submit(scripted_job(tiny_model, budget={"steps": 12}))
    cluster.until(lambda: cluster.job(job)["committed_steps"] >= 2, "two steps")
    (lock,) = cluster.home.glob("*.lock")
    lock.unlink()
    assert cluster.coordinator is not None
    cluster.until(lambda: cluster.coordinator and cluster.coordinator.poll() is not None, "it ends", within_s=30)
    ended = cluster.until_ended(job, within_s=90)
    assert (ended["state"], ended["committed_steps"]) == ("completed", 12)
    assert cluster.audit(job)["ok"]
