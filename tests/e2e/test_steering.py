"""A job is steered while it runs: paused, resumed, given another S and budget, cancelled; and it runs on PostgreSQL too."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tests.e2e.cluster import Cluster, scripted_job


def test_pause_change_resume_and_cancel(tmp_path: Path, tiny_model: Path) -> None:
    """Each order takes effect at the next seal, and every state tells its reason."""
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        job_id = cluster.submit(scripted_job(tiny_model, staleness={"max": 3}, budget={"steps": 100_000}))
        cluster.start_worker("one")
        cluster.start_worker("two")
        cluster.until(lambda: cluster.job(job_id)["committed_steps"] >= 4, "four steps")
        cluster.run(lambda c: c.post(f"/jobs/{job_id}/pause", {"reason": "lunch"}))
        time.sleep(1.5)  # the step under way is committed
        paused = cluster.job(job_id)
        assert (paused["state"], "lunch" in paused["reason"]) == ("paused", True)
        cluster.run(lambda c: c.patch(f"/jobs/{job_id}", {"staleness_max": 0}))
        time.sleep(1.5)
        assert cluster.job(job_id)["committed_steps"] == paused["committed_steps"]
        cluster.run(lambda c: c.post(f"/jobs/{job_id}/resume", {"reason": ""}))
        first = paused["committed_steps"]
        cluster.until(lambda: cluster.job(job_id)["committed_steps"] >= first + 4, "four more steps with S = 0", within_s=120)
        ages = cluster.rows("SELECT staleness FROM batches WHERE job_id = ? AND step >= ?", job_id, first)
        assert ages
        assert all(json.loads(age) == {"0": 2} for (age,) in ages)
        now = cluster.job(job_id)["committed_steps"]
        cluster.run(lambda c: c.patch(f"/jobs/{job_id}", {"budget": {"steps": now + 6}}))
        ended = cluster.until_ended(job_id, within_s=120, restart=False)
        assert (ended["state"], ended["committed_steps"]) == ("completed", now + 6)
        assert cluster.audit(job_id)["ok"]


def test_cancelled_in_the_middle(tmp_path: Path, tiny_model: Path) -> None:
    """Nothing is pending after a cancel, and the workers stay for the next job."""
    with Cluster(tmp_path) as cluster:
        cluster.start_coordinator()
        first = cluster.submit(scripted_job(tiny_model, budget={"steps": 100_000}))
        second = cluster.submit(scripted_job(tiny_model, budget={"steps": 3}))
        cluster.start_worker("one")
        cluster.until(lambda: cluster.job(first)["committed_steps"] >= 3, "three steps")
        assert cluster.job(second)["state"] == "queued"
        cluster.run(lambda c: c.post(f"/jobs/{first}/cancel", {"reason": "enough"}))
        ended = cluster.until_ended(first, within_s=60, restart=False)
        assert ended["state"] == "cancelled"
        cluster.until(
            lambda: cluster.audit(first)["ok"] and not cluster.job(first)["work"]["groups"].get("issued"), "all is settled"
        )
        assert cluster.until_ended(second, within_s=120, restart=False)["state"] == "completed"
        assert cluster.audit(second)["ok"]


def test_on_postgresql_with_a_crash(tmp_path: Path, tiny_model: Path, postgres_url: str) -> None:
    """The same system on a real PostgreSQL server, coordinator killed in the middle."""
    with Cluster(tmp_path, variables={"ECHO2_DATABASE_URL": postgres_url}) as cluster:
        cluster.start_coordinator(crash_at="step.before_commit:4")
        job_id = cluster.submit(scripted_job(tiny_model, budget={"steps": 8}))
        cluster.start_worker("one")
        cluster.start_worker("two")
        cluster.until(lambda: cluster.coordinator.poll() is not None, "the coordinator dies", within_s=120)
        ended = cluster.until_ended(job_id, within_s=180)
        assert (ended["state"], ended["committed_steps"]) == ("completed", 8), ended["reason"]
        audit = cluster.audit(job_id)
        assert audit["ok"], audit["findings"]
