"""A disk that is nearly full pauses jobs with that reason; nothing is lost, and with space they go on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from coordinator.rest_client import RequestFailed
from tests.e2e.cluster import Cluster, scripted_job


@pytest.mark.long
def test_jobs_pause_and_go_on(tmp_path: Path, tiny_model: Path) -> None:
    """The minimum is set above what is free, then below it: the same as filling and freeing the disk."""
    free = shutil.disk_usage(tmp_path).free
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        cluster.start_worker("w1")
        job = cluster.submit(scripted_job(tiny_model, budget={"steps": 25}))
        cluster.until(lambda: cluster.job(job)["committed_steps"] >= 2, "two steps")
        assert cluster.coordinator is not None
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster._variables["ECHO2_MINIMUM_FREE_BYTES"] = str(2 * free)
        cluster.start_coordinator()
        cluster.until(lambda: cluster.job(job)["state"] == "paused", "it pauses", within_s=30)
        assert "disk_full" in cluster.job(job)["reason"]
        with pytest.raises(RequestFailed) as refused:
            cluster.submit(scripted_job(tiny_model))
        assert (refused.value.status, refused.value.code) == (503, "disk_full")
        held = cluster.job(job)["committed_steps"]
        cluster.coordinator.kill()
        cluster.coordinator.wait()
        cluster._variables["ECHO2_MINIMUM_FREE_BYTES"] = "1"
        cluster.start_coordinator()
        cluster.run(lambda c: c.post(f"/jobs/{job}/resume", {"reason": "space was made"}))
        ended = cluster.until_ended(job, within_s=90)
        assert ended["state"] == "completed"
        assert ended["committed_steps"] == 25 >= held
        assert cluster.audit(job)["ok"]
